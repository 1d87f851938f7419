"""From rewards to advantages: one number per rollout, relative to the other rollouts of its prompt."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

Baseline = Literal["mean"]
Scale = Literal["group", "none"]

ZERO_VARIANCE = 1e-6
"""A group whose rewards lie closer together than this teaches nothing."""


def group_advantages(
    rewards: Tensor | Sequence[float],
    group_ids: Tensor | Sequence[int],
    *,
    baseline: Baseline = "mean",
    scale: Scale = "group",
    eps: float = 1e-6,
) -> Tensor:
    """Returns A = (R − mean_g) / (std_g + eps) per rollout, float32 [num_rollouts] (arXiv 2402.03300).

    The standard deviation is unbiased. With scale "none" it is left out (arXiv 2503.20783). A NaN reward marks a
    failed rollout: it leaves mean and deviation, and its advantage is 0, so the caller must drop it from the loss.

    Args:
        rewards: [num_rollouts].
        group_ids: [num_rollouts], equal for rollouts of one prompt; the order of rollouts is free.
        baseline: what is subtracted; "mean" is the mean of the group's rewards.
        scale: what centred rewards are divided by.
        eps: added to the deviation.
    """
    rewards_n, group_n, num_groups = _as_groups(rewards, group_ids)
    if baseline != "mean" or scale not in ("group", "none"):
        raise ValueError(f"unknown advantage: baseline={baseline!r}, scale={scale!r}")
    scored_n = ~rewards_n.isnan()
    values_n = rewards_n.where(scored_n, 0.0)
    count_g = _sum_by_group(scored_n.double(), group_n, num_groups)
    mean_g = _sum_by_group(values_n, group_n, num_groups) / count_g.clamp(min=1)
    centred_n = (values_n - mean_g[group_n]).where(scored_n, 0.0)
    if scale == "none":
        return centred_n.float()
    variance_g = _sum_by_group(centred_n.square(), group_n, num_groups) / (count_g - 1).clamp(min=1)
    return (centred_n / (variance_g.sqrt() + eps)[group_n]).float()


def zero_variance_groups(rewards: Tensor | Sequence[float], group_ids: Tensor | Sequence[int]) -> Tensor:
    """Returns per rollout whether its group teaches nothing, bool [num_rollouts].

    That is a group with max − min ≤ 1e-6 over its scored (not NaN) rollouts, or with fewer than two of them. The
    range is used, not the deviation, whose rounding noise grows with the size of the rewards.
    """
    rewards_n, group_n, num_groups = _as_groups(rewards, group_ids)
    scored_n = ~rewards_n.isnan()
    count_g = _sum_by_group(scored_n.double(), group_n, num_groups)
    infinity = torch.full((num_groups,), torch.inf, dtype=torch.float64, device=rewards_n.device)
    low_g = infinity.scatter_reduce(0, group_n, rewards_n.where(scored_n, torch.inf), "amin")
    high_g = (-infinity).scatter_reduce(0, group_n, rewards_n.where(scored_n, -torch.inf), "amax")
    return ((count_g < 2) | (high_g - low_g <= ZERO_VARIANCE))[group_n]


def _as_groups(rewards: Tensor | Sequence[float], group_ids: Tensor | Sequence[int]) -> tuple[Tensor, Tensor, int]:
    rewards_n = torch.as_tensor(rewards, dtype=torch.float64)  # float32 loses small differences of large rewards
    ids_n = torch.as_tensor(group_ids, device=rewards_n.device)
    if rewards_n.ndim != 1 or rewards_n.shape != ids_n.shape:
        raise ValueError(f"rewards {list(rewards_n.shape)} and group_ids {list(ids_n.shape)} must be equal lists")
    unique_g, group_n = torch.unique(ids_n, return_inverse=True)
    return rewards_n, group_n, len(unique_g)


def _sum_by_group(values_n: Tensor, group_n: Tensor, num_groups: int) -> Tensor:
    return values_n.new_zeros(num_groups).index_add(0, group_n, values_n)
