"""Advantages by rank, which no scale and no outlier of the rewards changes (fitness shaping, arXiv 1106.4487).

Settings: algorithm.advantage={name: by_rank, power: 2} algorithm.scale=none
"""

from hocket.algorithm.choices import advantage


@advantage("by_rank", per="group")
def by_rank(rewards_g, power: float = 1.0):
    """Return −1 for the worst of the group to 1 for the best, equal rewards alike."""
    below_g = (rewards_g[:, None] > rewards_g).sum(1)
    above_g = (rewards_g[:, None] < rewards_g).sum(1)
    signed_g = (below_g - above_g).double() / max(len(rewards_g) - 1, 1)
    return signed_g.sign() * signed_g.abs() ** power
