"""Compute one advantage per rollout: its reward compared with those of its group.

Advantages per token are in samples.py. Suffixes: n rollouts, g group.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hocket.algorithm.choices import choose, total
from hocket.config.algorithm import Chosen, Scale

EPS = 1e-6
ZERO_VARIANCE = 1e-6  # a group whose rewards lie within this range has no signal


def group_advantages(
    rewards: Sequence[float],
    group_ids: Sequence[int],
    *,
    baseline: Chosen,
    scale: Scale,
    parts: Sequence[Mapping[str, float]] = (),
) -> Tensor:
    """Return A = (R − baseline) / (deviation + 1e-6) per rollout, float32 [n].

    Deviations, unbiased: of the "group", of all R − baseline in the "batch" (2510.13786), "none" (2503.20783); with
    "tokens" samples.py divides. `parts`: the values of each reward function, per rollout.
    """
    choice = choose("baseline", baseline)
    rewards_n = torch.tensor(rewards, dtype=torch.float64)  # float32 loses small differences of large rewards
    ids_n = torch.tensor(group_ids)
    advantages_n = torch.zeros_like(rewards_n)
    if choice.per == "batch":
        parts_n = {name: rewards_n.new_tensor([part[name] for part in parts]) for name in (parts[0] if parts else ())}
        advantages_n[:] = choice(rewards_n=rewards_n, group_n=ids_n, parts_n=parts_n)
    for group in torch.unique(ids_n):
        is_in_n = ids_n == group
        rewards_g = rewards_n[is_in_n]
        if choice.per == "group":
            advantages_n[is_in_n] = choice(rewards_g=rewards_g)
        if scale == "group":
            advantages_n[is_in_n] /= deviation(rewards_g) + EPS
    if scale == "batch":
        advantages_n = advantages_n / (deviation(advantages_n) + EPS)
    return advantages_n.float()


def are_equal(rewards: Sequence[float]) -> bool:
    """By their range: the rounding error of a deviation grows with the rewards."""
    return len(rewards) < 2 or max(rewards) - min(rewards) <= ZERO_VARIANCE


def deviation(values_n: Tensor) -> Tensor:
    """Return the unbiased standard deviation; 0 for a single value."""
    mean = total(values_n) / len(values_n)
    return (total((values_n - mean).square()) / max(len(values_n) - 1, 1)).sqrt()
