"""Compute one advantage per rollout: its reward compared with those of its group, the rollouts of one prompt.

For baselines `none` and `critic`, samples.py computes one per token. Suffixes: n rollouts, g group.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from hocket.config.algorithm import Baseline, Scale

ZERO_VARIANCE = 1e-6  # a group whose rewards lie within this range has no signal


def group_advantages(
    rewards: Tensor | Sequence[float],
    group_ids: Tensor | Sequence[int],
    *,
    baseline: Baseline = "mean",
    scale: Scale = "group",
    eps: float = 1e-6,
) -> Tensor:
    """Return A = (R − baseline) / (deviation + eps) per rollout, float32 [n].

    Baselines: "mean" of the group (arXiv 2402.03300), "leave_one_out" mean of the other rollouts (2402.14740), "none".
    Deviations, unbiased: of the "group", of all R − baseline in the "batch" (2510.13786), "none" (2503.20783); with
    "tokens" samples.py divides. A NaN reward marks a failed rollout: it counts in no mean or deviation and gets
    advantage 0; samples.py leaves it out.
    """
    if baseline not in ("mean", "leave_one_out", "none") or scale not in ("group", "batch", "tokens", "none"):
        raise ValueError(f"unknown advantage of groups: baseline={baseline!r}, scale={scale!r}")
    rewards_n = torch.as_tensor(rewards, dtype=torch.float64)  # float32 loses small differences of large rewards
    advantages_n = torch.zeros_like(rewards_n)
    for members in _groups(rewards_n, group_ids):
        scored = members[~rewards_n[members].isnan()]
        rewards_g, others = rewards_n[scored], max(len(scored) - 1, 1)
        advantages_g = rewards_g if baseline == "none" else rewards_g - _sum(rewards_g) / max(len(scored), 1)
        if baseline == "leave_one_out":  # R − mean of the others = G / (G − 1) · (R − mean)
            advantages_g = advantages_g * (len(scored) / others)
        if scale == "group":
            advantages_g = advantages_g / (deviation(rewards_g) + eps)
        advantages_n[scored] = advantages_g
    if scale == "batch":
        advantages_n = advantages_n / (deviation(advantages_n[~rewards_n.isnan()]) + eps)
    return advantages_n.float()


def zero_variance_groups(rewards: Tensor | Sequence[float], group_ids: Tensor | Sequence[int]) -> Tensor:
    """Return per rollout whether its group has no signal, bool [n]: equal rewards, or fewer than two that are not NaN.

    The range decides: the rounding error of a deviation grows with the size of the rewards.
    """
    rewards_n = torch.as_tensor(rewards, dtype=torch.float64)
    no_signal_n = torch.zeros(len(rewards_n), dtype=torch.bool)
    for members in _groups(rewards_n, group_ids):
        scored_g = rewards_n[members][~rewards_n[members].isnan()]
        no_signal_n[members] = len(scored_g) < 2 or bool(scored_g.max() - scored_g.min() <= ZERO_VARIANCE)
    return no_signal_n


def deviation(values_n: Tensor) -> Tensor:
    """Return the unbiased standard deviation; 0 for fewer than two values."""
    mean = _sum(values_n) / max(len(values_n), 1)
    return (_sum((values_n - mean).square()) / max(len(values_n) - 1, 1)).sqrt()


def _sum(values_n: Tensor) -> Tensor:
    return values_n.cumsum(0)[-1:].sum()  # in order, so that every CPU gives the same bits


def _groups(rewards_n: Tensor, group_ids: Tensor | Sequence[int]) -> Iterator[Tensor]:
    """Yield the indices of each group's rollouts."""
    ids_n = torch.as_tensor(group_ids, device=rewards_n.device)
    if rewards_n.ndim != 1 or rewards_n.shape != ids_n.shape:
        raise ValueError(f"rewards {list(rewards_n.shape)} and group_ids {list(ids_n.shape)} must be equal lists")
    yield from (torch.nonzero(ids_n == group)[:, 0] for group in torch.unique(ids_n))
