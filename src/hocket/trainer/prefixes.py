"""Find what sequences begin with alike, so that a row has it once.

In the order of their tokens, each sequence begins like the one before for some positions; only what follows is new. So
a row is these ends, one after another, and a sequence's places in it are those it shares, then its own.
"""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from hocket.trainer.attention import RowPart, Segments

LITTLE = 16  # a part of a row that it may cost to divide it
Run = Sequence[int]
"""Numbers of sequences, one after another in the order of tokens."""


class Sizes(NamedTuple):
    """By sequence, in the order of tokens: its size alone, and that of what it adds to the one before."""

    first: Sequence[float]
    added: Sequence[float]

    def of(self, run: Run) -> float:
        return self.first[run[0]] + sum(self.added[number] for number in run[1:])

    def runs(self, run: Run, most: float, enough: float = math.inf) -> list[Run]:
        """Divide a run, where nothing is saved or more than `most` would be together; one alone may be more.

        Beyond `enough` it is divided where little is saved.
        """
        runs: list[list[int]] = []
        total = math.inf
        for number in run:
            total += self.added[number]
            saved = self.first[number] - self.added[number]
            if saved <= 0 or total > most or (total > enough and LITTLE * saved < total):
                runs.append([])
                total = self.first[number]
            runs[-1].append(number)
        return list(runs)


def order(sequences: Sequence[Sequence[int]]) -> list[int]:
    """Return the places of sequences in the order of their tokens."""
    return sorted(range(len(sequences)), key=lambda place: tuple(sequences[place]))


def starts(sequences: Sequence[np.ndarray]) -> list[int]:
    """Return how many positions each sequence begins like the one before."""
    return [0, *(in_common(*both) for both in itertools.pairwise(sequences))]


def in_common(before: np.ndarray, ids: np.ndarray) -> int:
    """Return how many positions of `ids` begin alike; 0 where they are too few."""
    least = min(len(before), len(ids))
    differing = np.flatnonzero(before[:least] != ids[:least])
    common = int(differing[0]) if len(differing) else least
    return common if is_worth_sharing(common, len(ids)) else 0


def is_worth_sharing(common: int, length: int) -> bool:
    """Judge the price: a copy of the keys and, on a CPU, attention of twice the cost, of the whole sequence."""
    return common >= 8 and common * 16 >= length


def places(lengths: Sequence[int], starts: Sequence[int]) -> list[np.ndarray]:
    """Return each sequence's places in the row, [its length]."""
    rows = [np.arange(0)]
    size = 0
    for length, start in zip(lengths, starts, strict=True):
        rows.append(np.concatenate([rows[-1][:start], np.arange(size, size + length - start)]))
        size += length - start
    return rows[1:]


def segments(rows: Sequence[np.ndarray], starts: Sequence[int], device: torch.device, part: RowPart) -> Segments:
    """Return how `places` divide their row; a sequence that adds nothing to it has no segment."""
    adding = [(row, start) for row, start in zip(rows, starts, strict=True) if len(row) > start]
    lengths = tuple(len(row) - start for row, start in adding)
    if not any(starts):
        return Segments(lengths, device, part=part)
    seen = torch.from_numpy(np.concatenate([row for row, _ in adding]))
    return Segments(lengths, device, tuple(start for _, start in adding), seen, part)
