"""From scored groups to what is trained on: rewards shaped, groups without signal left out, advantages attached.

All of it is computed at one place from whole sequences, so that no advantage depends on how sequences are packed or on
how many ranks train. Knows nothing of models: what only they can tell comes as `Measured`.
"""

import dataclasses
import itertools
import math
import statistics
from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from hocket.algorithm.advantages import group_advantages, zero_variance_groups
from hocket.algorithm.by_token import discounted_returns, gae, token_rewards, whiten
from hocket.algorithm.kl import kl_penalty
from hocket.algorithm.ratios import masked_log_ratio
from hocket.config import AlgorithmConfig, Config
from hocket.data.stream import Outcome
from hocket.types import Group, Measured, Rollout, Score, TokenSequence, TrainSample

NO_SCORE = "no score"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """One sequence of an episode with what its advantages are made of.

    Attributes:
        number: of its episode.
        reward: of the whole episode, shaped; nan without a score.
        kl_n: what is taken from the reward of each sampled token, times its coefficient.
    """

    id: str
    sequence: TokenSequence
    number: int
    group: int
    reward: float
    trained: bool
    measured: Measured
    kl_n: Tensor

    def sampled(self, values_t: Sequence[float]) -> Tensor:
        """Returns those of the values, one per token, that belong to sampled tokens."""
        return torch.tensor(values_t, dtype=torch.float64)[torch.tensor(self.sequence.mask)]

    def whole(self, values_n: Tensor) -> tuple[float, ...]:
        """Returns one value per token, 0.0 where none was sampled."""
        values_t = torch.zeros(len(self.sequence.mask), dtype=torch.float64)
        return tuple(values_t.masked_scatter(torch.tensor(self.sequence.mask), values_n).tolist())


def informative(groups: Sequence[Group], config: Config) -> tuple[list[Group], dict[str, float]]:
    """Returns what teaches something of the groups, and the share of those whose rewards are all alike.

    Those are left out of the loss's numerator and denominator: they would only shrink the others' gradient. They stay
    where advantages do not compare a reward with its group alone: baseline none or critic, KL in the reward. Groups
    that have no rollout to train are left out in any case, and so are rollouts without a score. Under a curriculum it
    also returns the share of the rewards that are no pass rates.
    """
    alike = sum(_alike(_rewards(group, config)) for group in groups)
    kept = [_scored(group, config) for group in groups if silence(group, config) is None]
    signal = {"rollout/zero_variance": alike / len(groups)} if groups else {}
    passed = [value for group in groups for value in _passed(group, config)]
    if passed and (config.curriculum.name != "shuffle" or config.curriculum.retire_after):
        signal["rollout/no_pass_rate"] = sum(not 0 <= value <= 1 for value in passed) / len(passed)
    return kept, signal


def silence(group: Group, config: Config) -> str | None:
    """Returns why a group teaches nothing, in a few words; None where it does teach something."""
    algorithm = config.algorithm
    rewards = _rewards(group, config)
    scored = [reward for reward in rewards if not math.isnan(reward)]
    relative = algorithm.baseline in ("mean", "leave_one_out") and algorithm.kl_in == "loss"
    if not scored:
        return NO_SCORE
    if not any(
        _is_trained(sequence, reward, algorithm)
        for rollout, reward in zip(group.rollouts, rewards, strict=True)
        for sequence in rollout.sequences
    ):
        return "no rollout to train: cut off, or nothing sampled"
    if relative and _alike(rewards):
        return "one score alone" if len(scored) == 1 else f"every reward is {scored[0]:g}"
    return None


def outcome(group: Group, config: Config, *, skipped: bool = False) -> Outcome:
    """Returns what becomes of the group's prompt.

    Its pass rate is the mean of the reward eval.reward where it is among rewards.functions, else of the first of them.

    Args:
        skipped: the step that it was part of was not taken.
    """
    passed = _passed(group, config)
    pass_rate = statistics.fmean(passed) if passed else None
    why = silence(group, config)
    if why == NO_SCORE:
        return Outcome(state="failed", why=why)
    if why is not None:
        return Outcome(state="filtered", why=why, pass_rate=pass_rate)
    if skipped:
        return Outcome(state="failed", why="its step was not finite", pass_rate=pass_rate)
    return Outcome(state="trained", pass_rate=pass_rate)


