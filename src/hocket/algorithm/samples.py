"""Turn scored groups into train samples, of whole sequences: neither packing nor ranks change an advantage."""

import functools
import itertools
import operator
import statistics
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hocket.algorithm.advantages import checked, group_advantages
from hocket.algorithm.choices import choose
from hocket.algorithm.credit import Turns, advantages, in_order, turns_of
from hocket.algorithm.losses import masked_log_ratio
from hocket.config import AdaptiveKl, AlgorithmConfig
from hocket.data.stream import PromptOutcome
from hocket.types import Columns, Group, Rollout, TokenSequence, TrainSample, TurnReward

NO_SCORE = "no score"
MIN_VARIANCE = 1e-8
ZERO_VARIANCE = 1e-6  # range of rewards without a signal
MAX_KL_ERROR = 0.2


class ScoredRollout(NamedTuple):
    """A rollout with a score."""

    rollout: Rollout
    reward: float  # its score minus its penalty
    penalty: float  # for its length
    parts: Mapping[str, float]  # by reward function
    is_unbiased: bool  # as in TrainSample
    turns: Turns = ()  # where credit goes by turn: with what counts for each in the score


class ScoredGroup(NamedTuple):
    """A group for training."""

    group: Group
    scored: tuple[ScoredRollout, ...]
    has_equal_rewards: bool  # or fewer than two
    reason: str | None  # why the group has no signal
    passes: tuple[float, ...]  # of the reward whose mean is the prompt's pass rate


def shape(
    group: Group,
    algorithm: AlgorithmConfig,
    max_tokens: int,
    env_weight: float = 1.0,
    pass_reward: str = "",
) -> ScoredGroup:
    """Subtract length penalties from a group's scores, and tell whether it has a signal.

    `env_weight`: of the environment's rewards in a score; `pass_reward`: whose mean is the pass rate. Equal rewards
    have no signal where advantages depend on them alone; they would shrink the others' gradient.
    """
    needs = _compares(algorithm) and algorithm.kl_in == "loss" and algorithm.scale != "tokens"
    scored = []
    rewards: list[float] = []
    for rollout, score in zip(group.rollouts, group.scores, strict=True):
        if score.error is None:
            turns = turns_of(rollout, env_weight) if algorithm.by_turn else ()
            penalty = overlong_penalty(rollout, algorithm.overlong_share, max_tokens)
            # Checks of log-probs (extras/checks) may use only tokens of which it did not depend on
            # what was sampled whether they are trained. Groups are filtered by the variance of
            # their rewards, so the trained ones are a biased sample: they hold more rare answers
            # than the policy gives, and a test of their log-probs would find a correct server
            # wrong. A rollout is unbiased where no group is filtered, or where the rewards before
            # it differ already: then its group is trained whatever this rollout answered.
            is_unbiased = not needs or not are_equal(rewards)
            reward = score.total - penalty
            rewards.append(reward)
            scored.append(ScoredRollout(rollout, reward, penalty, score.parts, is_unbiased, turns))
    equal = are_equal(rewards) and not (algorithm.by_turn and _turns_differ(scored, algorithm))
    reason = None
    if not scored:
        reason = NO_SCORE
    elif not any(
        is_trained(sequence, algorithm) for one in scored for sequence in one.rollout.sequences
    ):
        reason = "no rollout to train: cut off, or nothing sampled"
    elif equal and needs:
        reason = "one score alone" if len(rewards) == 1 else f"every reward is {rewards[0]:g}"
    elif algorithm.reward_range is not None:
        low, high = algorithm.reward_range
        mean = statistics.fmean(rewards)
        if not low < mean < high:
            reason = f"the mean reward, {mean:g}, is outside algorithm.reward_range"
    passes = tuple(one.parts[pass_reward] for one in scored if pass_reward in one.parts)
    return ScoredGroup(group, tuple(scored), equal, reason, passes)


