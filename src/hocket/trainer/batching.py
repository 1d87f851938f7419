"""Pack samples into micro-batches; the only place where sequences move to the next-token axis.

A sequence of n tokens becomes a segment of n − 1 positions: position t reads token t and predicts token t + 1. The
segments of a micro-batch share a row without padding. Packing changes results by rounding only.
"""

import dataclasses
import functools
import heapq
import itertools
import random
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from hocket.algorithm.losses import LossBatch
from hocket.errors import TrainerError
from hocket.trainer.attention import Segments
from hocket.types import TokenSequence, TrainSample

_NO_TOKENS = TokenSequence(token_ids=(0, 0), mask=(False, False), logprobs=(0.0, 0.0))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch(LossBatch):
    """One forward pass of one rank. b: one row; t next-token axis: everything at t is about the predicted token."""

    segments: Segments  # the sequences, in their order in the row
    input_ids_bt: Tensor
    target_ids_bt: Tensor
    trained_n: Tensor  # places in the row where the mask is True
    places: tuple[int, ...]  # of the sequences among the packed samples
    max_tokens: int  # most trained tokens of the micro-batches that the ranks run at the same time


Make = Callable[[torch.device], TrainBatch]  # builds a micro-batch, on any rank


def num_positions(sample: TrainSample) -> int:
    return len(sample.sequence.token_ids) - 1


def check_fits(samples: Sequence[TrainSample], micro_batch_tokens: int) -> None:
    if not any(any(sample.sequence.mask[1:]) for sample in samples):
        raise TrainerError("there is nothing to train on: no sample has a trained token; leave out this step")
    longest = max(map(num_positions, samples))
    if longest > micro_batch_tokens:
        raise TrainerError(
            f"a sequence of {longest + 1} tokens doesn't fit into trainer.micro_batch_tokens={micro_batch_tokens}; "
            f"set it to at least {longest}, or shorten sequences with rollout.max_tokens or data.max_prompt_tokens"
        )


def minibatches(groups: Sequence[int], *, epochs: int, count: int, seed: int) -> list[list[int]]:
    """Return the places of each update's samples, in order; groups[i] is the group of sample i.

    Every epoch deals the groups, shuffled by `seed`, into `count` mini-batches, or fewer if groups are fewer.
    """
    distinct = sorted(set(groups))
    shuffles = random.Random(seed)
    count = min(count, len(distinct))
    parts = []
    for _ in range(epochs):
        dealt = shuffles.sample(distinct, len(distinct))
        for first in range(count):
            chosen = set(dealt[first::count])
            parts.append([place for place, group in enumerate(groups) if group in chosen])
    return parts


def divide(
    samples: Sequence[TrainSample], *, micro_batch_tokens: int, num_ranks: int, cost: Callable[[int], float] = float
) -> list[list[Make]]:
    """Return what builds the micro-batches of each rank, equally many per rank: result[rank][micro-batch].

    Ranks get about the same cost; within a rank, by first-fit decreasing, the costliest micro-batch comes first: ranks
    run similar ones at a time. One with fewer runs a masked position. `cost`: of a segment by its positions.
    """
    lengths = list(map(num_positions, samples))
    trained = [sample.sequence.mask[1:].count(True) for sample in samples]
    counts = {"num_tokens_global": sum(trained), "num_sequences_global": len(trained) - trained.count(0)}
    nothing = (0.0, 0.0)
    blank = TrainSample(sequence=_NO_TOKENS, advantages=nothing, columns=dict.fromkeys(samples[0].columns, nothing))
    plans = [_fill(share, lengths, micro_batch_tokens, cost) for share in balance(list(map(cost, lengths)), num_ranks)]
    result: list[list[Make]] = [[] for _ in plans]
    for rows in itertools.zip_longest(*plans, fillvalue=[]):
        max_tokens = max(sum(trained[place] for place in row) for row in rows)
        for share, row in zip(result, rows, strict=True):
            own = [samples[place] for place in row] or [blank]
            share.append(functools.partial(_build, own, tuple(row), {**counts, "max_tokens": max_tokens}))
    return result


def _build(
    samples: Sequence[TrainSample], places: tuple[int, ...], counts: Mapping[str, int], device: torch.device
) -> TrainBatch:
    parts = list(map(_arrays, samples))

    def row(name: str, part: slice = slice(1, None)) -> Tensor:
        return torch.from_numpy(np.concatenate([arrays[name][part] for arrays in parts]))[None]

    def there(tensor: Tensor) -> Tensor:
        return tensor.to(device, non_blocking=True)

    lengths = tuple(map(num_positions, samples))
    mask_bt = row("mask")
    return TrainBatch(
        segments=Segments(lengths, device),
        input_ids_bt=there(row("token_ids", slice(None, -1))),
        target_ids_bt=there(row("token_ids")),
        mask_bt=there(mask_bt),
        rollout_logprobs_bt=there(row("rollout_logprobs")),
        advantages_bt=there(row("advantages")),
        columns={name: there(row(name)) for name in samples[0].columns},
        trained_n=there(mask_bt[0].nonzero()[:, 0]),
        sample_bt=there(torch.arange(len(samples)).repeat_interleave(torch.tensor(lengths))[None]),
        places=places,
        **counts,
    )


def _arrays(sample: TrainSample) -> dict[str, np.ndarray]:
    """Return a sample's numbers, [t] each."""
    sequence = sample.sequence
    numbers = {"rollout_logprobs": sequence.logprobs, "advantages": sample.advantages, **sample.columns}
    return {
        "token_ids": np.array(sequence.token_ids, np.int64),
        "mask": np.frombuffer(bytes(sequence.mask), np.bool_),
        **{name: np.array(values, np.float32) for name, values in numbers.items()},
    }


def unpack(batch: TrainBatch, columns: Mapping[str, Tensor]) -> dict[int, dict[str, tuple[float, ...]]]:
    """Return by each sample's place one number per token and column; 0.0 for the first token."""
    lengths = list(batch.segments.lengths)
    parts = {name: torch.split(values_bt[0].cpu(), lengths) for name, values_bt in columns.items()}
    return {
        place: {name: (0.0, *values[number].tolist()) for name, values in parts.items()}
        for number, place in enumerate(batch.places)
    }


def balance(costs: Sequence[float], num_parts: int) -> list[list[int]]:
    """Return indices in parts of about equal sums: the costliest first, to the cheapest part."""
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    totals = [(0.0, number) for number in range(num_parts)]  # a heap
    for index in sorted(range(len(costs)), key=costs.__getitem__, reverse=True):
        total, number = totals[0]
        parts[number].append(index)
        heapq.heapreplace(totals, (total + costs[index], number))
    return parts


def _fill(
    places: Sequence[int], lengths: Sequence[int], micro_batch_tokens: int, cost: Callable[[int], float]
) -> list[list[int]]:
    micro_batches: list[list[int]] = []
    room: list[int] = []  # free positions of each
    for place in sorted(places, key=lengths.__getitem__, reverse=True):
        index = next((i for i, free in enumerate(room) if free >= lengths[place]), len(room))
        if index == len(room):
            micro_batches.append([])
            room.append(micro_batch_tokens)
        micro_batches[index].append(place)
        room[index] -= lengths[place]
    return sorted(micro_batches, key=lambda row: -sum(cost(lengths[place]) for place in row))
