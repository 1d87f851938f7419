"""Find what sequences begin with alike, so that a row has it once.

In the order of their tokens, each sequence begins like the one before for some positions; only what follows is new. So
a row is these ends, one after another, and a sequence's places in it are those it shares, then its own.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from hocket.trainer.attention import Segments
from hocket.trainer.ulysses import Split

WORTH_SHARING = 8  # positions: each sequence gets a copy of the keys that it shares
Run = list[int]
"""Places of sequences that begin alike, in order."""
Size = Callable[[int, int], float]
"""Size of a sequence's part from a position on: (its place, the position)."""


class Order(NamedTuple):
    """Sequences by their places among all, in the order of their tokens."""

    places: list[int]
    starts: list[int]  # by place: positions that it shares with the one before

    def in_order(self, places: Sequence[int]) -> Run:
        rank = {place: number for number, place in enumerate(self.places)}
        return sorted(places, key=rank.__getitem__)

    def runs(self, places: Sequence[int], size: Size, most: float) -> list[Run]:
        """Divide places that are in order into runs of at most `most`; a single sequence may be more."""
        runs: list[Run] = []
        total = math.inf
        for place in places:
            total += size(place, self.starts[place])
            if self.starts[place] == 0 or total > most:
                runs.append([])
                total = size(place, 0)
            runs[-1].append(place)
        return runs

    def size(self, run: Sequence[int], size: Size) -> float:
        """Return the size of places that are in order, where the first one shares nothing."""
        return size(run[0], 0) + sum(size(place, self.starts[place]) for place in run[1:])


def unshared(number: int) -> Order:
    return Order(list(range(number)), [0] * number)


def order(sequences: Sequence[Sequence[int]]) -> Order:
    ids = [np.array(sequence, ">u4") for sequence in sequences]  # whose bytes are in the order of the numbers
    places = sorted(range(len(ids)), key=lambda place: ids[place].tobytes())
    starts = [0] * len(ids)
    for before, place in itertools.pairwise(places):
        starts[place] = in_common(ids[before], ids[place])
    return Order(places, starts)


def in_common(before: np.ndarray, ids: np.ndarray) -> int:
    """Return how many positions begin alike; 0 where they are too few."""
    least = min(len(before), len(ids))
    differing = np.flatnonzero(before[:least] != ids[:least])
    common = int(differing[0]) if len(differing) else least
    return common if common >= WORTH_SHARING else 0


def places(lengths: Sequence[int], starts: Sequence[int]) -> list[np.ndarray]:
    """Return each sequence's places in the row, [its length]."""
    rows = [np.arange(0)]
    size = 0
    for length, start in zip(lengths, starts, strict=True):
        rows.append(np.concatenate([rows[-1][:start], np.arange(size, size + length - start)]))
        size += length - start
    return rows[1:]


def segments(
    rows: Sequence[np.ndarray], starts: Sequence[int], device: torch.device, split: Split | None = None
) -> Segments:
    """Return how `places` divide their row; a sequence that adds nothing to it has no segment."""
    adding = [(row, start) for row, start in zip(rows, starts, strict=True) if len(row) > start]
    lengths = tuple(len(row) - start for row, start in adding)
    if not any(starts):
        return Segments(lengths, device, split=split)
    seen = torch.from_numpy(np.concatenate([row for row, _ in adding]))
    return Segments(lengths, device, tuple(start for _, start in adding), seen, split)
