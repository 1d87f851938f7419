"""Turn scored groups into train samples.

All here is about whole sequences: neither packing nor ranks change an advantage.
"""

import functools
import statistics
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from hocket.algorithm.advantages import along_sequence, at_sampled, group_advantages
from hocket.algorithm.choices import choose
from hocket.algorithm.credit import Compare, Turns, advantages, turns_of
from hocket.algorithm.losses import masked_log_ratio
from hocket.algorithm.returns import (
    TrainedSequence,
    advantages_by_token,
    advantages_by_turn,
)
from hocket.config import AdaptiveKl, AlgorithmConfig
from hocket.data.stream import PromptOutcome
from hocket.types import Columns, Group, Rollout, TokenSequence, TrainSample

NO_SCORE = "no score"
MIN_VARIANCE = 1e-8
ZERO_VARIANCE = 1e-6  # a range of rewards up to which they count as equal
MAX_KL_ERROR = 0.2  # a larger one, relative to the target, changes a KL coefficient no further


class ScoredRollout(NamedTuple):
    """A rollout whose rewards gave it a score."""

    rollout: Rollout
    reward: float  # the score minus the penalty
    penalty: float  # for the rollout's length
    parts: Mapping[str, float]  # the value of each reward function
    is_unbiased: bool  # as in TrainSample; see `shape`
    turns: Turns = ()  # with their rewards, where credit goes by turn


class ScoredGroup(NamedTuple):
    """A group with the rewards that training compares, and whether it has a signal."""

    group: Group
    scored: tuple[ScoredRollout, ...]  # without rollouts whose rewards failed
    has_equal_rewards: bool  # also True for fewer than two rewards
    reason: str | None  # why the group has no signal; None where it has one
    passes: tuple[float, ...]  # values of the reward whose mean is the prompt's pass rate


def shape(
    group: Group,
    algorithm: AlgorithmConfig,
    max_tokens: int,
    env_weight: float = 1.0,
    pass_reward: str = "",
) -> ScoredGroup:
    """Subtract length penalties from a group's scores, and see whether the group has a signal.

    Args:
        group: rollouts of one prompt, with scores.
        algorithm: its settings; where advantages depend on rewards alone, equal rewards have no
            signal, and training on them would shrink the gradient of the others.
        max_tokens: the longest a turn may be (rollout.max_tokens).
        env_weight: the weight of the environment's rewards in a score.
        pass_reward: the reward function whose mean is the prompt's pass rate; "": none.
    """
    # With a KL in the rewards, or with whitening over all tokens, equal rewards have advantages.
    needs_spread = (
        _compares(algorithm) and algorithm.kl_in == "loss" and algorithm.scale != "tokens"
    )
    scored: list[ScoredRollout] = []
    rewards: list[float] = []
    for rollout, score in zip(group.rollouts, group.scores, strict=True):
        if score.error is not None:
            continue
        is_unbiased = _is_unbiased(rewards, needs_spread)
        penalty = overlong_penalty(rollout, algorithm.overlong_share, max_tokens)
        reward = score.total - penalty
        turns = turns_of(rollout, env_weight) if algorithm.by_turn else ()
        scored.append(ScoredRollout(rollout, reward, penalty, score.parts, is_unbiased, turns))
        rewards.append(reward)
    has_equal_rewards = are_equal(rewards)
    if has_equal_rewards and algorithm.by_turn:
        has_equal_rewards = not _turns_differ(scored, algorithm)
    reason = _why_no_signal(scored, algorithm, needs_spread and has_equal_rewards)
    passes = tuple(item.parts[pass_reward] for item in scored if pass_reward in item.parts)
    return ScoredGroup(group, tuple(scored), has_equal_rewards, reason, passes)


def _is_unbiased(rewards_before: Sequence[float], needs_spread: bool) -> bool:
    """Check whether a rollout is trained whatever it answered: an unbiased sample.

    Groups with equal rewards are not trained, so the trained ones hold more of the rare answers
    than the policy draws. Tests of log-probs (extras/checks) would accuse a correct server by them.
    They may use a rollout if no group is left out for equal rewards, or if the rewards before this
    one in its group differ already. (Where reward_range or mask_truncated filter as well, they use
    no trained sample at all.)
    """
    return not needs_spread or not are_equal(rewards_before)