def _passed(group: Group, config: Config) -> list[float]:
    """Returns the rewards of the group that its pass rate is the mean of."""
    functions = config.rewards.functions
    name = config.eval.reward if config.eval.reward in functions else next(iter(functions))
    return [score.parts[name] for score in group.scores if score.error is None and name in score.parts]


def train_samples(
    groups: Sequence[Group], measured: Sequence[Measured], config: Config, kl_coef: float
) -> tuple[list[TrainSample], dict[str, float]]:
    """Returns one sample per sequence that is trained, and what its rewards and advantages were shaped by.

    Rollouts without a score are left out of baselines, deviations and samples. An episode of several sequences counts
    once in its group, whatever their number.

    Args:
        groups: what `informative` kept.
        measured: of each sequence of their rollouts, in order, as far as `is_measured`; empty where the algorithm needs
            none.
        kl_coef: weight of a KL in the rewards.
    """
    algorithm = config.algorithm
    parts = _parts(groups, measured, config)
    learners = [part for part in parts if part.trained]
    returns: list[Tensor] = []
    if algorithm.baseline in ("mean", "leave_one_out"):
        advantages = _by_group(parts, algorithm, kl_coef)
    else:
        advantages, returns = _by_token(learners, algorithm, kl_coef)
    if algorithm.top_entropy < 1:
        advantages = _of_top_entropy(learners, advantages, algorithm.top_entropy)
    samples = [
        TrainSample(
            sequence=part.sequence,
            advantages=part.whole(advantages[index]),
            ref_logprobs=part.measured.ref_logprobs,
            values=part.measured.values,
            returns=part.whole(returns[index]) if returns else (),
            id=part.id,
        )
        for index, part in enumerate(learners)
    ]
    metrics = {}
    if algorithm.overlong_share:
        penalties = [overlong_penalty(rollout, config) for group in groups for rollout in group.rollouts]
        metrics["rollout/overlong_penalty"] = statistics.fmean(penalties)
    if algorithm.kl_in == "reward":
        metrics |= {"rollout/kl": float(torch.cat([e.kl_n for e in learners]).mean()), "rollout/kl_coef": kl_coef}
    return samples, metrics


def shaped_reward(rollout: Rollout, score: Score, config: Config) -> float:
    """Returns the reward minus the penalty for length; nan without a score."""
    return math.nan if score.error is not None else score.total - overlong_penalty(rollout, config)


def overlong_penalty(rollout: Rollout, config: Config) -> float:
    """Returns 0 up to the last C = overlong_share · max_tokens tokens, from there a line to 1 (arXiv 2503.14476).

    It is the longest turn that counts, as rollout.max_tokens bounds a turn.
    """
    longest = config.rollout.max_tokens
    last = config.algorithm.overlong_share * longest
    if not last:
        return 0.0
    masks = [sequence.mask for sequence in rollout.sequences]
    turn = max((len(list(tokens)) for mask in masks for sampled, tokens in groupby(mask) if sampled), default=0)
    return min(max(turn - (longest - last), 0.0) / last, 1.0)


def _rewards(group: Group, config: Config) -> list[float]:
    return [shaped_reward(r, s, config) for r, s in zip(group.rollouts, group.scores, strict=True)]


def _alike(rewards: Sequence[float]) -> bool:
    return bool(zero_variance_groups(rewards, [0] * len(rewards)).all())


def is_measured(sequence: TokenSequence, algorithm: AlgorithmConfig) -> bool:
    """Returns whether anything depends on what models say of the sequence: its own tokens, or its group's baseline."""
    in_baseline = algorithm.kl_in == "reward" and algorithm.baseline in ("mean", "leave_one_out")
    return any(sequence.mask) and (in_baseline or not _is_cut(sequence, algorithm))


def _is_cut(sequence: TokenSequence, algorithm: AlgorithmConfig) -> bool:
    return algorithm.mask_truncated and sequence.finish_reason == "length"


def _is_trained(sequence: TokenSequence, reward: float, algorithm: AlgorithmConfig) -> bool:
    return any(sequence.mask) and not _is_cut(sequence, algorithm) and not math.isnan(reward)


