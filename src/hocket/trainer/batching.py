"""Packs samples into micro-batches of bounded size; the only place where sequences move to the next-token axis.

A sequence of n tokens becomes a segment of n − 1 positions: position t reads token t and predicts token t + 1. Several
segments share a row, and `position_ids_bt` restarts at each of them, which is how the model keeps them apart: it lets a
position attend within its segment only. Padding at the end of a row is a segment of its own.
"""

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from hocket.errors import TrainerError
from hocket.types import TrainSample


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """One forward pass of one rank. b rows, t next-token axis: everything at t is about the predicted token.

    Attributes:
        mask_bt: true where the predicted token is trained.
        rollout_logprobs_bt: the engine's log-prob of the predicted token; 0 where the mask is false.
        advantages_bt: advantage of the predicted token; 0 where the mask is false.
        num_tokens_global: trained tokens of the whole optimiser step, all micro-batches of all ranks.
        num_sequences_global: sequences with a trained token, counted likewise.
        ref_logprobs_bt: log-prob of the predicted token under the reference policy; None where samples have none.
        values_bt, returns_bt: the critic's estimate before the step, and its target; None likewise.
        sample_bt: which of the packed samples the position belongs to; -1 is padding.
        max_tokens: most trained tokens in the micro-batches that the ranks run at the same time as this one. Each rank
            calls the output head equally often, as ranks that share its weights must.
    """

    input_ids_bt: Tensor
    target_ids_bt: Tensor
    position_ids_bt: Tensor
    mask_bt: Tensor
    rollout_logprobs_bt: Tensor
    advantages_bt: Tensor
    sample_bt: Tensor
    num_tokens_global: int
    num_sequences_global: int
    max_tokens: int
    ref_logprobs_bt: Tensor | None = None
    values_bt: Tensor | None = None
    returns_bt: Tensor | None = None

    def to(self, device: torch.device) -> "TrainBatch":
        """Returns the batch with its tensors on `device`."""
        tensors = {
            field.name: getattr(self, field.name).to(device, non_blocking=True)
            for field in dataclasses.fields(self)
            if isinstance(getattr(self, field.name), Tensor)
        }
        return dataclasses.replace(self, **tensors)


_Numbered = tuple[int, TrainSample]
"""A sample with its place among those that are packed."""


class _MicroBatch:
    """Rows of equal capacity, filled with samples."""

    def __init__(self, capacity: int, max_rows: int) -> None:
        self.capacity = capacity
        self.max_rows = max_rows
        self.rows: list[list[_Numbered]] = []
        self.room: list[int] = []  # free positions per row

    def add(self, sample: _Numbered) -> bool:
        """Puts the sample into the first row with room for it; returns whether there was one."""
        length = num_positions(sample[1])
        for row, room in enumerate(self.room):
            if length <= room:
                self.rows[row].append(sample)
                self.room[row] -= length
                return True
        if len(self.rows) == self.max_rows:
            return False
        self.rows.append([sample])
        self.room.append(self.capacity - length)
        return True


def num_positions(sample: TrainSample) -> int:
    """Returns how many tokens the sample predicts: all but its first."""
    return len(sample.token_ids) - 1


def check_fits(samples: Sequence[TrainSample], micro_batch_tokens: int) -> None:
    """Raises TrainerError where there is no trained token, or a sample that no micro-batch can hold."""
    if not any(any(sample.mask[1:]) for sample in samples):
        raise TrainerError("there is nothing to train on: no sample has a trained token; leave out this step")
    longest = max(num_positions(sample) for sample in samples)
    if longest > micro_batch_tokens:
        raise TrainerError(
            f"a sequence of {longest + 1} tokens doesn't fit into trainer.micro_batch_tokens={micro_batch_tokens}; "
            f"set it to at least {longest}, or shorten sequences with rollout.max_tokens or data.max_prompt_tokens"
        )


