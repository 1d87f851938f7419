"""Define what a step minimizes, and the columns that it needs measured before the update."""

import dataclasses
import functools
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from hocket.algorithm.losses import LossOutput, policy_loss
from hocket.common.registry import Registry
from hocket.config import Config, ModelConfig
from hocket.trainer.batching import TrainBatch
from hocket.trainer.engine import DeepSpeedEngine, Setup
from hocket.trainer.logprobs import TokenStatistics, chosen_statistics
from hocket.trainer.policy import Policy, skeleton
from hocket.trainer.step import Learner
from hocket.types import TokenSequence

BatchLoss = Callable[..., LossOutput]
"""Computes a micro-batch's share of the global loss.

It takes (logprobs_bt with gradient, entropy_bt, batch); of a scalar model, (values_bt with
gradient, batch).
"""
Measure = Callable[[TrainBatch], Tensor]
"""Computes a column of a batch: a number per target, [b, t], 0 where the mask is False."""
AskServer = Callable[
    [Sequence[TokenSequence], str | None], Coroutine[Any, Any, Sequence[Sequence[float]]]
]
"""Requests a column from a server: (sequences, the servers' token) → a number per token, 0 where
the token was not sampled."""


class LoadingTrainer(Protocol):
    """The attributes of a trainer that an auxiliary's `load` may use, and may add to."""

    device: torch.device
    setup: Setup
    policy: Policy
    engine: DeepSpeedEngine  # trains the policy
    learners: list[Learner]  # the policy, then the auxiliary models that a step trains
    tensors: list[Callable[[], Iterator[Tensor]]]  # each yields the tensors of a frozen model
    columns: dict[str, Measure]
    """Columns that can be measured so far: "logprobs" of the policy, then the auxiliaries'."""

    def load_model(self, model: ModelConfig, kind: type[Policy]) -> Any:
        """Load a model onto this rank's CPU; ranks above 0 make meta tensors at ZeRO-3."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Auxiliary:
    """A column that an objective needs, a number per token, and how to measure it before a step.

    Either `load` returns what measures it in the trainer, or `ask` requests it from a server.
    """

    column: str  # its name in `TrainSample.columns`
    load: Callable[["LoadingTrainer"], Measure] | None = None
    """Loads a model, and adds it to the trainer's `learners` or, if it is frozen, `tensors`."""
    ask: AskServer | None = None  # called on rank 0
    model: ModelConfig | None = None  # the model that `load` loads, if not the policy
    learns: bool = False  # whether a step trains that model
    delay: int = 0  # steps for which the model learns before the policy learns, too


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """A loss, how often a batch is used for it, and the columns that it needs.

    Example: maximize the log-probs of all sampled tokens.

        def loss(logprobs_bt: Tensor, entropy_bt: Tensor, batch: TrainBatch) -> LossOutput:
            return LossOutput(loss=-logprobs_bt.sum() / batch.num_tokens_global, metrics={})

        trainer = Trainer(config, objective=Objective(loss=loss))
    """

    loss: BatchLoss
    kind: type[Policy] = Policy  # class of the trained model
    temperature: float = 1.0  # temperature of the distribution whose log-probs the loss gets
    epochs: int = 1  # times that a step goes through its batch
    minibatches: int = 1  # updates per epoch
    unit: int = 1  # consecutive samples that no micro-batch divides
    auxiliaries: Sequence[Auxiliary] = ()
    statistics: TokenStatistics | None = None  # measured of the policy's tokens in each pass

    def models(self, policy: ModelConfig) -> list[tuple[ModelConfig, Any]]:
        """List every model's config and skeleton, the policy's first."""
        result = [(policy, skeleton(policy, self.kind))]
        for auxiliary in self.auxiliaries:
            if auxiliary.model is None:
                continue
            model = skeleton(auxiliary.model)
            if not auxiliary.learns:
                model = model.requires_grad_(False)
            result.append((auxiliary.model, model))
        return result


COLUMNS: Registry[Callable[[Config], Auxiliary | None]] = Registry(
    "column",
    old_logprobs="hocket.trainer.objective",
    ref_logprobs="hocket.trainer.reference",
    values="hocket.trainer.critic",
)
column = COLUMNS.register
"""Register a function that makes the Auxiliary of a column (decorator), or None if none needs it.

A column has a number per token, which the trainer measures before a step, for an advantage that
lists it in `needs`.

Args:
    name: name of the column.

Example: a plugin file whose advantage grows with the policy's entropy before the step.

    @column("entropies")
    def entropies(config: Config) -> Auxiliary | None:
        if "entropies" not in choose("advantage", config.algorithm.advantage).needs:
            return None
        return Auxiliary(column="entropies", load=load_entropies)

    def load_entropies(trainer: LoadingTrainer) -> Measure:
        return lambda batch: trainer.engine.forward(batch)[1]

    @advantage("curious", per="token", needs=("entropies",))
    def curious(rewards_t: Tensor, entropies_t: Tensor, bonus: float = 0.1) -> Tensor:
        return rewards_t.sum() + bonus * entropies_t
"""


@column("old_logprobs")
def old_policy(config: Config) -> Auxiliary | None:
    """Measure the policy's log-probs before a step: corrections need them in later updates."""
    if config.algorithm.updates == 1 or config.algorithm.correction == "none":
        return None
    return Auxiliary(column="old_logprobs", load=lambda trainer: trainer.columns["logprobs"])


def configured(config: Config) -> Objective:
    """Make the objective that the config's section `algorithm` chooses."""
    algorithm = config.algorithm
    auxiliaries = []
    for make in COLUMNS.each():
        auxiliary = make(config)
        if auxiliary is not None:
            auxiliaries.append(auxiliary)
    loss = functools.partial(policy_loss, config=algorithm.loss(config.rollout.max_tokens))
    return Objective(
        loss=loss,
        temperature=config.rollout.temperature,
        epochs=algorithm.epochs,
        minibatches=algorithm.minibatches,
        auxiliaries=auxiliaries,
        statistics=chosen_statistics(config),
    )
