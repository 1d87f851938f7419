"""Pack samples into micro-batches; the only place where sequences move to the next-token axis.

A sequence of n tokens has n − 1 positions: position t reads token t and predicts token t + 1. The sequences of a
micro-batch share a row without padding, which changes results by rounding only. A `Packer` decides which sequences
come together; that of trainer.share_prefixes has what they begin with in common in a row once (prefixes.py).
"""

import dataclasses
import functools
import heapq
import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hocket.algorithm.losses import LossBatch
from hocket.common.registry import Registry
from hocket.errors import TrainerError
from hocket.trainer.attention import WHOLE, RowPart, Segments
from hocket.types import Image, TokenSequence, TrainSample

SequenceRun = Sequence[int]  # numbers of sequences, one after another in the order of tokens
_NO_TOKENS = TokenSequence(token_ids=(0, 0), mask=(False, False), logprobs=(0.0, 0.0))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch(LossBatch):
    """One forward pass of one rank. b: one; t next-token axis: everything at t is about the predicted token."""

    segments: Segments  # of the row
    input_ids_br: Tensor  # [1, row], or this rank's part of it
    target_ids_bt: Tensor
    trained_n: Tensor  # places on the axis t where the mask is True, of this rank's part
    row_n: Tensor  # their places in `input_ids_br`
    lengths: tuple[int, ...]  # of the sequences, along t
    unbiased_bt: Tensor  # True on sampled tokens of unbiased samples
    places: tuple[int, ...]  # of the sequences among the packed samples
    max_tokens: int  # most trained tokens of the micro-batches that the ranks run at the same time
    images: tuple[Image, ...] = ()  # of the row, each with its first place there


class Sizes(NamedTuple):
    """Sizes of sequences in the packer's order: `first` where one begins a row, `added` right behind the one before."""

    first: Sequence[float]
    added: Sequence[float]

    def of(self, run: SequenceRun) -> float:
        return self.first[run[0]] + sum(self.added[number] for number in run[1:])


class Packer:
    """Packs sequences into rows, each whole: the plain way (trainer.share_prefixes=false).

    A subclass may have a row hold once what sequences begin with in common. Then they are packed in an order of its
    own, in which each adds to a row what it does not share with the one before; `trainer.share_prefixes` names it,
    with the options that `__init__` takes.

    Example: a plugin that shares whole sequences alone, those that are the same but for their last token.

        @packer("twins")
        class Twins(Packer):
            in_order = True

            def order(self, samples: Sequence[TrainSample]) -> Sequence[int]:
                return sorted(range(len(samples)), key=lambda place: keys(samples[place].sequence).tolist())

            def starts(self, samples: Sequence[TrainSample]) -> list[int]:
                read = [tuple(sample.sequence.token_ids[:-1]) for sample in samples]
                return [0, *(len(own) if own == before else 0 for before, own in zip(read, read[1:]))]

            def runs(self, sizes: Sizes, run: SequenceRun, most: float, enough: float = math.inf) -> list[SequenceRun]:
                runs: list[list[int]] = []
                for number in run:
                    if sizes.added[number] == sizes.first[number] or sizes.of([*runs[-1], number]) > most:
                        runs.append([])
                    runs[-1].append(number)
                return list(runs)
    """

    in_order = False  # whether rows hold sequences in the order of `order`
    pairs: float = math.inf
    """Pairs of tokens whose attention costs as much as all else that a model computes for one position."""
    key_share: float = 0.0
    """Memory of a key and a value, as a part of all memory for one position: what a copy of them takes."""

    def order(self, samples: Sequence[TrainSample]) -> Sequence[int]:
        """Return the places of samples in the order in which they are packed."""
        return range(len(samples))

    def starts(self, samples: Sequence[TrainSample]) -> list[int]:
        """Count the positions that each sequence, in that order, has in common with the one before."""
        return [0] * len(samples)

    def runs(self, sizes: Sizes, run: SequenceRun, most: float, enough: float = math.inf) -> list[SequenceRun]:
        """Divide a run into parts that each lie in one row: of at most `most` positions, or about `enough`."""
        return [[number] for number in run]

    def deal(self, costs: Sizes, num_ranks: int) -> list[list[SequenceRun]]:
        """Return the runs of each rank, of about the same cost."""
        if num_ranks == 1:
            return [self.runs(costs, range(len(costs.first)), math.inf)]
        return [[[number] for number in part] for part in balance(costs.first, num_ranks)]


PACKERS: Registry[Callable[..., Packer]] = Registry("packer", sharing="hocket.trainer.prefixes")
packer = PACKERS.register
"""Decorator of a subclass of Packer, which `trainer.share_prefixes` then names."""
packer("plain")(Packer)
PLAIN = Packer()


def chosen_packer(chosen: bool | str | Mapping[str, Any], *, pairs: float = math.inf, key_share: float = 0.0) -> Packer:
    """Make the packer that trainer.share_prefixes chooses. Raises ConfigError."""
    if isinstance(chosen, bool):
        chosen = "sharing" if chosen else "plain"
    made = PACKERS.choose(chosen, "trainer.share_prefixes")()
    made.pairs = pairs
    made.key_share = key_share
    return made