def _turns_differ(scored: Sequence[ScoredRollout], algorithm: AlgorithmConfig) -> bool:
    """Check whether a turn has an advantage although the rewards of the episodes are equal."""
    if not (scored and _compares(algorithm)):
        return False
    compare = functools.partial(group_advantages, advantage=algorithm.advantage, scale="none")
    episodes = [one.turns for one in scored]
    rewards = [rewarded.reward for rewarded in scored]
    by_episode = advantages(algorithm.credit, episodes, rewards, [0] * len(scored), compare)
    return any(abs(value) > ZERO_VARIANCE for by_turn in by_episode for value in by_turn.values())


def are_equal(rewards: Sequence[float]) -> bool:
    """Compare by range: the rounding error of a deviation grows with the rewards."""
    return len(rewards) < 2 or max(rewards) - min(rewards) <= ZERO_VARIANCE


def overlong_penalty(rollout: Rollout, overlong_share: float, max_tokens: int) -> float:
    """Compute 0 up to the last overlong_share of the longest turn's max_tokens, then a line to 1 (2503.14476)."""
    if not overlong_share:
        return 0.0
    longest = 0
    for sequence in rollout.sequences:
        turns = [turn.tokens for turn in sequence.turn_rewards]
        longest = max(longest, *(turns or [sequence.mask.count(True)]))
    last = overlong_share * max_tokens
    return min(max(longest - (max_tokens - last), 0.0) / last, 1.0)


def is_trained(sequence: TokenSequence, algorithm: AlgorithmConfig) -> bool:
    return any(sequence.mask) and not (
        algorithm.mask_truncated and sequence.finish_reason == "length"
    )


def is_measured(sequence: TokenSequence, algorithm: AlgorithmConfig) -> bool:
    """Check whether a sequence is trained, or counts in a baseline with a KL in the reward."""
    in_baseline = algorithm.kl_in != "loss" and _compares(algorithm)
    return any(sequence.mask) and (in_baseline or is_trained(sequence, algorithm))


def _compares(algorithm: AlgorithmConfig) -> bool:
    return choose("advantage", algorithm.advantage).compares


def signal_metrics(
    groups: Sequence[ScoredGroup], uses_pass_rates: bool = False
) -> dict[str, float]:
    if not groups:
        return {}
    metrics = {
        "rollout/zero_variance": statistics.fmean(group.has_equal_rewards for group in groups)
    }
    tokens = [sum(rollout.num_sampled for rollout in group.group.rollouts) for group in groups]
    if any(tokens):
        without_signal = itertools.compress(tokens, [group.reason is not None for group in groups])
        metrics["rollout/without_signal"] = sum(without_signal) / sum(tokens)
    values = [value for group in groups for value in group.passes]
    if values and uses_pass_rates:
        metrics["rollout/no_pass_rate"] = sum(not 0 <= value <= 1 for value in values) / len(values)
    return metrics


def outcome_of(shaped: ScoredGroup, untrained: str | None) -> PromptOutcome:
    """Name a prompt's outcome; `untrained`: why no update trained the group."""
    pass_rate = statistics.fmean(shaped.passes) if shaped.passes else None
    why = shaped.reason or untrained
    if why is None:
        return PromptOutcome(state="trained", pass_rate=pass_rate)
    state: Literal["filtered", "failed"] = (
        "failed" if shaped.reason in (None, NO_SCORE) else "filtered"
    )
    return PromptOutcome(state=state, why=why, pass_rate=pass_rate)


class _Row(NamedTuple):
    """A sequence that is trained."""

    owner: int  # number of its rollout in the batch
    id: str
    sequence: TokenSequence
    columns: dict[str, Sequence[float]]
    kl_n: Tensor  # penalty per sampled token, before its coefficient
    turns: Sequence[TurnReward]  # where credit goes by turn


