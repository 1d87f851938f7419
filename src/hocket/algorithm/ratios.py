"""Compare log-probabilities: log-ratios, importance weights and their metrics, sums over sequences packed into rows."""

import torch
from torch import Tensor

from hocket.algorithm.kl import kl_penalty
from hocket.config import LossConfig

MAX_LOG_RATIO = 20.0  # e^20 is far outside every clip range and still finite
MAX_SURVIVOR_WEIGHT = 2.0  # cap of a token's importance weight in a sequence that sequence_mask keeps


def masked_log_ratio(numerator_bt: Tensor, denominator_bt: Tensor, mask_bt: Tensor) -> Tensor:
    """Return numerator − denominator of log-probs, clamped to ±20, and 0 where the mask is False."""
    # Masked before exp: padding may hold -inf, of which exp has NaN gradients.
    difference_bt = numerator_bt.where(mask_bt, 0.0) - denominator_bt.where(mask_bt, 0.0)
    return difference_bt.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def importance_weight(log_importance_bt: Tensor, mask_bt: Tensor, sample_bt: Tensor, config: LossConfig) -> Tensor:
    """Return trainer over engine probability per token, limited by `correction`."""
    low = config.correction_low
    high = config.correction_high
    importance_bt = log_importance_bt.exp()
    if config.correction == "none":
        return torch.ones_like(importance_bt)
    if config.correction == "truncate":
        return importance_bt.clamp(low, high)
    if config.correction == "mask":
        return importance_bt.where((importance_bt >= low) & (importance_bt <= high), 0.0)
    mean_bt = sequence_means(log_importance_bt, mask_bt, sample_bt).exp()
    return importance_bt.clamp(max=MAX_SURVIVOR_WEIGHT).where((mean_bt >= low) & (mean_bt <= high), 0.0)


def sequence_means(values_bt: Tensor, mask_bt: Tensor, sample_bt: Tensor) -> Tensor:
    """Return at every position the mean over its sequence's trained tokens; other values are 0."""
    lengths_bt = sequence_sums(mask_bt, sample_bt).clamp(min=1)
    return (sequence_sums(values_bt, sample_bt) / lengths_bt).to(values_bt.dtype)


def sequence_sums(values_bt: Tensor, sample_bt: Tensor) -> Tensor:
    """Return at every position the sum over its sequence, float64; `sample_bt` as in `policy_loss`."""
    index_bt = sample_bt + 1
    values_n = values_bt.double().flatten()
    return values_n.new_zeros(values_n.numel() + 1).index_add(0, index_bt.flatten(), values_n)[index_bt]


@torch.no_grad()
def policy_metrics(
    ratio_bt: Tensor,  # policy over old policy; 1 where the mask is False
    log_policy_bt: Tensor,  # per token, whatever `ratio` is; 0 where the mask is False
    log_importance_bt: Tensor,  # trainer over engine; 0 where the mask is False
    weight_bt: Tensor,  # importance weight after the correction
    advantages_bt: Tensor,
    log_reference_bt: Tensor | None,  # policy over reference
    mask_bt: Tensor,
    config: LossConfig,
    num_tokens: int,
) -> dict[str, Tensor]:
    """Return this micro-batch's share of each metric's mean over `num_tokens`."""
    importance_bt = log_importance_bt.exp()
    above_bt = ratio_bt > 1 + config.clip_high
    below_bt = ratio_bt < 1 - config.clip_low
    if config.clip == "ppo":  # elsewhere the minimum is the unclipped term
        above_bt &= advantages_bt > 0
        below_bt &= advantages_bt < 0
    elif config.clip == "none":
        above_bt = below_bt = torch.zeros_like(above_bt)
    values = {
        "clip_low": below_bt,
        "clip_high": above_bt,
        "ratio_mean": ratio_bt,
        "policy_kl": kl_penalty(-log_policy_bt, "k3"),
        "logprob_gap": log_importance_bt.abs(),
        "mismatch_kl": kl_penalty(-log_importance_bt, "k3"),
        "importance_mean": importance_bt,
        "importance_square": importance_bt.square(),
        "importance_capped": (weight_bt != importance_bt) & (config.correction != "none"),
    }
    if log_reference_bt is not None:
        values["kl"] = kl_penalty(log_reference_bt, "k3")
    share_bt = mask_bt.to(ratio_bt.dtype) / max(num_tokens, 1)
    return {name: (value_bt * share_bt).sum() for name, value_bt in values.items()}
