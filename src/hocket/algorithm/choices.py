"""Functions that `algorithm.*` chooses by name, built in or your own.

docs/how-to/own_algorithm.md has the guide.

Suffixes: g rollouts of a group, n rollouts of a batch, t steps of one rollout (its sampled tokens
or, with algorithm.credit=turn, its turns), k turns of a batch, bt positions of a micro-batch, which
hold 0 outside `mask_bt` and are ignored there.

Torch, which takes seconds to import, is not imported: a config is checked at once.
"""

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, Field

from hocket.common.registry import Registry, options_of
from hocket.config import AlgorithmConfig
from hocket.config.sections import ascending
from hocket.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

F = TypeVar("F", bound=Callable[..., Any])
Per = Literal["group", "batch", "token"]
# Which tokens an objective clips: those whose ratio is outside the bounds or, if "pessimistic", only
# where the clipped term is the smaller one: above for advantages > 0, below for advantages < 0.
Clips = Literal["none", "ratio", "pessimistic"]
Discount = Annotated[float, Field(gt=0, le=1)]
_Low = Annotated[float, Field(ge=0)]
_High = Annotated[float, Field(gt=0)]
Bounds = Annotated[tuple[_Low, _High], AfterValidator(ascending)]

MAX_SURVIVOR_WEIGHT = 2.0  # the highest weight of a token in a sequence that sequence_mask keeps


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A function that the config chooses, with what its decorator declares."""

    function: Callable[..., Any]
    arguments: tuple[str, ...]  # parameters that hocket passes; all others are options
    offered: tuple[str, ...] = ()  # those that hocket could pass
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # values from the config
    per: Per = "batch"  # whose rewards an advantage gets in a call: of a group, a batch, a rollout
    needs: tuple[str, ...] = ()  # columns measured before a step: "values" brings a critic
    clips: Clips = "none"  # the tokens that train/clip_* count
    in_loss: bool = True  # whether the gradient of a KL estimate is a gradient of the KL

    @property
    def compares(self) -> bool:
        """Whether an advantage compares rollouts, so that equal rewards have no signal."""
        return self.per != "token"

    def __call__(self, **offered: Any) -> Any:
        """Call the function with its options, and with those of the offered arguments it takes."""
        arguments = {name: offered[name] for name in self.arguments}
        return self.function(**arguments, **self.options)


# Imported when they are chosen, as their module imports torch.
_IN_CREDIT = dict.fromkeys(("episode", "turn", "step_groups"), "hocket.algorithm.credit")
KINDS = {  # the registry of each setting algorithm.KIND
    "advantage": Registry[Choice]("advantage"),
    "credit": Registry[Choice]("credit", **_IN_CREDIT),
    "objective": Registry[Choice]("objective"),
    "aggregate": Registry[Choice]("aggregate"),
    "kl": Registry[Choice]("kl"),
    "correction": Registry[Choice]("correction"),
}
_chosen: dict[tuple[str, str], Choice] = {}  # (kind, setting as text) → what `choose` returned


def choose(kind: str, chosen: str | Mapping[str, Any]) -> Choice:
    """Look up a choice by its name or {name: NAME, option: value}, with its options checked.

    Raises ConfigError for an unknown name or option.
    """
    # The loss looks its functions up for each micro-batch, so options are read only once.
    key = kind, str(chosen)
    if key not in _chosen:
        options = {"name": chosen} if isinstance(chosen, str) else dict(chosen)
        name = options.pop("name")
        section = f"algorithm.{kind}"
        choice = KINDS[kind].get(name, f"{section}: ")
        keys = choice.offered or choice.arguments
        checked = options_of(f"{kind} {name}", choice.function, options, section=section, keys=keys)
        _chosen[key] = dataclasses.replace(choice, options=checked)
    return _chosen[key]


def check(algorithm: AlgorithmConfig, group_size: int) -> None:
    """Raise ConfigError unless the chosen functions exist and fit together; load plugins first."""
    for kind in ("objective", "aggregate", "correction", "credit"):
        choose(kind, getattr(algorithm, kind))
    _check_advantage(algorithm, group_size)
    if algorithm.preset == "distill" and algorithm.reference is None:
        raise ConfigError(
            "algorithm.preset=distill needs a teacher: set algorithm.reference to its folder or "
            "server"
        )
    if algorithm.kl != "off":
        _check_kl(algorithm)


def _check_advantage(algorithm: AlgorithmConfig, group_size: int) -> None:
    advantage = choose("advantage", algorithm.advantage)
    setting = f"algorithm.advantage={algorithm.advantage}"
    # Credit compares turns within a group; "turn" also works where no rollouts are compared.
    fits_credit = advantage.per == "group" or (
        advantage.per == "token" and algorithm.credit == "turn"
    )
    if algorithm.by_turn and not fits_credit:
        raise ConfigError(
            f"algorithm.credit={algorithm.credit} compares turns of a group, {setting} does not: "
            "set another, or leave credit out"
        )
    if not advantage.compares and algorithm.scale in ("group", "batch"):
        raise ConfigError(f"{setting} compares no rollouts: set algorithm.scale to tokens or none")
    if advantage.compares and group_size == 1:
        raise ConfigError(
            f"rollout.group_size=1 leaves {setting} nothing to compare with: set 2 or more"
        )


def _check_kl(algorithm: AlgorithmConfig) -> None:
    estimate = choose("kl", algorithm.kl)
    if algorithm.kl_in == "loss" and not estimate.in_loss:
        raise ConfigError(
            f"{algorithm.kl} in the loss has no expected gradient: set algorithm.kl_in=reward, or "
            "algorithm.kl=k2"
        )
    if algorithm.kl_in != "loss" and "ratio_bt" in estimate.arguments:
        raise ConfigError(
            f"algorithm.kl={algorithm.kl} needs the policy's ratio: set algorithm.kl_in=loss"
        )


def _register(
    kind: str, offered: Sequence[str], name: str, declared: Mapping[str, Any]
) -> Callable[[F], F]:
    """Make a decorator that registers a function; `offered`: the arguments that it may take."""

    def add(function: F) -> F:
        parameters = inspect.signature(function).parameters
        arguments = tuple(parameter for parameter in parameters if parameter in offered)
        choice = Choice(function=function, arguments=arguments, offered=tuple(offered), **declared)
        KINDS[kind].register(name)(choice)
        return function

    return add


def advantage(name: str, *, per: Per, needs: tuple[str, ...] = ()) -> Callable[[F], F]:
    """Register an advantage (decorator): rewards → advantages, float64.

    It takes rewards_g; or rewards_n, group_n and parts_n; or rewards_t. Its other arguments are
    options.

    Args:
        name: its name in `algorithm.advantage`.
        per: whose rewards a call gets: of a "group", of a "batch", or per "token" of one rollout.
        needs: columns that the trainer measures before a step. The function gets each as NAME_t,
            and may return (advantages, returns), the targets of a critic.

    Example: a plugin file, for `algorithm.advantage={name: above, quantile: 0.9}`.

        @advantage("above", per="group")
        def above(rewards_g, quantile: float = 0.5):
            return rewards_g - rewards_g.quantile(quantile)
    """
    offered = ["rewards_g", "rewards_n", "group_n", "parts_n", "rewards_t"]
    offered += [f"{column}_t" for column in needs]
    return _register("advantage", offered, name, {"per": per, "needs": needs})


def credit(name: str) -> Callable[[F], F]:
    """Register a credit (decorator): it gives all turns of a batch their advantages, [k].

    For each turn it gets the reward (rewards_k), the number of its episode (owner_k), its place in
    the episode (place_k) and the state in which it began (state_k). For each episode it gets the
    reward (totals_n) and the group (group_n). compare(values, groups) computes advantages as
    `algorithm.advantage` says.

    Args:
        name: its name in `algorithm.credit`.

    Example: a plugin file. Later turns have a smaller part in the episode's advantage.

        @credit("fading")
        def fading(totals_n, group_n, owner_k, place_k, compare, keep: float = 0.9):
            advantages_n = compare(totals_n, group_n)
            turns = zip(owner_k, place_k)
            return [advantages_n[owner].item() * keep**place for owner, place in turns]
    """
    offered = ("rewards_k", "owner_k", "place_k", "state_k", "totals_n", "group_n", "compare")
    return _register("credit", offered, name, {})


def objective(name: str, *, clips: Clips = "none") -> Callable[[F], F]:
    """Register an objective (decorator): the term of each token, [bt], which is maximised.

    It takes ratio_bt, logprobs_bt, entropy_bt, advantages_bt, rollout_logprobs_bt, mask_bt,
    sample_bt, low and high. Gradients pass through the first three.

    Args:
        name: its name in `algorithm.objective`.
        clips: which tokens count as clipped in the metrics: "none"; those whose "ratio" is outside
            of (low, high); or "pessimistic", those of them whose term becomes smaller by it.

    Example: a plugin file, for `algorithm.objective={name: capped, most: 3}`.

        @objective("capped", clips="ratio")
        def capped(ratio_bt, advantages_bt, most: float = 2.0):
            return ratio_bt.clamp(max=most) * advantages_bt
    """
    offered = ["ratio_bt", "logprobs_bt", "entropy_bt"]
    offered += ["advantages_bt", "rollout_logprobs_bt", "mask_bt", "sample_bt", "low", "high"]
    return _register("objective", offered, name, {"clips": clips})


def aggregate(name: str) -> Callable[[F], F]:
    """Register an aggregate (decorator): the weight of each token in the loss, [bt].

    It takes mask_bt (float32), sample_bt, num_tokens and num_sequences (over all ranks), and
    longest (`rollout.max_tokens`).

    Args:
        name: its name in `algorithm.aggregate`.

    Example: a plugin file. All tokens of a step count alike.

        @aggregate("alike")
        def alike(mask_bt, num_tokens):
            return mask_bt / num_tokens
    """
    offered = ("mask_bt", "sample_bt", "num_tokens", "num_sequences", "longest")
    return _register("aggregate", offered, name, {})


def kl(name: str, *, in_loss: bool = True) -> Callable[[F], F]:
    """Register an estimate of the KL per token (decorator).

    It takes log_ratio (log policy − log reference) and, in the loss, ratio_bt.

    Args:
        name: its name in `algorithm.kl`.
        in_loss: whether its gradient is one of the KL; if not, `algorithm.kl_in=loss` is refused.

    Example: a plugin file with k3 up to a limit.

        @kl("capped_k3")
        def capped_k3(log_ratio, most: float = 10.0):
            return k3(log_ratio).clamp(max=most)
    """
    return _register("kl", ("log_ratio", "ratio_bt"), name, {"in_loss": in_loss})


def correction(name: str) -> Callable[[F], F]:
    """Register a correction (decorator): the weight of each token, [bt].

    It takes log_importance_bt (the trainer's log-prob minus the engine's), mask_bt and sample_bt.

    Args:
        name: its name in `algorithm.correction`.

    Example: a plugin file that keeps only tokens with a ratio near 1.

        @correction("near_one")
        def near_one(log_importance_bt, most: float = 0.1):
            return (log_importance_bt.abs() < most).float()
    """
    return _register("correction", ("log_importance_bt", "mask_bt", "sample_bt"), name, {})


@advantage("mean", per="group")
def mean(rewards_g: "Tensor") -> "Tensor":
    """Compute R − mean of the group (arXiv 2402.03300)."""
    return rewards_g - total(rewards_g) / len(rewards_g)


@advantage("leave_one_out", per="group")
def leave_one_out(rewards_g: "Tensor") -> "Tensor":
    """Compute R − mean of the others = G / (G − 1) · (R − mean) (arXiv 2402.14740)."""
    size = len(rewards_g)
    return mean(rewards_g) * (size / max(size - 1, 1))


@advantage("none", per="token")
def none(rewards_t: "Tensor", discount: Annotated[float, Field(ge=0, le=1)] = 1.0) -> "Tensor":
    """Compute Σ_{s≥t} discount^(s−t) · reward_s (arXiv 2501.03262)."""
    returns = []
    following = 0.0
    for reward in reversed(rewards_t.tolist()):
        following = reward + discount * following
        returns.append(following)
    return rewards_t.new_tensor(returns[::-1])


@advantage("critic", per="token", needs=("values",))
def critic(
    rewards_t: "Tensor",
    values_t: "Tensor",
    discount: Discount = 1.0,
    gae_lambda: Annotated[float, Field(ge=0, le=1)] = 1.0,
) -> tuple["Tensor", "Tensor"]:
    """Compute generalized advantages, and the returns that a critic learns (arXiv 1506.02438).

    δ_t = reward_t + discount · V_{t+1} − V_t;  A_t = δ_t + discount · λ · A_{t+1};
    returns = A + V. V_T = 0.
    """
    advantages = []
    following = 0.0
    next_value = 0.0
    for reward, value in zip(
        reversed(rewards_t.tolist()), reversed(values_t.tolist()), strict=True
    ):
        following = reward + discount * next_value - value + discount * gae_lambda * following
        advantages.append(following)
        next_value = value
    advantages_t = rewards_t.new_tensor(advantages[::-1])
    return advantages_t, advantages_t + values_t


@objective("ppo", clips="pessimistic")
def ppo(
    ratio_bt: "Tensor",
    advantages_bt: "Tensor",
    low: float,
    high: float,
    dual_clip: Annotated[float, Field(gt=1)] | None = None,
) -> "Tensor":
    """Compute the smaller of r·A and clip(r)·A (arXiv 1707.06347).

    With dual_clip it is at least dual_clip·A where A < 0 (arXiv 1912.09729).
    """
    smaller_bt = (ratio_bt * advantages_bt).minimum(ratio_bt.clamp(low, high) * advantages_bt)
    if dual_clip is None:
        return smaller_bt
    return smaller_bt.maximum(dual_clip * advantages_bt).where(advantages_bt < 0, smaller_bt)


@objective("cispo", clips="ratio")
def cispo(
    ratio_bt: "Tensor", advantages_bt: "Tensor", logprobs_bt: "Tensor", low: float, high: float
) -> "Tensor":
    """Compute clip(r)·A·log-prob with clip(r) held constant (arXiv 2506.13585)."""
    return ratio_bt.clamp(low, high).detach() * advantages_bt * logprobs_bt


@objective("none")
def unclipped(ratio_bt: "Tensor", advantages_bt: "Tensor") -> "Tensor":
    """Compute r·A without a clip."""
    return ratio_bt * advantages_bt


@aggregate("token_mean")
def token_mean(mask_bt: "Tensor", num_tokens: int) -> "Tensor":
    """Weigh all tokens of the step alike: 1 / N."""
    return mask_bt / num_tokens


@aggregate("seq_mean_token_mean")
def sequence_mean(mask_bt: "Tensor", sample_bt: "Tensor", num_sequences: int) -> "Tensor":
    """Weigh all sequences alike: 1 / (S · the sequence's trained tokens)."""
    lengths_bt = sequence_sums(mask_bt, sample_bt).clamp(min=1).to(mask_bt.dtype)
    return mask_bt / (lengths_bt * num_sequences)


@aggregate("seq_mean_token_sum")
def sequence_sum(mask_bt: "Tensor", num_sequences: int) -> "Tensor":
    """Weigh each token by 1 / S, so that a long sequence counts more."""
    return mask_bt / num_sequences


@aggregate("constant")
def constant(mask_bt: "Tensor", num_sequences: int, longest: int) -> "Tensor":
    """Weigh each token by 1 / (S · longest completion) (arXiv 2503.20783)."""
    return mask_bt / (num_sequences * longest)


@kl("k1", in_loss=False)
def k1(log_ratio: "Tensor") -> "Tensor":
    """Compute x = log policy − log reference, unbiased; as a loss its expected gradient is 0."""
    return log_ratio


@kl("k2")
def k2(log_ratio: "Tensor") -> "Tensor":
    """Compute x² / 2, whose expected gradient is that of the KL."""
    return log_ratio.square() / 2


@kl("k3")
def k3(log_ratio: "Tensor") -> "Tensor":
    """Compute exp(−x) − 1 + x ≥ 0 (arXiv 2510.01555 compares the gradients of all three)."""
    return (-log_ratio).expm1() + log_ratio


@correction("none")
def uncorrected(log_importance_bt: "Tensor") -> "Tensor":
    """Weigh each token by 1."""
    return log_importance_bt.new_ones(log_importance_bt.shape)


@correction("truncate")
def truncate(log_importance_bt: "Tensor", bounds: Bounds = (0.0, 2.0)) -> "Tensor":
    """Clamp the importance weights to the bounds."""
    low, high = bounds
    return log_importance_bt.exp().clamp(low, high)


@correction("mask")
def mask(log_importance_bt: "Tensor", bounds: Bounds = (0.5, 5.0)) -> "Tensor":
    """Drop tokens whose importance weight lies outside the bounds."""
    low, high = bounds
    importance_bt = log_importance_bt.exp()
    return importance_bt.where((importance_bt >= low) & (importance_bt <= high), 0.0)


@correction("sequence_mask")
def sequence_mask(
    log_importance_bt: "Tensor",
    mask_bt: "Tensor",
    sample_bt: "Tensor",
    bounds: Bounds = (0.99, 1.01),
) -> "Tensor":
    """Keep the sequences whose geometric mean of weights lies within the bounds.

    Their tokens have weights of at most 2, all others 0.
    """
    low, high = bounds
    mean_bt = sequence_means(log_importance_bt, mask_bt, sample_bt).exp()
    capped_bt = log_importance_bt.exp().clamp(max=MAX_SURVIVOR_WEIGHT)
    return capped_bt.where((mean_bt >= low) & (mean_bt <= high), 0.0)


def total(values_n: "Tensor") -> "Tensor":
    """Add the values in order, so that every CPU gives the same bits."""
    return values_n.cumsum(0)[-1]


def deviation(values_n: "Tensor") -> "Tensor":
    """Compute the unbiased standard deviation; 0 for a single value."""
    centred_n = values_n - total(values_n) / len(values_n)
    return (total(centred_n.square()) / max(len(values_n) - 1, 1)).sqrt()


def sequence_means(values_bt: "Tensor", mask_bt: "Tensor", sample_bt: "Tensor") -> "Tensor":
    """Compute at every position the mean over its sequence's trained tokens, [bt]."""
    lengths_bt = sequence_sums(mask_bt, sample_bt).clamp(min=1)
    return (sequence_sums(values_bt, sample_bt) / lengths_bt).to(values_bt.dtype)


def sequence_sums(values_bt: "Tensor", sample_bt: "Tensor") -> "Tensor":
    """Compute at every position the sum over its sequence, float64 [bt].

    `sample_bt`: as in `LossBatch`.
    """
    index_bt = sample_bt + 1  # positions of no sequence, -1, add up in place 0
    values_n = values_bt.double().flatten()
    sums_n = values_n.new_zeros(values_n.numel() + 1)
    return sums_n.index_add(0, index_bt.flatten(), values_n)[index_bt]