def train_samples(
    groups: Sequence[ScoredGroup],
    measured: Sequence[Columns],
    algorithm: AlgorithmConfig,
    kl_coef: float,
) -> tuple[list[TrainSample], dict[str, float]]:
    """Return one sample per trained sequence, and metrics of the shaping.

    An episode counts once in its group. `measured` has one item per sequence, in order, or none at all.
    """
    scored = [(number, one) for number, group in enumerate(groups) for one in group.scored]
    group_ids = [number for number, _ in scored]
    penalised = [one.reward for _, one in scored]
    rows = []
    known = itertools.chain(measured, itertools.repeat({}))
    for owner, (_, one) in enumerate(scored):
        turns_of_rows = one.turns or [()] * len(one.rollout.sequences)
        for name, sequence, turns in zip(
            one.rollout.sequence_ids, one.rollout.sequences, turns_of_rows, strict=True
        ):
            columns = dict(next(known))
            kl_n = _kl_in_reward(sequence, columns, algorithm)
            penalised[owner] -= kl_coef * float(kl_n.sum())
            if is_trained(sequence, algorithm):
                rows.append(_Row(owner, name, sequence, columns, kl_n, turns))
    lengths = [len(row.kl_n) for row in rows]
    if _compares(algorithm):
        compare = functools.partial(
            group_advantages,
            advantage=algorithm.advantage,
            scale=algorithm.scale,
            parts=[one.parts for _, one in scored],
        )
        if algorithm.by_turn:
            of_turn = advantages(
                algorithm.credit, [one.turns for _, one in scored], penalised, group_ids, compare
            )
            turns_k = [
                (of_turn[row.owner][turn.number], turn.tokens) for row in rows for turn in row.turns
            ]
            values_k = torch.tensor([value for value, _ in turns_k], dtype=torch.float64)
            sizes = [size for _, size in turns_k]
        else:  # all tokens of an episode have its advantage
            values_k = compare(penalised, group_ids).double()[[row.owner for row in rows]]
            sizes = lengths
        advantages_n = values_k.repeat_interleave(torch.tensor(sizes))
    else:
        of_owner = _by_turn if algorithm.by_turn else _by_token
        advantages_n = torch.cat(
            [
                of_owner(list(own), scored[owner][1], algorithm, kl_coef)
                for owner, own in itertools.groupby(rows, operator.attrgetter("owner"))
            ]
        )
    if algorithm.scale == "tokens":
        advantages_n = whiten(advantages_n)
    samples = [
        TrainSample(
            sequence=row.sequence,
            advantages=_whole(own_n, row.sequence),
            columns=row.columns,
            id=row.id,
            group=group_ids[row.owner],
            is_unbiased=scored[row.owner][1].is_unbiased,
        )
        for row, own_n in zip(rows, torch.split(advantages_n, lengths), strict=True)
    ]
    metrics = {}
    if algorithm.overlong_share:
        metrics["rollout/overlong_penalty"] = statistics.fmean(one.penalty for _, one in scored)
    if algorithm.kl_in != "loss":
        metrics["rollout/kl"] = float(torch.cat([row.kl_n for row in rows]).mean())
        metrics["rollout/kl_coef"] = kl_coef
    return samples, metrics


def _kl_in_reward(sequence: TokenSequence, measured: Columns, algorithm: AlgorithmConfig) -> Tensor:
    """Return the KL estimate per sampled token; 0 where it is not in the reward."""
    if algorithm.kl_in == "loss" or not is_measured(sequence, algorithm):
        return torch.zeros(sequence.mask.count(True), dtype=torch.float64)
    sampled_n = _sampled(sequence.logprobs, sequence)
    reference_n = _sampled(measured["ref_logprobs"], sequence)
    log_ratio_n = masked_log_ratio(
        sampled_n, reference_n, torch.ones_like(sampled_n, dtype=torch.bool)
    )
    kl_n: Tensor = choose("kl", algorithm.kl)(log_ratio=log_ratio_n)
    return kl_n


def _by_token(
    rows: Sequence[_Row], one: ScoredRollout, algorithm: AlgorithmConfig, kl_coef: float
) -> Tensor:
    """Return an advantage per sampled token of a rollout; add a critic's target as the column "returns"."""
    choice = choose("advantage", algorithm.advantage)
    advantages = []
    for row in rows:
        rewards_n = -kl_coef * row.kl_n
        rewards_n[-1] += one.reward
        needed = {f"{name}_t": _sampled(row.columns[name], row.sequence) for name in choice.needs}
        values_n, *returns = _of_steps(
            algorithm, choice(rewards_t=rewards_n, **needed), rewards_n, *needed.values()
        )
        for returns_n in returns:
            row.columns["returns"] = _whole(returns_n, row.sequence)
        advantages.append(values_n)
    return torch.cat(advantages)


