"""Compute one advantage per rollout: its reward compared with those of its group.

For baselines `none` and `critic`, samples.py computes one per token. Suffixes: n rollouts, g group.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from hocket.config.algorithm import Baseline, Scale

EPS = 1e-6
ZERO_VARIANCE = 1e-6  # a group whose rewards lie within this range has no signal


def group_advantages(rewards: Sequence[float], group_ids: Sequence[int], *, baseline: Baseline, scale: Scale) -> Tensor:
    """Return A = (R − baseline) / (deviation + 1e-6) per rollout, float32 [n].

    Baselines: "mean" of the group (arXiv 2402.03300), "leave_one_out" mean of the other rollouts (2402.14740).
    Deviations, unbiased: of the "group", of all R − baseline in the "batch" (2510.13786), "none" (2503.20783); with
    "tokens" samples.py divides.
    """
    rewards_n = torch.tensor(rewards, dtype=torch.float64)  # float32 loses small differences of large rewards
    ids_n = torch.tensor(group_ids)
    advantages_n = torch.zeros_like(rewards_n)
    for group in torch.unique(ids_n):
        rewards_g = rewards_n[ids_n == group]
        size = len(rewards_g)
        advantages_g = rewards_g - _sum(rewards_g) / size
        if baseline == "leave_one_out":  # R − mean of the others = G / (G − 1) · (R − mean)
            advantages_g = advantages_g * (size / max(size - 1, 1))
        if scale == "group":
            advantages_g = advantages_g / (deviation(rewards_g) + EPS)
        advantages_n[ids_n == group] = advantages_g
    if scale == "batch":
        advantages_n = advantages_n / (deviation(advantages_n) + EPS)
    return advantages_n.float()


def are_equal(rewards: Sequence[float]) -> bool:
    """By their range: the rounding error of a deviation grows with the rewards."""
    return len(rewards) < 2 or max(rewards) - min(rewards) <= ZERO_VARIANCE


def deviation(values_n: Tensor) -> Tensor:
    """Return the unbiased standard deviation; 0 for a single value."""
    mean = _sum(values_n) / len(values_n)
    return (_sum((values_n - mean).square()) / max(len(values_n) - 1, 1)).sqrt()


def _sum(values_n: Tensor) -> Tensor:
    return values_n.cumsum(0)[-1]  # in order, so that every CPU gives the same bits
