"""Compare log-probabilities: log-ratios, and the metrics of the policy."""

from collections.abc import Mapping

import torch
from torch import Tensor

from hocket.algorithm.choices import choose, k3
from hocket.config import LossConfig

MAX_LOG_RATIO = 20.0  # e^20 is far outside every clip range and still finite


def masked_log_ratio(numerator_bt: Tensor, denominator_bt: Tensor, mask_bt: Tensor) -> Tensor:
    """Return numerator − denominator of log-probs, clamped to ±20, and 0 where the mask is False."""
    # Masked before exp: padding may hold -inf, of which exp has NaN gradients.
    difference_bt = numerator_bt.where(mask_bt, 0.0) - denominator_bt.where(mask_bt, 0.0)
    return difference_bt.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


@torch.no_grad()
def policy_metrics(
    known: Mapping[str, Tensor], log_policy_bt: Tensor, weight_bt: Tensor, config: LossConfig, num_tokens: int
) -> dict[str, Tensor]:
    """Return this micro-batch's share of each metric's mean over `num_tokens`.

    `known`: what `policy_loss` gives its functions; `log_policy_bt`: policy over old policy per token, whatever the
    ratio is; `weight_bt`: importance weight after the correction.
    """
    ratio_bt = known["ratio_bt"]
    log_importance_bt = known["log_importance_bt"]
    importance_bt = log_importance_bt.exp()
    above_bt = ratio_bt > 1 + config.clip_high
    below_bt = ratio_bt < 1 - config.clip_low
    clips = choose("clip", config.clip).clips
    if clips == "pessimistic":  # elsewhere the minimum is the unclipped term
        above_bt &= known["advantages_bt"] > 0
        below_bt &= known["advantages_bt"] < 0
    elif clips == "none":
        above_bt = below_bt = torch.zeros_like(above_bt)
    values = {
        "clip_low": below_bt,
        "clip_high": above_bt,
        "ratio_mean": ratio_bt,
        "policy_kl": k3(-log_policy_bt),
        "logprob_gap": log_importance_bt.abs(),
        "mismatch_kl": k3(-log_importance_bt),
        "importance_mean": importance_bt,
        "importance_square": importance_bt.square(),
        "importance_capped": (weight_bt != importance_bt) & (config.correction != "none"),
    }
    if "log_ratio" in known:
        values["kl"] = k3(known["log_ratio"])
    share_bt = known["mask_bt"].to(ratio_bt.dtype) / max(num_tokens, 1)
    return {name: (value_bt * share_bt).sum() for name, value_bt in values.items()}
