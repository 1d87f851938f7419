"""Compute once what the sequences of a row begin with in common (trainer.share_prefixes).

In their order as text, each sequence adds to a row what it does not share with the one before.
"""

import itertools
import math
import operator
from collections.abc import Sequence

import numpy as np

from hocket.trainer.batching import Packer, SequenceRun, Sizes, balance, keys, packer
from hocket.types import TrainSample

LITTLE = 16  # a long row is divided where at most a 16th of it is then computed twice
PIECES = (1, 2, 4, 8)  # runs of samples for each rank that are tried, at least
LEAST = 8  # positions that are worth the bookkeeping


@packer("sharing")
class SharingPacker(Packer):
    """Has a row hold a beginning that sequences share once, where that is worth its price."""

    in_order = True

    def order(self, samples: Sequence[TrainSample]) -> Sequence[int]:
        return sorted(range(len(samples)), key=lambda place: keys(samples[place].sequence).tolist())

    def starts(self, samples: Sequence[TrainSample]) -> list[int]:
        return starts([keys(sample.sequence)[:-1] for sample in samples], self.pairs)

    def runs(self, sizes: Sizes, run: SequenceRun, most: float, enough: float = math.inf) -> list[SequenceRun]:
        """Divide a run, where nothing is saved or more than `most` would be together; one alone may be more.

        Beyond `enough` it is divided where little is saved.
        """
        runs: list[list[int]] = []
        total = math.inf
        for number in run:
            total += sizes.added[number]
            saved = sizes.first[number] - sizes.added[number]
            if saved <= 0 or total > most or (total > enough and LITTLE * saved < total):
                runs.append([])
                total = sizes.first[number]
            runs[-1].append(number)
        return list(runs)

    def deal(self, costs: Sizes, num_ranks: int) -> list[list[SequenceRun]]:
        """Return the runs of each rank: longer ones share more, shorter ones can be dealt more evenly."""
        everything = range(len(costs.first))
        if num_ranks == 1:
            return [self.runs(costs, everything, math.inf)]
        dealt = []
        for pieces in PIECES:
            runs = self.runs(costs, everything, costs.of(everything) / (pieces * num_ranks))
            sums = list(map(costs.of, runs))
            parts = balance(sums, num_ranks)
            most = max(sum(sums[index] for index in part) for part in parts)
            dealt.append((most, [[runs[index] for index in part] for part in parts]))
        return min(dealt, key=operator.itemgetter(0))[1]


def starts(sequences: Sequence[np.ndarray], pairs: float) -> list[int]:
    """Count the positions in which each sequence begins like the one before."""
    return [0, *(in_common(*both, pairs) for both in itertools.pairwise(sequences))]


def in_common(before: np.ndarray, ids: np.ndarray, pairs: float) -> int:
    """Count the positions in which `ids` begin alike; 0 where they are too few."""
    least = min(len(before), len(ids))
    differing = np.flatnonzero(before[:least] != ids[:least])
    common = int(differing[0]) if len(differing) else least
    return common if is_worth_sharing(common, len(ids), pairs) else 0


def is_worth_sharing(common: int, length: int, pairs: float) -> bool:
    """Judge the price: a copy of the sequence's keys and, without a kernel, attention of all pairs of what follows.

    `pairs`: of tokens, whose attention costs as much as the rest does for a position; inf with a kernel.
    """
    return common >= LEAST and common * LITTLE >= length and common * 2 * (length + pairs) >= length**2