def _why_no_signal(
    scored: Sequence[ScoredRollout], algorithm: AlgorithmConfig, lacks_spread: bool
) -> str | None:
    """Name the first reason why a group teaches nothing, or None."""
    if not scored:
        return NO_SCORE
    if not any(_has_trained_sequence(item.rollout, algorithm) for item in scored):
        return "no rollout to train: cut off, or nothing sampled"
    rewards = [item.reward for item in scored]
    if lacks_spread:
        return "one score alone" if len(rewards) == 1 else f"every reward is {rewards[0]:g}"
    if algorithm.reward_range is not None:
        low, high = algorithm.reward_range
        mean = statistics.fmean(rewards)
        if not low < mean < high:
            return f"the mean reward, {mean:g}, is outside algorithm.reward_range"
    return None


def _turns_differ(scored: Sequence[ScoredRollout], algorithm: AlgorithmConfig) -> bool:
    """Check whether a turn has an advantage although the rewards of the episodes are equal."""
    if not scored or not _compares(algorithm):
        return False
    compare = functools.partial(group_advantages, advantage=algorithm.advantage, scale="none")
    episodes = [item.turns for item in scored]
    rewards = [item.reward for item in scored]
    for by_turn in advantages(algorithm.credit, episodes, rewards, [0] * len(scored), compare):
        if any(abs(value) > ZERO_VARIANCE for value in by_turn.values()):
            return True
    return False


def are_equal(rewards: Sequence[float]) -> bool:
    """Compare rewards by their range: the rounding error of a deviation grows with the rewards."""
    return len(rewards) < 2 or max(rewards) - min(rewards) <= ZERO_VARIANCE


def overlong_penalty(rollout: Rollout, overlong_share: float, max_tokens: int) -> float:
    """Compute the penalty for a rollout's longest turn, from 0 to 1 (arXiv 2503.14476).

    It is 0 until the last `overlong_share` of `max_tokens` begins, and grows linearly in it.
    """
    if not overlong_share:
        return 0.0
    longest = 0  # sampled tokens
    for sequence in rollout.sequences:
        sizes = [turn.tokens for turn in sequence.turn_rewards]
        if not sizes:  # the sequence is one turn
            sizes = [sequence.mask.count(True)]
        longest = max(longest, max(sizes))
    stretch = overlong_share * max_tokens  # the last tokens, over which the penalty grows
    return min(max(longest - (max_tokens - stretch), 0.0) / stretch, 1.0)


def is_trained(sequence: TokenSequence, algorithm: AlgorithmConfig) -> bool:
    """Check whether a sequence has tokens to train; one that was cut off may be masked."""
    if algorithm.mask_truncated and sequence.finish_reason == "length":
        return False
    return any(sequence.mask)


def _has_trained_sequence(rollout: Rollout, algorithm: AlgorithmConfig) -> bool:
    return any(is_trained(sequence, algorithm) for sequence in rollout.sequences)


def is_measured(sequence: TokenSequence, algorithm: AlgorithmConfig) -> bool:
    """Check whether the trainer must measure a sequence.

    It measures what is trained. A sequence that is not trained may still have a part in the
    baseline of its group: with a KL in the rewards, its KL is measured.
    """
    kl_in_baseline = algorithm.kl_in != "loss" and _compares(algorithm)
    return any(sequence.mask) and (kl_in_baseline or is_trained(sequence, algorithm))


def _compares(algorithm: AlgorithmConfig) -> bool:
    """Check whether advantages compare rollouts; otherwise each has those of its own rewards."""
    return choose("advantage", algorithm.advantage).compares


def signal_metrics(
    groups: Sequence[ScoredGroup], uses_pass_rates: bool = False
) -> dict[str, float]:
    """Measure how much of a batch has a signal."""
    if not groups:
        return {}
    equal = statistics.fmean(group.has_equal_rewards for group in groups)
    metrics = {"rollout/zero_variance": equal}
    num_sampled = sum(_num_sampled(group) for group in groups)
    if num_sampled:
        unused = sum(_num_sampled(group) for group in groups if group.reason is not None)
        metrics["rollout/without_signal"] = unused / num_sampled
    passes: list[float] = []
    for group in groups:
        passes += group.passes
    if passes and uses_pass_rates:
        outside = sum(not 0 <= value <= 1 for value in passes)
        metrics["rollout/no_pass_rate"] = outside / len(passes)
    return metrics


