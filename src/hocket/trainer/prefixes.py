"""Compute a prefix once for all sequences of a row that share it (trainer.share_prefixes).

Sequences are ordered by their tokens, and each adds to a row what it does not share with the one
before. Attention copies the keys and values of the prefix for each (`Segments.key_places`).
"""

import itertools
import math
from collections.abc import Sequence

import numpy as np

from hocket.trainer.packing import Packer, SequenceRun, Sizes, balance, keys, packer
from hocket.types import TrainSample

LITTLE = 16  # a prefix is little if it is less than a 16th of what it is compared with
PIECES = (1, 2, 4, 8)  # least numbers of runs per rank that `deal` tries
LEAST = 8  # positions of the shortest prefix that is worth the bookkeeping


@packer("sharing")
class SharingPacker(Packer):
    """Packs sequences so that a row holds a shared prefix once, where that is worth its price."""

    in_order = True

    def order(self, samples: Sequence[TrainSample]) -> Sequence[int]:
        texts = [keys(sample.sequence).tolist() for sample in samples]
        return sorted(range(len(samples)), key=texts.__getitem__)

    def starts(self, samples: Sequence[TrainSample]) -> list[int]:
        inputs = [keys(sample.sequence)[:-1] for sample in samples]  # no position reads the last
        result = [0]
        for before, ids in itertools.pairwise(inputs):
            result.append(shared_length(before, ids, self.pairs))
        return result

    def runs(
        self, sizes: Sizes, run: SequenceRun, most: float, enough: float = math.inf
    ) -> list[SequenceRun]:
        """Divide a run where nothing is shared, and where it would be larger than `most`.

        Beyond `enough` it is divided where little is shared. A single sequence may be larger.
        """
        runs: list[list[int]] = []
        total = 0.0  # size of the last run
        for number in run:
            total += sizes.added[number]
            saved = sizes.first[number] - sizes.added[number]
            is_long = total > enough and LITTLE * saved < total
            if not runs or saved <= 0 or total > most or is_long:
                runs.append([])
                total = sizes.first[number]
            runs[-1].append(number)
        return list(runs)

    def deal(self, costs: Sizes, num_ranks: int) -> list[list[SequenceRun]]:
        """Divide all sequences into runs, and the runs among ranks: result[rank].

        Longer runs share more, shorter ones balance the ranks better. Runs of several lengths are
        tried, and those are taken with which the slowest rank has the least to do.
        """
        everything = range(len(costs.first))
        if num_ranks == 1:
            return [self.runs(costs, everything, math.inf)]
        best: list[list[SequenceRun]] = []
        least = math.inf  # cost of the slowest rank in `best`
        for pieces in PIECES:
            runs = self.runs(costs, everything, costs.of(everything) / (pieces * num_ranks))
            run_costs = [costs.of(run) for run in runs]
            parts = balance(run_costs, num_ranks)
            rank_costs = [_selected_sum(run_costs, part) for part in parts]
            if max(rank_costs) < least:
                least = max(rank_costs)
                best = [_selected(runs, part) for part in parts]
        return best


def _selected(runs: Sequence[SequenceRun], indices: Sequence[int]) -> list[SequenceRun]:
    return [runs[index] for index in indices]


def _selected_sum(values: Sequence[float], indices: Sequence[int]) -> float:
    return sum(values[index] for index in indices)


def shared_length(before: np.ndarray, ids: np.ndarray, pairs: float) -> int:
    """Count the positions of the prefix that `ids` share with `before`; 0 if not worth sharing."""
    shorter = min(len(before), len(ids))
    differing = np.flatnonzero(before[:shorter] != ids[:shorter])
    common = int(differing[0]) if len(differing) else shorter
    return common if is_worth_sharing(common, len(ids), pairs) else 0


def is_worth_sharing(common: int, length: int, pairs: float) -> bool:
    """Decide whether to share the first `common` positions of `length`.

    The price is a copy of the keys of the whole sequence. Without a kernel, it is also attention
    between all pairs of the positions behind the prefix, not only the causal pairs.

    Args:
        common: positions of the prefix.
        length: positions of the sequence.
        pairs: pairs of tokens whose attention costs as much as all else does for one position;
            infinite with a kernel.
    """
    # In pairs, the whole sequence costs length · pairs + length² / 2. Behind a shared prefix, it
    # costs (length - common) · (pairs + length). The second is not more than the first if:
    saves_enough = common * 2 * (length + pairs) >= length**2
    return common >= LEAST and common * LITTLE >= length and saves_enough
