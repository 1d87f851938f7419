"""Decide which sequences share a row, and which rank computes it.

A row is the input of one forward pass: sequences one after another, without padding. A `Packer`
decides which sequences come together. The plain packer is here; prefixes.py has the packer of
trainer.share_prefixes, whose rows hold a prefix that sequences share only once.
"""

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from hocket.common.registry import Registry
from hocket.errors import TrainerError
from hocket.types import TokenSequence, TrainSample

SequenceRun = Sequence[int]
"""Numbers of sequences that follow each other in the packer's order."""


class Sizes(NamedTuple):
    """Sizes of sequences in the packer's order: their costs or, in a row, their positions."""

    first: Sequence[float]  # size of each sequence where it is the first of a row
    added: Sequence[float]  # what each adds to a row that has the sequence before it

    def of(self, run: SequenceRun) -> float:
        """Compute the size of a run in one row."""
        return self.first[run[0]] + sum(self.added[number] for number in run[1:])


class Packer:
    """Packs sequences into rows, each sequence whole: the plain way (trainer.share_prefixes=false).

    A subclass may have rows hold a shared prefix once. `order` puts the sequences that share one
    side by side, and `starts` counts what each shares with the sequence before. `deal` then divides
    the sequences among ranks, and `runs` those of a rank among rows. `trainer.share_prefixes` names
    the subclass, with the options that `__init__` takes.

    Example: a plugin that shares whole sequences only, those that are equal but for the last token.

        @packer("twins")
        class Twins(Packer):
            in_order = True

            def order(self, samples: Sequence[TrainSample]) -> Sequence[int]:
                texts = [keys(sample.sequence).tolist() for sample in samples]
                return sorted(range(len(samples)), key=texts.__getitem__)

            def starts(self, samples: Sequence[TrainSample]) -> list[int]:
                read = [tuple(sample.sequence.token_ids[:-1]) for sample in samples]
                starts = [0]
                for before, ids in zip(read, read[1:]):
                    starts.append(len(ids) if ids == before else 0)
                return starts

            def runs(
                self, sizes: Sizes, run: SequenceRun, most: float, enough: float = math.inf
            ) -> list[SequenceRun]:
                runs: list[list[int]] = []
                for number in run:
                    is_new = sizes.added[number] == sizes.first[number]
                    if is_new or sizes.of(runs[-1] + [number]) > most:
                        runs.append([])
                    runs[-1].append(number)
                return list(runs)
    """

    in_order = False  # whether rows hold sequences in the order of `order`
    pairs: float = math.inf
    """Pairs of tokens whose attention costs as much as all else that one position costs."""
    key_share: float = 0.0
    """Memory of a copied key and value, as a part of all memory for one position."""

    def order(self, samples: Sequence[TrainSample]) -> Sequence[int]:
        """List the places of samples in the order in which they are packed."""
        return range(len(samples))

    def starts(self, samples: Sequence[TrainSample]) -> list[int]:
        """Count the positions that each sequence, in that order, shares with the one before."""
        return [0] * len(samples)

    def runs(
        self, sizes: Sizes, run: SequenceRun, most: float, enough: float = math.inf
    ) -> list[SequenceRun]:
        """Divide a run into parts that each lie in one row.

        A part has at most `most` positions, and more than `enough` only where much is shared.
        """
        return _each_alone(run)

    def deal(self, costs: Sizes, num_ranks: int) -> list[list[SequenceRun]]:
        """Divide all sequences into runs, of about equal costs for each rank: result[rank]."""
        if num_ranks == 1:
            return [self.runs(costs, range(len(costs.first)), math.inf)]
        return [_each_alone(numbers) for numbers in balance(costs.first, num_ranks)]


def _each_alone(numbers: Sequence[int]) -> list[SequenceRun]:
    return [[number] for number in numbers]


PACKERS: Registry[Callable[..., Packer]] = Registry("packer", sharing="hocket.trainer.prefixes")
packer = PACKERS.register
"""Decorator of a subclass of Packer, which `trainer.share_prefixes` then names."""
packer("plain")(Packer)
PLAIN = Packer()


def chosen_packer(
    chosen: bool | str | Mapping[str, Any], *, pairs: float = math.inf, key_share: float = 0.0
) -> Packer:
    """Make the packer that trainer.share_prefixes chooses. Raises ConfigError."""
    if isinstance(chosen, bool):
        chosen = "sharing" if chosen else "plain"
    result = PACKERS.choose(chosen, "trainer.share_prefixes")()
    result.pairs = pairs
    result.key_share = key_share
    return result


def num_positions(sample: TrainSample) -> int:
    """Count the positions of a sample: its last token is predicted, and not read."""
    return len(sample.sequence.token_ids) - 1