def _num_sampled(group: ScoredGroup) -> int:
    return sum(rollout.num_sampled for rollout in group.group.rollouts)


def outcome_of(group: ScoredGroup, untrained: str | None) -> PromptOutcome:
    """Name a prompt's outcome; `untrained`: why no update trained the group, None if one did."""
    pass_rate = statistics.fmean(group.passes) if group.passes else None
    why = group.reason or untrained
    if why is None:
        return PromptOutcome(state="trained", pass_rate=pass_rate)
    # "Filtered" says that the prompt taught nothing; all else went wrong.
    is_filtered = group.reason is not None and group.reason != NO_SCORE
    state: Literal["filtered", "failed"] = "filtered" if is_filtered else "failed"
    return PromptOutcome(state=state, why=why, pass_rate=pass_rate)


def train_samples(
    groups: Sequence[ScoredGroup],
    measured: Sequence[Columns],
    algorithm: AlgorithmConfig,
    kl_coef: float,
) -> tuple[list[TrainSample], dict[str, float]]:
    """Make a train sample of each trained sequence of these groups, with its tokens' advantages.

    An episode counts once in its group, however many sequences it has.

    Args:
        groups: those that have a signal.
        measured: the trainer's columns of each sequence of all scored rollouts, in order; may be
            empty.
        algorithm: its settings.
        kl_coef: the coefficient of a KL in the rewards.

    Returns:
        The samples, and metrics of penalties.
    """
    scored: list[ScoredRollout] = []
    group_ids: list[int] = []  # number of each rollout's group
    for number, group in enumerate(groups):
        scored += group.scored
        group_ids += [number] * len(group.scored)
    rows, rewards = _penalised(scored, measured, algorithm, kl_coef)
    if _compares(algorithm):
        advantages_n = _compared(rows, scored, rewards, group_ids, algorithm)
    else:
        advantages_n = _by_steps(rows, scored, algorithm, kl_coef)
    if algorithm.scale == "tokens":
        advantages_n = whiten(advantages_n)

    # Advantages are those of the rows' sampled tokens, row after row.
    samples = []
    lengths = [len(row.kl_n) for row in rows]
    for row, row_advantages_n in zip(rows, torch.split(advantages_n, lengths), strict=True):
        sample = TrainSample(
            sequence=row.sequence,
            advantages=along_sequence(row_advantages_n, row.sequence),
            columns=row.columns,
            id=row.id,
            group=group_ids[row.owner],
            is_unbiased=scored[row.owner].is_unbiased,
        )
        samples.append(sample)
    metrics = {}
    if algorithm.overlong_share:
        metrics["rollout/overlong_penalty"] = statistics.fmean(item.penalty for item in scored)
    if algorithm.kl_in != "loss":
        metrics["rollout/kl"] = float(torch.cat([row.kl_n for row in rows]).mean())
        metrics["rollout/kl_coef"] = kl_coef
    return samples, metrics


def _penalised(
    scored: Sequence[ScoredRollout],
    measured: Sequence[Columns],
    algorithm: AlgorithmConfig,
    kl_coef: float,
) -> tuple[list[TrainedSequence], list[float]]:
    """Subtract the KL from each rollout's reward; return the trained sequences, and the rewards.

    A sequence that is not trained is left out, but its KL counts in the reward of its rollout.
    """
    rows = []
    rewards = [item.reward for item in scored]
    measured_in_order = iter(measured)
    for owner, item in enumerate(scored):
        ids = item.rollout.sequence_ids
        for number, sequence in enumerate(item.rollout.sequences):
            columns = dict(next(measured_in_order)) if measured else {}
            kl_n = _kl_in_reward(sequence, columns, algorithm)
            rewards[owner] -= kl_coef * float(kl_n.sum())
            if is_trained(sequence, algorithm):
                turns = item.turns[number] if item.turns else ()
                rows.append(TrainedSequence(owner, ids[number], sequence, columns, kl_n, turns))
    return rows, rewards


