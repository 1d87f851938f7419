"""From rewards to advantages: of whole rollouts relative to their group, or of single tokens.

Knows numbers only: no rollouts, no configuration. Functions of single tokens take the sampled tokens of one sequence
([t], nothing between them), so that tokens of an environment are transparent to them.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from hocket.presets import Baseline, Scale

ZERO_VARIANCE = 1e-6
"""A group whose rewards lie closer together than this teaches nothing."""
MIN_VARIANCE = 1e-8
"""What is whitened is divided by the root of at least this."""


def group_advantages(
    rewards: Tensor | Sequence[float],
    group_ids: Tensor | Sequence[int],
    *,
    baseline: Baseline = "mean",
    scale: Scale = "group",
    eps: float = 1e-6,
) -> Tensor:
    """Returns A = (R − baseline) / (deviation + eps) per rollout, float32 [num_rollouts].

    Baselines: "mean" of the group (arXiv 2402.03300); "leave_one_out": mean of the group's others, that is
    G/(G−1) · (R − mean) (2402.14740); "none". Deviations, unbiased: of the group; "batch": of all R − baseline around
    their mean (2501.03262); "none": A is not divided (2503.20783). A NaN reward marks a failed rollout: it leaves
    means and deviations, and its advantage is 0, so the caller must drop it from the loss.

    Args:
        rewards: [num_rollouts].
        group_ids: [num_rollouts], equal for rollouts of one prompt; the order of rollouts is free.
        baseline: what is subtracted.
        scale: what the difference is divided by.
        eps: added to the deviation.
    """
    if baseline not in ("mean", "leave_one_out", "none") or scale not in ("group", "batch", "none"):
        raise ValueError(f"unknown advantage of groups: baseline={baseline!r}, scale={scale!r}")
    rewards_n, group_n, num_groups = _as_groups(rewards, group_ids)
    scored_n = ~rewards_n.isnan()
    count_g = _sum_by_group(scored_n.double(), group_n, num_groups)
    mean_g = _sum_by_group(rewards_n.where(scored_n, 0.0), group_n, num_groups) / count_g.clamp(min=1)
    centred_n = (rewards_n - mean_g[group_n]).where(scored_n, 0.0)
    others_g = (count_g - 1).clamp(min=1)
    advantages_n = centred_n
    if baseline == "leave_one_out":
        advantages_n = centred_n * (count_g / others_g)[group_n]
    elif baseline == "none":
        advantages_n = rewards_n.where(scored_n, 0.0)
    if scale == "group":
        variance_g = _sum_by_group(centred_n.square(), group_n, num_groups) / others_g
        advantages_n = advantages_n / (variance_g.sqrt() + eps)[group_n]
    elif scale == "batch":
        advantages_n = advantages_n / (_variance(advantages_n[scored_n]).sqrt() + eps)
    return advantages_n.float()


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


def token_rewards(reward: float, penalties_t: Tensor) -> Tensor:
    """Returns what each token earns: minus its penalty, and the last one the reward of the whole besides. [t]"""
    rewards_t = -penalties_t
    rewards_t[-1] += reward
    return rewards_t


def discounted_returns(rewards_t: Tensor, *, discount: float) -> Tensor:
    """Returns Σ_{s≥t} discount^(s−t) · reward_s of each token, [t] (arXiv 2501.03262)."""
    returns, following = [], 0.0
    for reward in reversed(rewards_t.tolist()):
        following = reward + discount * following
        returns.append(following)
    return rewards_t.new_tensor(returns[::-1])


def gae(rewards_t: Tensor, values_t: Tensor, *, discount: float, gae_lambda: float) -> tuple[Tensor, Tensor]:
    """Returns (generalised advantages, returns) of each token, [t] each (arXiv 1506.02438).

    δ_t = reward_t + discount · V_{t+1} − V_t;  A_t = δ_t + discount · λ · A_{t+1};  returns = A + V. The value after
    the last token is 0.
    """
    advantages, following, next_value = [], 0.0, 0.0
    for reward, value in zip(reversed(rewards_t.tolist()), reversed(values_t.tolist()), strict=True):
        following = reward + discount * next_value - value + discount * gae_lambda * following
        advantages.append(following)
        next_value = value
    advantages_t = rewards_t.new_tensor(advantages[::-1])
    return advantages_t, advantages_t + values_t


def whiten(values_n: Tensor) -> Tensor:
    """Returns (x − mean) / √max(variance, 1e-8) with the unbiased variance, [n]."""
    return (values_n - values_n.mean()) / _variance(values_n).clamp(min=MIN_VARIANCE).sqrt()


def _variance(values_n: Tensor) -> Tensor:
    return (values_n - values_n.mean()).square().sum() / max(len(values_n) - 1, 1)


def _as_groups(rewards: Tensor | Sequence[float], group_ids: Tensor | Sequence[int]) -> tuple[Tensor, Tensor, int]:
    rewards_n = torch.as_tensor(rewards, dtype=torch.float64)  # float32 loses small differences of large rewards
    ids_n = torch.as_tensor(group_ids, device=rewards_n.device)
    if rewards_n.ndim != 1 or rewards_n.shape != ids_n.shape:
        raise ValueError(f"rewards {list(rewards_n.shape)} and group_ids {list(ids_n.shape)} must be equal lists")
    unique_g, group_n = torch.unique(ids_n, return_inverse=True)
    return rewards_n, group_n, len(unique_g)


def _sum_by_group(values_n: Tensor, group_n: Tensor, num_groups: int) -> Tensor:
    return values_n.new_zeros(num_groups).index_add(0, group_n, values_n)