def _by_turn(
    rows: Sequence[_Row], one: ScoredRollout, algorithm: AlgorithmConfig, kl_coef: float
) -> Tensor:
    """Return the same where each turn of the rollout is one step, with the values of its first token.

    The reward of a turn that is not trained counts for the trained one before it.
    """
    choice = choose("advantage", algorithm.advantage)
    sizes = torch.tensor([turn.tokens for row in rows for turn in row.turns])
    firsts = sizes.cumsum(0) - sizes
    numbers = torch.tensor([turn.number for row in rows for turn in row.turns])
    order = numbers.argsort()
    kl_n = torch.cat([row.kl_n for row in rows])
    of_turn = [part.sum() for part in torch.split(kl_n, sizes.tolist())]
    rewards: dict[int, float] = {}
    step = -1
    for turn in in_order(one.turns, one.reward):
        step = turn.number if turn.number in numbers else step
        rewards[step] = rewards.get(step, 0.0) + turn.reward
    rewards.pop(-1, None)  # nothing that is trained led to it
    rewards_k = torch.stack(of_turn)[order] * -kl_coef + kl_n.new_tensor([*rewards.values()])
    needed = {}
    for name in choice.needs:
        values_n = torch.cat([_sampled(row.columns[name], row.sequence) for row in rows])
        needed[f"{name}_t"] = values_n[firsts][order]
    steps = _of_steps(algorithm, choice(rewards_t=rewards_k, **needed), rewards_k, *needed.values())
    by_token: list[Tensor] = [step_k[order.argsort()].repeat_interleave(sizes) for step_k in steps]
    for returns_n in by_token[1:]:
        for row, own_n in zip(
            rows, torch.split(returns_n, [len(row.kl_n) for row in rows]), strict=True
        ):
            row.columns["returns"] = _whole(own_n, row.sequence)
    return by_token[0]


def _of_steps(algorithm: AlgorithmConfig, returned: Any, *given: Tensor) -> list[Tensor]:
    """Return the advantages, and a critic's targets, that a baseline returned: one for each step, or for all."""
    result = []
    for values_k in returned if isinstance(returned, tuple) else (returned,):
        is_one = isinstance(values_k, Tensor) and values_k.dim() == 0
        values_k = values_k.expand_as(given[0]) if is_one else values_k
        result.append(checked(f"advantage={algorithm.advantage}", values_k, *given))
    return result


def _sampled(values_t: Sequence[float], sequence: TokenSequence) -> Tensor:
    return torch.from_numpy(
        np.array(values_t, np.float64)[np.frombuffer(bytes(sequence.mask), np.bool_)]
    )


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


class KlController:
    """Coefficient of a KL in the rewards: fixed, or adapted to a target (arXiv 1909.08593).

    coef ← coef · (1 + clip(kl / target − 1, ±0.2) · rollouts / horizon)
    """

    def __init__(self, config: AlgorithmConfig) -> None:
        self.coef = config.kl_coef
        self._adapts = config.kl_in if isinstance(config.kl_in, AdaptiveKl) else None

    def update(self, kl: float | None, num_rollouts: int) -> None:
        """Adapt to the mean penalty per token; None if nothing was measured."""
        if self._adapts is not None and kl is not None:
            error = min(max(kl / self._adapts.target - 1, -MAX_KL_ERROR), MAX_KL_ERROR)
            self.coef *= 1 + error * num_rollouts / self._adapts.horizon

    def state(self) -> dict[str, float]:
        return {"coef": self.coef}

    def restore(self, state: Mapping[str, float]) -> None:
        """Continue from a `state`; a fixed coefficient stays as configured."""
        if self._adapts is not None:
            self.coef = state["coef"]