def _kl_in_reward(sequence: TokenSequence, measured: Columns, algorithm: AlgorithmConfig) -> Tensor:
    """Estimate the KL of each sampled token, float64 [n]; 0 where it is not in the reward."""
    if algorithm.kl_in == "loss" or not is_measured(sequence, algorithm):
        return torch.zeros(sequence.mask.count(True), dtype=torch.float64)
    sampled_n = at_sampled(sequence.logprobs, sequence)
    reference_n = at_sampled(measured["ref_logprobs"], sequence)
    everywhere_n = torch.ones_like(sampled_n, dtype=torch.bool)
    log_ratio_n = masked_log_ratio(sampled_n, reference_n, everywhere_n)
    kl_n: Tensor = choose("kl", algorithm.kl)(log_ratio=log_ratio_n)
    return kl_n


def _compared(
    rows: Sequence[TrainedSequence],
    scored: Sequence[ScoredRollout],
    rewards: Sequence[float],
    group_ids: Sequence[int],
    algorithm: AlgorithmConfig,
) -> Tensor:
    """Compare rewards within groups: an advantage per sampled token of all rows, float64 [n].

    `rewards` and `group_ids` have an item per rollout.
    """
    compare: Compare = functools.partial(
        group_advantages,
        advantage=algorithm.advantage,
        scale=algorithm.scale,
        parts=[item.parts for item in scored],
    )
    if not algorithm.by_turn:
        # All tokens of an episode have its advantage.
        values_n = compare(rewards, group_ids).double()[[row.owner for row in rows]]
        return values_n.repeat_interleave(torch.tensor([len(row.kl_n) for row in rows]))
    episodes = [item.turns for item in scored]
    by_episode = advantages(algorithm.credit, episodes, rewards, group_ids, compare)
    values = []
    sizes = []
    for row in rows:
        for turn in row.turns:
            values.append(by_episode[row.owner][turn.number])
            sizes.append(turn.tokens)
    values_k = torch.tensor(values, dtype=torch.float64)
    return values_k.repeat_interleave(torch.tensor(sizes))


def _by_steps(
    rows: Sequence[TrainedSequence],
    scored: Sequence[ScoredRollout],
    algorithm: AlgorithmConfig,
    kl_coef: float,
) -> Tensor:
    """Compute an advantage per sampled token of all rows, float64 [n], rollout by rollout."""
    # The rows are in the order of their rollouts, so the parts below are in that of the rows.
    rows_of: dict[int, list[TrainedSequence]] = {}
    for row in rows:
        rows_of.setdefault(row.owner, []).append(row)
    parts = []
    for owner, own_rows in rows_of.items():
        reward = scored[owner].reward
        if algorithm.by_turn:
            turns = scored[owner].turns
            parts.append(advantages_by_turn(own_rows, turns, reward, algorithm, kl_coef))
        else:
            parts.append(advantages_by_token(own_rows, reward, algorithm, kl_coef))
    return torch.cat(parts)


def whiten(values_n: Tensor) -> Tensor:
    """Compute (x − mean) / √max(unbiased variance, 1e-8), [n]."""
    centred_n = values_n - values_n.mean()
    variance = centred_n.square().sum() / max(len(values_n) - 1, 1)
    return centred_n / variance.clamp(min=MIN_VARIANCE).sqrt()


class KlController:
    """The coefficient of a KL in the rewards: fixed, or adapted to a target (arXiv 1909.08593).

    coef ← coef · (1 + clip(kl / target − 1, ±0.2) · rollouts / horizon)

    `state` and `restore` carry an adapted coefficient from a checkpoint into the resumed run.
    """

    def __init__(self, config: AlgorithmConfig) -> None:
        self.coef = config.kl_coef
        self._adapts = config.kl_in if isinstance(config.kl_in, AdaptiveKl) else None

    def update(self, kl: float | None, num_rollouts: int) -> None:
        """Adapt to a step's mean penalty per token; None if nothing was measured."""
        if self._adapts is not None and kl is not None:
            error = min(max(kl / self._adapts.target - 1, -MAX_KL_ERROR), MAX_KL_ERROR)
            self.coef *= 1 + error * num_rollouts / self._adapts.horizon

    def state(self) -> dict[str, float]:
        """Export what a checkpoint keeps."""
        return {"coef": self.coef}

    def restore(self, state: Mapping[str, float]) -> None:
        """Continue from a `state`; a fixed coefficient stays as configured."""
        if self._adapts is not None:
            self.coef = state["coef"]
