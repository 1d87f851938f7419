"""Turn scored groups into train samples: shape rewards, leave out groups without signal, attach advantages.

Whole sequences are the input, so no advantage depends on how sequences are packed or on how many ranks train.
"""

import itertools
import math
import statistics
from array import array
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hocket.algorithm.advantages import are_equal, group_advantages
from hocket.algorithm.choices import choose
from hocket.algorithm.ratios import masked_log_ratio
from hocket.config import AlgorithmConfig
from hocket.data.stream import Outcome
from hocket.types import Columns, Group, Rollout, TokenSequence, TrainSample

NO_SCORE = "no score"
MIN_VARIANCE = 1e-8


class Shaped(NamedTuple):
    """A group's scored rollouts, with the rewards that they are trained on."""

    group: Group
    rollouts: tuple[Rollout, ...]  # without those that have no score
    rewards: tuple[float, ...]  # per rollout: its score minus its penalty
    parts: tuple[Mapping[str, float], ...]  # per rollout: the values of each reward function
    penalties: tuple[float, ...]  # per rollout, for its length
    has_equal_rewards: bool  # or fewer than two
    reason: str | None  # why the group has no signal; None if it is trained


def shape(group: Group, algorithm: AlgorithmConfig, max_tokens: int) -> Shaped:
    """Subtract the length penalties from a group's scores, and tell whether the group has a signal.

    Equal rewards have none where advantages depend on them alone; they would shrink the others' gradient.
    """
    rollouts: list[Rollout] = []
    rewards: list[float] = []
    parts: list[Mapping[str, float]] = []
    penalties: list[float] = []
    for rollout, score in zip(group.rollouts, group.scores, strict=True):
        if score.error is None and not math.isnan(score.total):
            penalty = overlong_penalty(rollout, algorithm.overlong_share, max_tokens)
            rollouts.append(rollout)
            penalties.append(penalty)
            rewards.append(score.total - penalty)
            parts.append(score.parts)
    equal = are_equal(rewards)
    by_group = _compares(algorithm) and algorithm.kl_in == "loss" and algorithm.scale != "tokens"
    reason = None
    if not rewards:
        reason = NO_SCORE
    elif not any(is_trained(sequence, algorithm) for rollout in rollouts for sequence in rollout.sequences):
        reason = "no rollout to train: cut off, or nothing sampled"
    elif equal and by_group:
        reason = "one score alone" if len(rewards) == 1 else f"every reward is {rewards[0]:g}"
    elif algorithm.reward_range is not None:
        low, high = algorithm.reward_range
        mean = statistics.fmean(rewards)
        if not low < mean < high:
            reason = f"the mean reward, {mean:g}, is outside algorithm.reward_range"
    return Shaped(group, tuple(rollouts), tuple(rewards), tuple(parts), tuple(penalties), equal, reason)


def overlong_penalty(rollout: Rollout, overlong_share: float, max_tokens: int) -> float:
    """Return 0 up to the last overlong_share · max_tokens tokens of the longest turn, then a line to 1 (2503.14476)."""
    last = overlong_share * max_tokens
    if not last:
        return 0.0
    turns = (turn for sequence in rollout.sequences for turn in itertools.groupby(sequence.mask))
    longest = max((len(list(tokens)) for sampled, tokens in turns if sampled), default=0)
    return min(max(longest - (max_tokens - last), 0.0) / last, 1.0)


def is_trained(sequence: TokenSequence, algorithm: AlgorithmConfig) -> bool:
    return any(sequence.mask) and not (algorithm.mask_truncated and sequence.finish_reason == "length")


def is_measured(sequence: TokenSequence, algorithm: AlgorithmConfig) -> bool:
    """Return whether a sequence is trained, or counts in a baseline with a KL in the reward."""
    in_baseline = algorithm.kl_in != "loss" and _compares(algorithm)
    return any(sequence.mask) and (in_baseline or is_trained(sequence, algorithm))


def _compares(algorithm: AlgorithmConfig) -> bool:
    return choose("baseline", algorithm.baseline).compares


def signal_metrics(groups: Sequence[Shaped], pass_reward: str | None = None) -> dict[str, float]:
    metrics = {}
    if groups:
        metrics["rollout/zero_variance"] = statistics.fmean(group.has_equal_rewards for group in groups)
    if pass_reward and (values := [value for group in groups for value in values_of(group.group, pass_reward)]):
        metrics["rollout/no_pass_rate"] = sum(not 0 <= value <= 1 for value in values) / len(values)
    return metrics


def values_of(group: Group, reward: str) -> list[float]:
    return [score.parts[reward] for score in group.scores if score.error is None and reward in score.parts]


def fate(shaped: Shaped, *, reward: str, untrained: str | None) -> Outcome:
    """Return a prompt's fate; `reward` has the pass rate, `untrained`: why no update trained the group."""
    values = values_of(shaped.group, reward)
    pass_rate = statistics.fmean(values) if values else None
    why = shaped.reason or untrained
    if why is None:
        return Outcome(state="trained", pass_rate=pass_rate)
    if shaped.reason in (None, NO_SCORE):
        return Outcome(state="failed", why=why, pass_rate=pass_rate)
    return Outcome(state="filtered", why=why, pass_rate=pass_rate)


