"""Pack samples into micro-batches; the only place where sequences move to the next-token axis.

A sequence of n tokens becomes a segment of n − 1 positions: position t reads token t and predicts token t + 1. The
segments of a micro-batch share one row without padding. How samples are packed changes a result by rounding only.
"""

import dataclasses
import functools
import heapq
import itertools
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hocket.errors import TrainerError
from hocket.types import TrainSample


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """One forward pass of one rank. b: one row; t next-token axis: everything at t is about the predicted token."""

    segment_lengths: tuple[int, ...]  # positions of each sequence, in their order in the row
    input_ids_bt: Tensor
    target_ids_bt: Tensor
    position_ids_bt: Tensor  # restarts at each segment
    mask_bt: Tensor  # True where the predicted token is trained
    rollout_logprobs_bt: Tensor  # the engine's, 0 where the mask is False
    advantages_bt: Tensor  # 0 where the mask is False
    trained_n: Tensor  # places in the row where the mask is True
    sample_bt: Tensor  # number of the sequence in the row; -1: none
    places: tuple[int, ...]  # of the sequences among the packed samples
    num_tokens_global: int  # trained tokens of the whole optimiser step, over all ranks
    num_sequences_global: int  # sequences with a trained token, counted likewise
    max_tokens: int  # most trained tokens of the micro-batches that the ranks run at the same time
    columns: Mapping[str, Tensor]  # [b, t] the samples' other numbers, by name

    def to(self, device: torch.device) -> "TrainBatch":
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        moved = {name: v.to(device, non_blocking=True) for name, v in values.items() if isinstance(v, Tensor)}
        columns = {name: v.to(device, non_blocking=True) for name, v in self.columns.items()}
        return TrainBatch(**values | moved | {"columns": columns})


Make = Callable[[], TrainBatch]  # builds a micro-batch, on any rank


def num_positions(sample: TrainSample) -> int:
    return len(sample.sequence.token_ids) - 1


def check_fits(samples: Sequence[TrainSample], micro_batch_tokens: int) -> None:
    if not any(any(sample.sequence.mask[1:]) for sample in samples):
        raise TrainerError("there is nothing to train on: no sample has a trained token; leave out this step")
    longest = max(num_positions(sample) for sample in samples)
    if longest > micro_batch_tokens:
        raise TrainerError(
            f"a sequence of {longest + 1} tokens doesn't fit into trainer.micro_batch_tokens={micro_batch_tokens}; "
            f"set it to at least {longest}, or shorten sequences with rollout.max_tokens or data.max_prompt_tokens"
        )


def minibatches(groups: Sequence[int], *, epochs: int, count: int, seed: int) -> list[list[int]]:
    """Return the places of the samples of each update, in order; groups[i] is the group of sample i.

    Every epoch deals the groups, shuffled by `seed`, into `count` mini-batches, or fewer if there are fewer groups.
    """
    distinct = sorted(set(groups))
    shuffles = random.Random(seed)
    parts = []
    count = min(count, len(distinct))
    for _ in range(epochs):
        dealt = shuffles.sample(distinct, len(distinct))
        mini_batches = [set(dealt[first::count]) for first in range(count)]
        parts += [[place for place, group in enumerate(groups) if group in chosen] for chosen in mini_batches]
    return parts


def divide(
    samples: Sequence[TrainSample], *, micro_batch_tokens: int, num_ranks: int, cost: Callable[[int], float] = float
) -> list[list[Make]]:
    """Return what builds the micro-batches of each rank, equally many per rank: result[rank][micro-batch].

    Ranks get about the same cost; within a rank, sequences go by first-fit decreasing, and the costliest micro-batch
    comes first, so that the ranks run similar ones at a time. A rank with fewer gets fully masked ones. `cost`: of a
    segment with this number of positions.
    """
    lengths = list(map(num_positions, samples))
    plans = [_fill(share, lengths, micro_batch_tokens, cost) for share in balance(list(map(cost, lengths)), num_ranks)]
    trained = [sample.sequence.mask[1:].count(True) for sample in samples]
    counts = {"num_tokens_global": sum(trained), "num_sequences_global": sum(count > 0 for count in trained)}
    result: list[list[Make]] = [[] for _ in range(num_ranks)]
    for members in itertools.zip_longest(*plans, fillvalue=[]):
        max_tokens = max(sum(trained[place] for place in row) for row in members)
        for share, row in zip(result, members, strict=True):
            own = {place: samples[place] for place in row}
            share.append(functools.partial(_build, own, list(samples[0].columns), {**counts, "max_tokens": max_tokens}))
    return result


def pack(samples: Sequence[TrainSample], **how: Any) -> list[list[TrainBatch]]:
    """Return what `divide` describes, built."""
    return [[make() for make in share] for share in divide(samples, **how)]


def _build(row: Mapping[int, TrainSample], columns: Sequence[str], counts: Mapping[str, Any]) -> TrainBatch:
    """Return a row's batch; without samples, one masked position, so that every rank has something to run."""
    samples = row.values()
    lengths = list(map(num_positions, samples))
    token_ids = [np.array(sample.sequence.token_ids) for sample in samples]

    def joined(parts: Iterable[Sequence[Any] | np.ndarray], dtype: type, empty: int = 0) -> Tensor:
        arrays: list[Any] = [np.array(part, dtype) for part in parts] or [np.array([empty], dtype)]
        return torch.from_numpy(np.concatenate(arrays))[None]

    mask_bt = joined((np.frombuffer(bytes(sample.sequence.mask[1:]), np.bool_) for sample in samples), np.bool_)
    return TrainBatch(
        segment_lengths=tuple(lengths) or (1,),
        input_ids_bt=joined((ids[:-1] for ids in token_ids), np.int64),
        target_ids_bt=joined((ids[1:] for ids in token_ids), np.int64),
        position_ids_bt=joined(map(np.arange, lengths), np.int64),
        sample_bt=joined(map(np.full, lengths, range(len(row))), np.int64, -1),
        places=tuple(row),
        mask_bt=mask_bt,
        trained_n=mask_bt[0].nonzero()[:, 0],
        rollout_logprobs_bt=joined((sample.sequence.logprobs[1:] for sample in samples), np.float32),
        advantages_bt=joined((sample.advantages[1:] for sample in samples), np.float32),
        columns={name: joined((one.columns[name][1:] for one in samples), np.float32) for name in columns},
        **counts,
    )


def unpack(
    batches: Sequence[TrainBatch], columns: Mapping[str, Sequence[Tensor]]
) -> dict[int, dict[str, tuple[float, ...]]]:
    """Return by each sample's place one number per token and column; 0.0 for the first token."""
    found: dict[int, dict[str, tuple[float, ...]]] = {}
    for index, batch in enumerate(batches):
        lengths = list(batch.segment_lengths)
        parts = {name: torch.split(tensors[index][0].cpu(), lengths) for name, tensors in columns.items()}
        for number, place in enumerate(batch.places):
            found[place] = {name: (0.0, *values[number].tolist()) for name, values in parts.items()}
    return found


def balance(costs: Sequence[float], num_parts: int) -> list[list[int]]:
    """Return indices in parts of about equal sums: the costliest first, each to the cheapest part."""
    parts = [(0.0, number, list[int]()) for number in range(num_parts)]  # a heap
    for index in sorted(range(len(costs)), key=costs.__getitem__, reverse=True):
        total, number, part = parts[0]
        part.append(index)
        heapq.heapreplace(parts, (total + costs[index], number, part))
    return [part for _, _, part in sorted(parts, key=lambda one: one[1])]


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