def keys(sequence: TokenSequence) -> np.ndarray:
    """Give each token a number, such that equal numbers mean equal input: int64 [tokens].

    These have nothing to do with attention's keys. They are token ids and, in place of an image's
    tokens, a hash of the image: all images have the same token ids.
    """
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
    """Raise TrainerError if no sample has a trained token, or a unit fits into no micro-batch.

    `unit` is the number of consecutive samples that stay together in one micro-batch.
    """
    if not any(any(sample.sequence.mask[1:]) for sample in samples):
        raise TrainerError(
            "there is nothing to train on: no sample has a trained token; leave out this step"
        )

    # The first sequence of a row shares nothing, and any sequence, or unit, may be the first. The
    # other sequences of a unit do share with the ones before.
    lengths = list(map(num_positions, samples))
    starts = packer.starts(samples) if unit > 1 else [0] * len(samples)
    longest = math.ceil(max(sizes_of_units(lengths, starts, packer.key_share, unit).first))
    if longest > micro_batch_tokens:
        row = f"{longest} tokens of one row don't"
        if unit == 1:
            row = f"a sequence of {longest + 1} tokens doesn't"
        raise TrainerError(
            f"{row} fit into trainer.micro_batch_tokens={micro_batch_tokens}; set it to at least "
            f"{longest}, or shorten sequences with rollout.max_tokens or data.max_prompt_tokens"
        )


def plan_rows(
    samples: Sequence[TrainSample],
    packer: Packer,
    num_ranks: int,
    *,
    micro_batch_tokens: float,
    row_tokens: float,
    cost: Callable[[int], float],
    unit: int,
) -> list[list[list[int]]]:
    """Plan the rows of each rank, the costliest first: result[rank][row] has numbers of samples.

    The arguments are those of batching.divide, with the samples in the packer's order.
    """
    # Costs balance the ranks, and sizes fill the rows. In both, a prefix that a sequence shares
    # with the one before counts only once.
    lengths = list(map(num_positions, samples))
    starts = packer.starts(samples)
    costs_first = [cost(length) for length in lengths]
    costs_added = []
    for start, whole in zip(starts, costs_first, strict=True):
        costs_added.append(whole - cost(start))
    costs = _of_units(costs_first, costs_added, unit)
    sizes = sizes_of_units(lengths, starts, packer.key_share, unit)

    def negative_cost(row: Sequence[int]) -> float:
        return -sum(costs.first[number] for number in row)

    # A run that is too long for a row is divided. Rows are then filled with parts, the largest
    # first, which mixes up their order. Numbers are those of units until the end.
    plans = []
    for runs in packer.deal(costs, num_ranks):
        parts: list[SequenceRun] = []
        for run in runs:
            parts += packer.runs(sizes, run, micro_batch_tokens, row_tokens)
        rows = _fill(sizes, parts, row_tokens)
        rows.sort(key=negative_cost)
        if packer.in_order:
            rows = [sorted(row) for row in rows]
        plans.append([members_of_units(row, unit) for row in rows])
    return plans


def members_of_units(units: Sequence[int], size: int) -> list[int]:
    """List the members of units: unit i has the `size` members from i · size on."""
    members: list[int] = []
    for number in units:
        members += range(number * size, (number + 1) * size)
    return members


def sizes_of_units(
    lengths: Sequence[int], starts: Sequence[int], key_share: float, unit: int
) -> Sizes:
    """Compute the sizes of units, in positions.

    A sequence that shares a prefix adds its other positions, and the memory for a copy of its keys
    and values: `key_share` of a position's memory for each position.
    """
    added: list[float] = []
    for length, start in zip(lengths, starts, strict=True):
        size: float = length
        if start > 0:
            size = length - start + key_share * length
        added.append(size)
    return _of_units(lengths, added, unit)


def _of_units(first: Sequence[float], added: Sequence[float], size: int) -> Sizes:
    """Sum the sizes of the members of each unit."""
    unit_first = []
    unit_added = []
    for start in range(0, len(first), size):
        end = start + size
        unit_first.append(first[start] + sum(added[start + 1 : end]))
        unit_added.append(sum(added[start:end]))
    return Sizes(unit_first, unit_added)


def balance(costs: Sequence[float], num_parts: int) -> list[list[int]]:
    """Divide the indices of costs into parts of about equal sums.

    The costliest goes first, each to the part that is the cheapest so far.
    """
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    totals = [(0.0, number) for number in range(num_parts)]  # a heap: the cheapest is first
    for index in sorted(range(len(costs)), key=costs.__getitem__, reverse=True):
        total, number = totals[0]
        parts[number].append(index)
        heapq.heapreplace(totals, (total + costs[index], number))
    return parts


def _fill(sizes: Sizes, parts: Sequence[SequenceRun], row_tokens: float) -> list[list[int]]:
    """Put parts into rows of at most `row_tokens` positions, or of one larger part.

    First-fit decreasing: the largest part goes first, each into the first row that has room.
    """
    sizes_of_parts = [sizes.of(part) for part in parts]
    rows: list[list[int]] = []
    room: list[float] = []  # positions that each row has still room for
    for index in sorted(range(len(parts)), key=sizes_of_parts.__getitem__, reverse=True):
        size = sizes_of_parts[index]
        fitting = (number for number, free in enumerate(room) if free >= size)
        number = next(fitting, len(rows))
        if number == len(rows):
            rows.append([])
            room.append(row_tokens)
        rows[number] += parts[index]
        room[number] -= size
    return rows