class _Trained(NamedTuple):
    owner: int  # number of its rollout in the batch
    id: str
    sequence: TokenSequence
    measured: Columns
    kl_n: Tensor  # penalty per sampled token, before its coefficient


def train_samples(
    groups: Sequence[Shaped], measured: Sequence[Columns], algorithm: AlgorithmConfig, kl_coef: float
) -> tuple[list[TrainSample], dict[str, float]]:
    """Return one sample per trained sequence, and metrics of the shaping.

    An episode counts once in its group, with one advantage for all of its sequences. `measured` has one item per
    sequence, in order; it is empty if the algorithm needs none.
    """
    rewards = [reward for group in groups for reward in group.rewards]
    group_ids = [index for index, group in enumerate(groups) for _ in group.rewards]
    penalised = list(rewards)
    trained = []
    of_sequence = iter(measured) if measured else itertools.repeat({})
    for owner, rollout in enumerate(itertools.chain.from_iterable(group.rollouts for group in groups)):
        for name, sequence in zip(rollout.sequence_ids, rollout.sequences, strict=True):
            known = next(of_sequence)
            kl_n = _kl_in_reward(sequence, known, algorithm)
            penalised[owner] -= kl_coef * float(kl_n.sum())
            if is_trained(sequence, algorithm):
                trained.append(_Trained(owner, name, sequence, known, kl_n))
    added: Mapping[str, Sequence[Tensor]] = {}
    if _compares(algorithm):
        parts = [part for group in groups for part in group.parts]
        of_rollout = group_advantages(
            penalised, group_ids, baseline=algorithm.baseline, scale=algorithm.scale, parts=parts
        ).tolist()
        advantages = [torch.full_like(row.kl_n, of_rollout[row.owner]) for row in trained]
    else:
        advantages, added = _by_token(trained, rewards, algorithm, kl_coef)
    if algorithm.scale == "tokens":
        advantages = list(torch.split(whiten(torch.cat(advantages)), [len(a_n) for a_n in advantages]))
    samples = [
        TrainSample(
            sequence=row.sequence,
            advantages=_whole(advantages[index], row.sequence),
            columns={**row.measured, **{name: _whole(of[index], row.sequence) for name, of in added.items()}},
            id=row.id,
            group=group_ids[row.owner],
        )
        for index, row in enumerate(trained)
    ]
    metrics = {}
    if algorithm.overlong_share:
        metrics["rollout/overlong_penalty"] = statistics.fmean(p for group in groups for p in group.penalties)
    if algorithm.kl_in != "loss":
        metrics["rollout/kl"] = float(torch.cat([row.kl_n for row in trained]).mean())
        metrics["rollout/kl_coef"] = kl_coef
    return samples, metrics


def _kl_in_reward(sequence: TokenSequence, measured: Columns, algorithm: AlgorithmConfig) -> Tensor:
    """Return the KL estimate per sampled token; 0 if it is not in the reward."""
    if algorithm.kl_in == "loss" or not is_measured(sequence, algorithm):
        return torch.zeros(sequence.mask.count(True), dtype=torch.float64)
    sampled_n = _sampled(sequence.logprobs, sequence)
    reference_n = _sampled(measured["ref_logprobs"], sequence)
    log_ratio_n = masked_log_ratio(sampled_n, reference_n, torch.ones_like(sampled_n, dtype=torch.bool))
    kl_n: Tensor = choose("kl", algorithm.kl)(log_ratio=log_ratio_n)
    return kl_n


def _by_token(
    trained: Sequence[_Trained], rewards: Sequence[float], algorithm: AlgorithmConfig, kl_coef: float
) -> tuple[list[Tensor], dict[str, list[Tensor]]]:
    """Return an advantage per token, and a critic's target as the column "returns"."""
    choice = choose("baseline", algorithm.baseline)
    advantages: list[Tensor] = []
    returns: list[Tensor] = []
    for row in trained:
        rewards_n = -kl_coef * row.kl_n
        rewards_n[-1] += rewards[row.owner]
        columns = {f"{name}_t": _sampled(row.measured[name], row.sequence) for name in choice.needs}
        found = choice(rewards_t=rewards_n, **columns)
        if isinstance(found, tuple):
            found, returns_n = found
            returns.append(returns_n)
        advantages.append(found)
    return advantages, {"returns": returns} if returns else {}


def _sampled(values_t: Sequence[float], sequence: TokenSequence) -> Tensor:
    return torch.from_numpy(np.array(values_t, np.float64)[np.frombuffer(bytes(sequence.mask), np.bool_)])


def _whole(values_n: Tensor, sequence: TokenSequence) -> Sequence[float]:
    """Return one value per token, 0.0 where none was sampled."""
    values_t = np.zeros(len(sequence.mask))
    values_t[np.frombuffer(bytes(sequence.mask), np.bool_)] = values_n.numpy()
    return array("d", values_t.tobytes())


def whiten(values_n: Tensor) -> Tensor:
    """Return (x − mean) / √max(unbiased variance, 1e-8), [n]."""
    centred_n = values_n - values_n.mean()
    variance = centred_n.square().sum() / max(len(values_n) - 1, 1)
    return centred_n / variance.clamp(min=MIN_VARIANCE).sqrt()
