"""Packs samples into micro-batches of bounded size; the only place where sequences move to the next-token axis.

A sequence of n tokens becomes a segment of n − 1 positions: position t reads token t and predicts token t + 1. The
segments of a micro-batch lie one after the other in a single row, without padding; `segment_lengths` is how the model
keeps them apart, and `position_ids_bt` restarts at each of them. Which samples share a micro-batch or a rank changes no
number that comes out, only how long it takes.
"""

import dataclasses
import heapq
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hocket.errors import TrainerError
from hocket.types import TrainSample


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """One forward pass of one rank. b: one row; t next-token axis: everything at t is about the predicted token.

    Attributes:
        segment_lengths: positions of each sequence, in their order in the row.
        mask_bt: true where the predicted token is trained.
        rollout_logprobs_bt: the engine's log-prob of the predicted token; 0 where the mask is false.
        advantages_bt: advantage of the predicted token; 0 where the mask is false.
        num_tokens_global: trained tokens of the whole optimiser step, all micro-batches of all ranks.
        num_sequences_global: sequences with a trained token, counted likewise.
        max_tokens: most trained tokens in the micro-batches that the ranks run at the same time as this one. Each rank
            calls the output head equally often, as ranks that share its weights must.
    """

    segment_lengths: tuple[int, ...]
    input_ids_bt: Tensor
    target_ids_bt: Tensor
    position_ids_bt: Tensor
    mask_bt: Tensor
    rollout_logprobs_bt: Tensor
    advantages_bt: Tensor
    num_tokens_global: int
    num_sequences_global: int
    max_tokens: int

    def to(self, device: torch.device) -> "TrainBatch":
        """Returns the batch with its tensors on `device`."""
        tensors = {
            field.name: getattr(self, field.name).to(device, non_blocking=True)
            for field in dataclasses.fields(self)
            if field.name.endswith("_bt")
        }
        return dataclasses.replace(self, **tensors)


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
    samples: Sequence[TrainSample],
    *,
    micro_batch_tokens: int,
    num_ranks: int,
    cost: Callable[[int], float] = float,
) -> list[list[TrainBatch]]:
    """Returns the micro-batches of each rank, equally many per rank: result[rank][micro-batch].

    Ranks get about the same cost; within a rank, sequences go longest first into the first micro-batch with room
    (first-fit decreasing). A rank's costliest micro-batch comes first, so that what the ranks run at the same time is
    about as long. A rank with fewer micro-batches gets fully masked ones.

    Args:
        micro_batch_tokens: most positions in a micro-batch.
        cost: of a segment of so many positions, in any unit.

    Raises:
        TrainerError: there is no trained token, or a sample is too long.
    """
    check_fits(samples, micro_batch_tokens)
    plans = [
        _fill([samples[index] for index in share], micro_batch_tokens, cost)
        for share in balance([cost(num_positions(sample)) for sample in samples], num_ranks)
    ]
    trained = [sum(sample.mask[1:]) for sample in samples]
    num_tokens, num_sequences = sum(trained), sum(count > 0 for count in trained)
    result: list[list[TrainBatch]] = [[] for _ in range(num_ranks)]
    for index in range(max(len(plan) for plan in plans)):
        members = [plan[index] if index < len(plan) else [] for plan in plans]
        max_tokens = max(sum(sum(sample.mask[1:]) for sample in row) for row in members)
        for rank, row in enumerate(members):
            result[rank].append(
                _tensors(row, num_tokens=num_tokens, num_sequences=num_sequences, max_tokens=max_tokens)
            )
    return result


def balance(costs: Sequence[float], num_parts: int) -> list[list[int]]:
    """Returns indices of the costs in parts of about equal sums: Karmarkar and Karp's differencing method.

    Two partial solutions at a time, those whose sums differ most, become one: the largest part of either joins the
    smallest of the other.
    """
    heap = []  # (−difference of the sums, tie-break, parts as (sum, indices) with the largest first)
    for index, value in enumerate(costs):
        parts = [(value, [index]), *((0.0, []) for _ in range(num_parts - 1))]
        heap.append((-value if num_parts > 1 else 0.0, index, parts))
    heapq.heapify(heap)
    while len(heap) > 1:
        (_, order, one), (_, _, other) = heapq.heappop(heap), heapq.heappop(heap)
        joined = [(a + b, [*p, *q]) for (a, p), (b, q) in zip(one, reversed(other), strict=True)]
        joined.sort(key=lambda part: -part[0])
        heapq.heappush(heap, (joined[-1][0] - joined[0][0], order, joined))
    return [indices for _, indices in heap[0][2]]


def _fill(
    samples: Sequence[TrainSample], micro_batch_tokens: int, cost: Callable[[int], float]
) -> list[list[TrainSample]]:
    """Returns the samples in micro-batches, the costliest first."""
    micro_batches: list[list[TrainSample]] = []
    room: list[int] = []  # free positions of each
    for sample in sorted(samples, key=num_positions, reverse=True):
        length = num_positions(sample)
        index = next((i for i, free in enumerate(room) if free >= length), len(room))
        if index == len(room):
            micro_batches.append([])
            room.append(micro_batch_tokens)
        micro_batches[index].append(sample)
        room[index] -= length
    return sorted(micro_batches, key=lambda row: -sum(cost(num_positions(sample)) for sample in row))


def _tensors(row: Sequence[TrainSample], *, num_tokens: int, num_sequences: int, max_tokens: int) -> TrainBatch:
    """Returns the batch of this row; without samples, one masked position, so that every rank has something to run."""
    lengths = tuple(num_positions(sample) for sample in row)
    inputs = [i for s in row for i in s.token_ids[:-1]]
    targets = [i for s in row for i in s.token_ids[1:]]
    positions = [t for length in lengths for t in range(length)]
    mask = [m for s in row for m in s.mask[1:]]
    logprobs = [lp for s in row for lp in s.rollout_logprobs[1:]]
    advantages = [s.advantage if m else 0.0 for s in row for m in s.mask[1:]]
    return TrainBatch(
        segment_lengths=lengths or (1,),
        input_ids_bt=torch.tensor([inputs or [0]], dtype=torch.long),
        target_ids_bt=torch.tensor([targets or [0]], dtype=torch.long),
        position_ids_bt=torch.tensor([positions or [0]], dtype=torch.long),
        mask_bt=torch.tensor([mask or [False]], dtype=torch.bool),
        rollout_logprobs_bt=torch.tensor([logprobs or [0.0]], dtype=torch.float32),
        advantages_bt=torch.tensor([advantages or [0.0]], dtype=torch.float32),
        num_tokens_global=num_tokens,
        num_sequences_global=num_sequences,
        max_tokens=max_tokens,
    )