Make = Callable[..., TrainBatch]  # builds a micro-batch, on any rank: (device, its part of the row)


def num_positions(sample: TrainSample) -> int:
    return len(sample.sequence.token_ids) - 1


def keys(sequence: TokenSequence) -> np.ndarray:
    """Return numbers that tell sequences apart: token ids and, as all images have the same, an image's hash."""
    ids = np.array(sequence.token_ids, np.int64)
    for image in sequence.images:
        key = int.from_bytes(bytes.fromhex(image.name[:16]), "little", signed=True)
        ids[image.start : image.start + image.length] = key
    return ids


def check_fits(
    samples: Sequence[TrainSample],
    micro_batch_tokens: int,
    *,
    unit: int = 1,
    packer: Packer = PLAIN,
) -> None:
    """Raise TrainerError for a unit of samples that no micro-batch has room for, or where none has a trained token."""
    if not any(any(sample.sequence.mask[1:]) for sample in samples):
        raise TrainerError("there is nothing to train on: no sample has a trained token; leave out this step")
    lengths = list(map(num_positions, samples))
    starts = packer.starts(samples) if unit > 1 else [0] * len(samples)
    longest = math.ceil(max(_sizes(lengths, starts, packer.key_share, unit).first))
    if longest > micro_batch_tokens:
        what = f"a sequence of {longest + 1} tokens doesn't" if unit == 1 else f"{longest} tokens of one row don't"
        raise TrainerError(
            f"{what} fit into trainer.micro_batch_tokens={micro_batch_tokens}; "
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
    samples: Sequence[TrainSample],
    *,
    micro_batch_tokens: int,
    num_ranks: int,
    row_tokens: float = math.inf,
    cost: Callable[[int], float] = float,
    packer: Packer = PLAIN,
    unit: int = 1,
) -> list[list[Make]]:
    """Pack samples into micro-batches, the same number on every rank.

    Returns result[rank][i], a function that builds the TrainBatch on that rank's device. Ranks get about the same cost;
    within a rank, by first-fit decreasing, the costliest micro-batch comes first: ranks run similar ones at a time. A
    rank that has fewer runs a masked position.

    `row_tokens`: rows are longer only where much is shared. `cost`: of a sequence by its positions. `unit`: samples,
    one after another, that stay so, in one micro-batch.
    """
    firsts = [samples[number * unit] for number in range(len(samples) // unit)]
    places = _members(packer.order(firsts), unit)  # of the samples, in the order in which they are packed
    packed = [samples[place] for place in places]
    trained = [sample.sequence.mask[1:].count(True) for sample in packed]
    counts = {"num_tokens_global": sum(trained), "num_sequences_global": len(trained) - trained.count(0)}
    nothing = (0.0, 0.0)
    blank = TrainSample(sequence=_NO_TOKENS, advantages=nothing, columns=dict.fromkeys(packed[0].columns, nothing))
    enough = min(row_tokens, micro_batch_tokens)
    plans = _plan(packed, packer, num_ranks, most=micro_batch_tokens, enough=enough, cost=cost, unit=unit)
    result: list[list[Make]] = [[] for _ in plans]
    for row_of_each in itertools.zip_longest(*plans, fillvalue=[]):
        max_tokens = max(sum(trained[number] for number in row) for row in row_of_each)
        for part, row in zip(result, row_of_each, strict=True):
            numbers = sorted(row) if packer.in_order else row
            own = [packed[number] for number in numbers] or [blank]
            own_places = tuple(places[number] for number in numbers)
            part.append(functools.partial(_build, own, own_places, packer, {**counts, "max_tokens": max_tokens}))
    return result


def _plan(
    packed: Sequence[TrainSample],
    packer: Packer,
    num_ranks: int,
    *,
    most: float,
    enough: float,
    cost: Callable[[int], float],
    unit: int,
) -> list[list[list[int]]]:
    """Return the rows of each rank, the costliest first: numbers of samples in the packer's order."""
    lengths = list(map(num_positions, packed))
    starts = packer.starts(packed)
    costs_added = [cost(length) - cost(start) for length, start in zip(lengths, starts, strict=True)]
    costs = _of_units(list(map(cost, lengths)), costs_added, unit)
    sizes = _sizes(lengths, starts, packer.key_share, unit)
    plans = []
    for runs in packer.deal(costs, num_ranks):
        parts = [part for run in runs for part in packer.runs(sizes, run, most, enough)]
        rows = _fill(sizes, parts, enough)
        rows.sort(key=lambda row: -sum(costs.first[one] for one in row))
        plans.append([_members(row, unit) for row in rows])
    return plans


def _members(units: Sequence[int], size: int) -> list[int]:
    return [first * size + number for first in units for number in range(size)]


def _sizes(lengths: Sequence[int], starts: Sequence[int], key_share: float, unit: int) -> Sizes:
    spans = zip(lengths, starts, strict=True)
    added = [length - start + key_share * length if start else length for length, start in spans]
    return _of_units(lengths, added, unit)


def _of_units(first: Sequence[float], added: Sequence[float], size: int) -> Sizes:
    """Return the sizes of units from those of their members."""
    starts = range(0, len(first), size)
    alone = [first[start] + sum(added[start + 1 : start + size]) for start in starts]
    return Sizes(alone, [sum(added[start : start + size]) for start in starts])


def _build(
    samples: Sequence[TrainSample],
    places: tuple[int, ...],
    packer: Packer,
    counts: Mapping[str, int],
    device: torch.device,
    part: RowPart = WHOLE,
) -> TrainBatch:
    own = list(map(_arrays, samples))

    def along(name: str) -> Tensor:
        return torch.from_numpy(np.concatenate([arrays[name][1:] for arrays in own]))[None]

    def there(tensor: Tensor) -> Tensor:
        return tensor.to(device, non_blocking=True)

    read = [arrays["token_ids"][:-1] for arrays in own]
    starts = packer.starts(samples)
    size = sum(map(len, read)) - sum(starts)
    read.append(np.zeros(-size % part.size, np.int64))  # parts have the same size
    starts.append(0)
    rows = row_places([len(ids) for ids in read], starts)
    added = [ids[start:] for ids, start in zip(read, starts, strict=True)]
    new = list(map(len, added))  # of one that adds nothing there is no segment
    seen = torch.from_numpy(np.concatenate(list(itertools.compress(rows, new)))) if any(starts) else None
    lengths = tuple(map(num_positions, samples))
    mask_bt = along("mask")
    trained_n = mask_bt[0].nonzero()[:, 0]
    input_ids_br = part.of_row(torch.from_numpy(np.concatenate(added))[None])
    size = input_ids_br.shape[1]
    row_n = torch.from_numpy(np.concatenate(rows))[trained_n] - part.number * size
    is_here = (row_n >= 0) & (row_n < size)
    sample_bt = torch.arange(len(samples)).repeat_interleave(torch.tensor(lengths))[None]
    return TrainBatch(
        segments=Segments(tuple(filter(None, new)), device, tuple(itertools.compress(starts, new)), seen, part),
        input_ids_br=there(input_ids_br),
        target_ids_bt=there(along("token_ids")),
        mask_bt=there(mask_bt),
        rollout_logprobs_bt=there(along("rollout_logprobs")),
        advantages_bt=there(along("advantages")),
        columns={name: there(along(name)) for name in samples[0].columns},
        trained_n=there(trained_n[is_here]),
        row_n=there(row_n[is_here]),
        sample_bt=there(sample_bt),
        unbiased_bt=there(torch.tensor([sample.is_unbiased for sample in samples])[sample_bt] & mask_bt),
        lengths=lengths,
        places=places,
        images=tuple(_images(samples, rows, starts)),
        **counts,
    )


def _images(samples: Sequence[TrainSample], rows: Sequence[np.ndarray], starts: Sequence[int]) -> Iterator[Image]:
    """Yield the images of a row in order, those of a shared beginning once."""
    for sample, places, start in zip(samples, rows, starts, strict=False):
        for image in sample.sequence.images:
            if image.start >= start:
                yield dataclasses.replace(image, start=int(places[image.start]))


def row_places(lengths: Sequence[int], starts: Sequence[int]) -> list[np.ndarray]:
    """Return each sequence's places in the row, [its length]: those that it shares, then its own."""
    rows = [np.arange(0)]
    size = 0
    for length, start in zip(lengths, starts, strict=True):
        rows.append(np.concatenate([rows[-1][:start], np.arange(size, size + length - start)]))
        size += length - start
    return rows[1:]


def _arrays(sample: TrainSample) -> dict[str, np.ndarray]:
    """Return a sample's numbers, [t] each."""
    sequence = sample.sequence
    return {
        "token_ids": np.array(sequence.token_ids, np.int64),
        "mask": np.frombuffer(bytes(sequence.mask), np.bool_),
        **{name: np.array(values, np.float32) for name, values in sample.numbers.items()},
    }


def unpack(batch: TrainBatch, columns: Mapping[str, Tensor]) -> dict[int, dict[str, tuple[float, ...]]]:
    """Return by each sample's place one number per token and column; 0.0 for the first token."""
    parts = {name: torch.split(values_bt[0].cpu(), list(batch.lengths)) for name, values_bt in columns.items()}
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


def _fill(sizes: Sizes, parts: Sequence[SequenceRun], enough: float) -> list[list[int]]:
    """Return sequences in rows of at most `enough`, or of one larger part, by first-fit decreasing of the parts."""
    needs = list(map(sizes.of, parts))
    rows: list[list[int]] = []
    left: list[float] = []  # of each
    for index in sorted(range(len(parts)), key=needs.__getitem__, reverse=True):
        chosen = next((i for i, free in enumerate(left) if free >= needs[index]), len(left))
        if chosen == len(left):
            rows.append([])
            left.append(enough)
        rows[chosen] += parts[index]
        left[chosen] -= needs[index]
    return rows
