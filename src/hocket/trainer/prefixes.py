"""Find what sequences begin with alike, so that a row has it once."""

import itertools
from collections.abc import Sequence

import numpy as np


def starts(sequences: Sequence[np.ndarray], pairs: float) -> list[int]:
    """Return how many positions each sequence begins like the one before."""
    return [0, *(in_common(*both, pairs) for both in itertools.pairwise(sequences))]


def in_common(before: np.ndarray, ids: np.ndarray, pairs: float) -> int:
    """Return how many positions of `ids` begin alike; 0 where they are too few."""
    least = min(len(before), len(ids))
    differing = np.flatnonzero(before[:least] != ids[:least])
    common = int(differing[0]) if len(differing) else least
    return common if is_worth_sharing(common, len(ids), pairs) else 0


def is_worth_sharing(common: int, length: int, pairs: float) -> bool:
    """Judge the price: a copy of the sequence's keys and, without a kernel, attention of all pairs of what follows.

    `pairs`: of tokens, whose attention costs as much as the rest does for a position; inf with a kernel.
    """
    return common >= 8 and common * 16 >= length and common * 2 * (length + pairs) >= length**2
