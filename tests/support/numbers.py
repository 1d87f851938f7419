"""How far two computations of the same number may lie apart, by their arithmetic and not by what one machine showed."""

import torch

SURE = 4.0
"""λ of the bound below: it holds with a probability of at least 1 - 2 exp(-λ²/2), for the worst of all numbers."""


def rounding(additions: int, dtype: torch.dtype = torch.float32) -> float:
    """Returns how far, relative to the size of what is added, two orders of the same sums may lie apart.

    `additions`: how many follow each other on the way to the number, all of its sums together: a dot product of 64
    numbers behind one of 128 has 192. A machine adds in an order of its own: by its vectors' width, its threads and its
    library. One order lies λ √n u from the exact sum at most, where u is half the spacing of numbers at 1 (Higham and
    Mary, A new approach to probabilistic rounding error analysis, 2019, theorem 2.4); two of them twice as far.

    >>> f"{rounding(192):.1e}"
    '6.6e-06'
    """
    return float(2 * SURE * additions**0.5 * torch.finfo(dtype).eps / 2)
