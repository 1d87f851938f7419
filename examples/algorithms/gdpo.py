"""Group reward-decoupled normalization (GDPO, arXiv 2601.05242): normalize each reward of a group, then sum.

Settings: algorithm.advantage=gdpo algorithm.scale=none
"""

from hocket.algorithm.choices import advantage

EPS = 1e-4


@advantage("gdpo", per="batch")
def gdpo(rewards_n, group_n, parts_n, weights: dict[str, float] = {}):  # noqa: B006 - options are never changed
    """Return Σ weight · (reward − mean) / deviation, by reward function and group, divided by its own deviation.

    A reward function that a source lacks is NaN and adds nothing. `weights` stand in for those of rewards.functions.
    """
    sums_n = rewards_n * 0
    for name, values_n in parts_n.items():
        for group in group_n.unique():
            known_n = (group_n == group) & ~values_n.isnan()
            values_g = values_n[known_n]
            deviation = values_g.std() if len(values_g) > 1 else 0.0
            sums_n[known_n] += weights.get(name, 1.0) * (values_g - values_g.mean()) / (deviation + EPS)
    return (sums_n - sums_n.mean()) / (sums_n.std() + EPS)