def _scored(group: Group, config: Config) -> Group:
    has_one = [not math.isnan(reward) for reward in _rewards(group, config)]
    rollouts, scores = itertools.compress(group.rollouts, has_one), itertools.compress(group.scores, has_one)
    return dataclasses.replace(group, rollouts=tuple(rollouts), scores=tuple(scores))


def _parts(groups: Sequence[Group], measured: Sequence[Measured], config: Config) -> list[_Part]:
    rollouts = [
        (index, rollout, shaped_reward(rollout, score, config))
        for index, group in enumerate(groups)
        for rollout, score in zip(group.rollouts, group.scores, strict=True)
    ]
    sequences = [
        (name, sequence, number, index, reward)
        for number, (index, rollout, reward) in enumerate(rollouts)
        for name, sequence in zip(rollout.sequence_ids, rollout.sequences, strict=True)
    ]
    return [
        _Part(
            id=name,
            sequence=sequence,
            number=number,
            group=index,
            reward=reward,
            trained=_is_trained(sequence, reward, config.algorithm),
            measured=known,
            kl_n=_kl_in_reward(sequence, known, config.algorithm),
        )
        for (name, sequence, number, index, reward), known in zip(
            sequences, measured or [Measured()] * len(sequences), strict=True
        )
    ]


def _kl_in_reward(sequence: TokenSequence, measured: Measured, algorithm: AlgorithmConfig) -> Tensor:
    """Returns the distance of the policy that sampled from the reference at each sampled token; 0 if it costs none."""
    mask_t = torch.tensor(sequence.mask)
    if algorithm.kl_in == "loss" or not is_measured(sequence, algorithm):
        return torch.zeros(sum(sequence.mask), dtype=torch.float64)
    if not measured.ref_logprobs:
        raise ValueError(f"algorithm.kl={algorithm.kl} in the reward needs the reference's log-probs")
    sampled_t, reference_t = (torch.tensor(x, dtype=torch.float64) for x in (sequence.logprobs, measured.ref_logprobs))
    return kl_penalty(masked_log_ratio(sampled_t, reference_t, mask_t)[mask_t], algorithm.kl)


def _by_group(parts: Sequence[_Part], algorithm: AlgorithmConfig, kl_coef: float) -> list[Tensor]:
    """Returns one advantage per trained sequence, the same for each of its tokens; baselines count the others, too."""
    rewards = {part.number: part.reward for part in parts}
    for part in parts:
        rewards[part.number] -= kl_coef * float(part.kl_n.sum())
    groups = {part.number: part.group for part in parts}
    advantages_n = group_advantages(
        list(rewards.values()), list(groups.values()), baseline=algorithm.baseline, scale=algorithm.scale
    )
    advantages = dict(zip(rewards, advantages_n.tolist(), strict=True))
    return [torch.full_like(part.kl_n, advantages[part.number]) for part in parts if part.trained]


def _by_token(parts: Sequence[_Part], algorithm: AlgorithmConfig, kl_coef: float) -> tuple[list[Tensor], list[Tensor]]:
    """Returns an advantage for each token, and with a critic its target."""
    advantages, returns = [], []
    for part in parts:
        rewards_n = token_rewards(part.reward, kl_coef * part.kl_n)
        if algorithm.baseline == "none":
            advantages.append(discounted_returns(rewards_n, discount=algorithm.discount))
            continue
        if not part.measured.values:
            raise ValueError("algorithm.baseline=critic needs the critic's values")
        values_n = part.sampled(part.measured.values)
        a_n, returns_n = gae(rewards_n, values_n, discount=algorithm.discount, gae_lambda=algorithm.gae_lambda)
        advantages.append(a_n)
        returns.append(returns_n)
    if algorithm.scale == "batch":
        lengths = [len(a_n) for a_n in advantages]
        advantages = list(torch.split(whiten(torch.cat(advantages)), lengths))
    return advantages, returns


def _of_top_entropy(parts: Sequence[_Part], advantages: Sequence[Tensor], share: float) -> list[Tensor]:
    """Returns the advantages, but 0 for tokens whose entropy is not among the highest `share` (arXiv 2506.01939)."""
    entropies = [part.sampled(part.measured.entropies) for part in parts]
    every_n = torch.cat(entropies)
    threshold = every_n.topk(math.ceil(share * len(every_n))).values[-1]
    return [a_n.where(h_n >= threshold, 0.0) for a_n, h_n in zip(advantages, entropies, strict=True)]
