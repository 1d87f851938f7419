"""Compute once what the sequences of a row begin with in common (trainer.share_prefixes).

In the order of their tokens, each sequence adds to a row what it does not share with the one
before; attention copies the keys and values of the prefix for each (`Segments.key_places`).
"""

import itertools
import math
import operator
from collections.abc import Sequence

import numpy as np

from hocket.trainer.packing import Packer, SequenceRun, Sizes, balance, keys, packer
from hocket.types import TrainSample

LITTLE = 16  # a long row is divided where at most a 16th of it is then computed twice
PIECES = (1, 2, 4, 8)  # runs of samples for each rank that are tried, at least
LEAST = 8  # positions that are worth the bookkeeping


@packer("sharing")
class SharingPacker(Packer):
    """Has a row hold the prefix that sequences share once, where that is worth its price."""

    in_order = True

    def order(self, samples: Sequence[TrainSample]) -> Sequence[int]:
        texts = [keys(sample.sequence).tolist() for sample in samples]
        return sorted(range(len(samples)), key=texts.__getitem__)

    def starts(self, samples: Sequence[TrainSample]) -> list[int]:
        return starts([keys(sample.sequence)[:-1] for sample in samples], self.pairs)

    def runs(
        self, sizes: Sizes, run: SequenceRun, most: float, enough: float = math.inf
    ) -> list[SequenceRun]:
        """Divide a run where nothing is saved, and where it would be larger than `most`.

        Beyond `enough` it is divided where little is saved. A single sequence may be larger.
        """
        runs: list[list[int]] = []
        total = math.inf
        for number in run:
            total += sizes.added[number]
            saved = sizes.first[number] - sizes.added[number]
            is_long = total > enough and LITTLE * saved < total
            if saved <= 0 or total > most or is_long:
                runs.append([])
                total = sizes.first[number]
            runs[-1].append(number)
        return list(runs)

    def deal(self, costs: Sizes, num_ranks: int) -> list[list[SequenceRun]]:
        """Divide all sequences into runs, and these among ranks: result[rank].

        Longer runs share more, shorter ones can be dealt more evenly: the best of some lengths is
        the one by which the slowest rank has the least to do.
        """
        everything = range(len(costs.first))
        if num_ranks == 1:
            return [self.runs(costs, everything, math.inf)]
        dealt = []
        for pieces in PIECES:
            runs = self.runs(costs, everything, costs.of(everything) / (pieces * num_ranks))
            sums = [costs.of(run) for run in runs]
            parts = balance(sums, num_ranks)
            slowest = max(sum(sums[index] for index in part) for part in parts)
            runs_of_ranks = [[runs[index] for index in part] for part in parts]
            dealt.append((slowest, runs_of_ranks))
        _, best = min(dealt, key=operator.itemgetter(0))
        return best


def starts(sequences: Sequence[np.ndarray], pairs: float) -> list[int]:
    """Count the positions of the prefix that each sequence shares with the one before."""
    result = [0]
    for before, ids in itertools.pairwise(sequences):
        result.append(in_common(before, ids, pairs))
    return result


def in_common(before: np.ndarray, ids: np.ndarray, pairs: float) -> int:
    """Count the positions in which `ids` begin like `before`; 0 where they are too few."""
    least = min(len(before), len(ids))
    differing = np.flatnonzero(before[:least] != ids[:least])
    common = int(differing[0]) if len(differing) else least
    return common if is_worth_sharing(common, len(ids), pairs) else 0


def is_worth_sharing(common: int, length: int, pairs: float) -> bool:
    """Judge whether to share the first `common` positions of `length`.

    The price is a copy of the keys of the whole sequence and, without a kernel, attention between
    all pairs of what follows on the prefix, not only the causal ones.

    `pairs`: of tokens, whose attention costs as much as all else does for one position; inf with a
    kernel.
    """
    saves_enough = common * 2 * (length + pairs) >= length**2
    return common >= LEAST and common * LITTLE >= length and saves_enough
