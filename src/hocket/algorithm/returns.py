"""Compute advantages from a reward per step, for algorithm.advantage that compares no rollouts.

A step is a sampled token or, with algorithm.credit=turn, a whole turn of the model.

Suffixes: t all tokens of a sequence, n sampled tokens, k turns.
"""

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hocket.algorithm.advantages import along_sequence, at_sampled, checked
from hocket.algorithm.choices import Choice, choose
from hocket.algorithm.credit import Turns, in_order
from hocket.config import AlgorithmConfig
from hocket.types import TokenSequence, TurnReward


class TrainedSequence(NamedTuple):
    """A sequence that is trained, with what its advantages are computed from."""

    owner: int  # number of its rollout in the batch
    id: str
    sequence: TokenSequence
    columns: dict[str, Sequence[float]]  # what the trainer measured, [t] each; "returns" is added
    kl_n: Tensor  # penalty of each sampled token, before its coefficient; 0 without one
    turns: Sequence[TurnReward]  # the model's turns in it; empty unless credit goes by turn


def advantages_by_token(
    rows: Sequence[TrainedSequence], reward: float, algorithm: AlgorithmConfig, kl_coef: float
) -> Tensor:
    """Compute an advantage for each sampled token of a rollout, float64 [n] over all its sequences.

    The rollout's reward belongs to the last token of each sequence. The targets of a critic become
    the column "returns" of the sequences.
    """
    choice = choose("advantage", algorithm.advantage)
    advantages = []
    for row in rows:
        rewards_n = -kl_coef * row.kl_n
        rewards_n[-1] += reward
        columns = {}
        for name in choice.needs:
            columns[f"{name}_t"] = at_sampled(row.columns[name], row.sequence)
        advantages_n, targets_n = _advantages_and_targets(choice, algorithm, rewards_n, columns)
        advantages.append(advantages_n)
        if targets_n is not None:
            row.columns["returns"] = along_sequence(targets_n, row.sequence)
    return torch.cat(advantages)


def advantages_by_turn(
    rows: Sequence[TrainedSequence],
    turns: Turns,
    reward: float,
    algorithm: AlgorithmConfig,
    kl_coef: float,
) -> Tensor:
    """Compute an advantage for each sampled token of a rollout whose steps are the model's turns.

    All tokens of a turn have its advantage, and its target of a critic; what was measured of a turn
    is the value at its first token. `turns`: of the whole rollout, also those that are not trained.
    Returns float64 [n] over all trained sequences of the rollout.
    """
    choice = choose("advantage", algorithm.advantage)
    # The rows hold turns sequence by sequence. Steps have the order in which turns were taken: it
    # differs where an agent went back to an earlier conversation.
    trained: list[TurnReward] = []
    for row in rows:
        trained += row.turns
    order = torch.tensor([turn.number for turn in trained]).argsort()
    sizes = torch.tensor([turn.tokens for turn in trained])
    first_places = sizes.cumsum(0) - sizes  # of each turn's first token among the sampled ones

    # A turn pays for the KL of all its tokens.
    kl_n = torch.cat([row.kl_n for row in rows])
    kl_k = torch.stack([kl_of_turn.sum() for kl_of_turn in torch.split(kl_n, sizes.tolist())])
    rewards = _rewards_of_trained(in_order(turns, reward), {turn.number for turn in trained})
    rewards_k = kl_k[order] * -kl_coef + kl_n.new_tensor(rewards)
    columns = {}
    for name in choice.needs:
        values_n = torch.cat([at_sampled(row.columns[name], row.sequence) for row in rows])
        columns[f"{name}_t"] = values_n[first_places][order]

    # Back from the order of steps to that of the rows, and from turns to tokens.
    advantages_k, targets_k = _advantages_and_targets(choice, algorithm, rewards_k, columns)
    row_order = order.argsort()
    if targets_k is not None:
        targets_n = targets_k[row_order].repeat_interleave(sizes)
        lengths = [len(row.kl_n) for row in rows]
        for row, row_targets_n in zip(rows, torch.split(targets_n, lengths), strict=True):
            row.columns["returns"] = along_sequence(row_targets_n, row.sequence)
    return advantages_k[row_order].repeat_interleave(sizes)


def _rewards_of_trained(turns: Sequence[TurnReward], trained: Collection[int]) -> list[float]:
    """List the rewards of the trained turns of an episode, in the order in which they were taken.

    A turn that is not trained adds its reward to that of the trained turn before it, which led to
    it. Before the first trained turn, a reward counts for none: nothing that is trained led to it.
    """
    rewards: list[float] = []
    for turn in turns:
        if turn.number in trained:
            rewards.append(0.0)
        if rewards:
            rewards[-1] += turn.reward
    return rewards


def _advantages_and_targets(
    choice: Choice, algorithm: AlgorithmConfig, rewards_k: Tensor, columns: dict[str, Tensor]
) -> tuple[Tensor, Tensor | None]:
    """Call an advantage on the rewards of steps, and check its result.

    Returns the advantages and a critic's targets, float64 [k]; None without a critic. A single
    number holds for every step. Raises ConfigError as `checked`.
    """
    returned: Any = choice(rewards_t=rewards_k, **columns)
    if not isinstance(returned, tuple):
        returned = (returned,)
    inputs = [rewards_k]
    inputs.extend(columns.values())
    results = []
    for values_k in returned:
        if isinstance(values_k, Tensor) and values_k.dim() == 0:
            values_k = values_k.expand_as(rewards_k)
        results.append(checked(f"advantage={algorithm.advantage}", values_k, inputs))
    return results[0], results[1] if len(results) > 1 else None