def pack(
    samples: Sequence[TrainSample], *, micro_batch_tokens: int, num_ranks: int, pad_id: int = 0
) -> list[list[TrainBatch]]:
    """Returns the micro-batches of each rank, equally many per rank: result[rank][micro-batch].

    Sequences, longest first, go to the rank with the fewest tokens so far; within a rank, into the first row with room
    (first-fit decreasing). A row is as long as the longest sequence of its micro-batch, and a micro-batch has at most
    `micro_batch_tokens` positions, padding included. A rank with fewer micro-batches gets fully masked ones.

    Raises:
        TrainerError: there is no trained token, or a sample is too long.
    """
    check_fits(samples, micro_batch_tokens)
    ordered = sorted(
        enumerate(samples), key=lambda numbered: num_positions(numbered[1]), reverse=True
    )  # stable: equal lengths keep their order
    shares: list[list[_Numbered]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for sample in ordered:
        rank = loads.index(min(loads))
        shares[rank].append(sample)
        loads[rank] += num_positions(sample[1])

    plans = [_fill(share, micro_batch_tokens) for share in shares]
    trained = [sum(sample.mask[1:]) for sample in samples]
    num_tokens, num_sequences = sum(trained), sum(count > 0 for count in trained)
    optional = [name for name in ("ref_logprobs", "values", "returns") if getattr(samples[0], name)]
    result: list[list[TrainBatch]] = [[] for _ in range(num_ranks)]
    for index in range(max(len(plan) for plan in plans)):
        rows_by_rank = [plan[index].rows if index < len(plan) else [] for plan in plans]
        max_tokens = max(sum(sum(s.mask[1:]) for row in rows for _, s in row) for rows in rows_by_rank)
        for rank, rows in enumerate(rows_by_rank):
            result[rank].append(
                _tensors(
                    rows,
                    pad_id,
                    num_tokens=num_tokens,
                    num_sequences=num_sequences,
                    max_tokens=max_tokens,
                    optional=optional,
                )
            )
    return result


def _fill(samples: Sequence[_Numbered], micro_batch_tokens: int) -> list[_MicroBatch]:
    micro_batches: list[_MicroBatch] = []
    for sample in samples:
        if not any(micro_batch.add(sample) for micro_batch in micro_batches):
            capacity = num_positions(sample[1])
            micro_batches.append(_MicroBatch(capacity, micro_batch_tokens // capacity))
            micro_batches[-1].add(sample)
    return micro_batches


def _tensors(
    rows: Sequence[Sequence[_Numbered]],
    pad_id: int,
    *,
    num_tokens: int,
    num_sequences: int,
    max_tokens: int,
    optional: Sequence[str],
) -> TrainBatch:
    """Returns the batch of these rows; without rows, one masked position, so that every rank has something to run."""
    width = max((sum(num_positions(s) for _, s in row) for row in rows), default=1)
    inputs, targets, positions, masks, logprobs, advantages, numbers = ([] for _ in range(7))
    for numbered in rows or [[]]:
        row = [sample for _, sample in numbered]
        padding = width - sum(num_positions(s) for s in row)
        inputs.append([i for s in row for i in s.token_ids[:-1]] + [pad_id] * padding)
        targets.append([i for s in row for i in s.token_ids[1:]] + [pad_id] * padding)
        positions.append([t for s in row for t in range(num_positions(s))] + list(range(padding)))
        masks.append([m for s in row for m in s.mask[1:]] + [False] * padding)
        logprobs.append([lp for s in row for lp in s.rollout_logprobs[1:]] + [0.0] * padding)
        numbers.append([i for i, s in numbered for _ in range(num_positions(s))] + [-1] * padding)
        advantages.append([a for s in row for a in s.advantages[1:]] + [0.0] * padding)
    return TrainBatch(
        input_ids_bt=torch.tensor(inputs, dtype=torch.long),
        target_ids_bt=torch.tensor(targets, dtype=torch.long),
        position_ids_bt=torch.tensor(positions, dtype=torch.long),
        mask_bt=torch.tensor(masks, dtype=torch.bool),
        rollout_logprobs_bt=torch.tensor(logprobs, dtype=torch.float32),
        advantages_bt=torch.tensor(advantages, dtype=torch.float32),
        num_tokens_global=num_tokens,
        num_sequences_global=num_sequences,
        max_tokens=max_tokens,
        sample_bt=torch.tensor(numbers, dtype=torch.long),
        **{f"{name}_bt": _numbers(rows or [[]], name, width) for name in optional},
    )


def _numbers(rows: Sequence[Sequence[_Numbered]], name: str, width: int) -> Tensor:
    said = [[value for _, s in row for value in getattr(s, name)[1:]] for row in rows]
    return torch.tensor([values + [0.0] * (width - len(values)) for values in said], dtype=torch.float32)
