"""Measure the policy loss: how far ratios and importance weights are from 1, and how many are clipped."""

from collections.abc import Mapping

import torch
from torch import Tensor

from hocket.algorithm.kl import kl_penalty
from hocket.config import LossConfig


@torch.no_grad()
def policy_metrics(
    ratio_bt: Tensor,  # policy over old policy; 1 where the mask is False
    log_importance_bt: Tensor,  # trainer over engine; 0 where the mask is False
    weight_bt: Tensor,  # importance weight after the correction
    advantages_bt: Tensor,
    log_reference_bt: Tensor | None,  # policy over reference
    mask_bt: Tensor,
    config: LossConfig,
    num_tokens: int,
) -> dict[str, Tensor]:
    """Return this micro-batch's share of each metric's mean over the `num_tokens` of the optimiser step."""
    importance_bt = log_importance_bt.exp()
    above_bt, below_bt = ratio_bt > 1 + config.clip_high, ratio_bt < 1 - config.clip_low
    if config.clip == "ppo":  # elsewhere the minimum is the unclipped term
        above_bt, below_bt = above_bt & (advantages_bt > 0), below_bt & (advantages_bt < 0)
    elif config.clip == "none":
        above_bt, below_bt = torch.zeros_like(above_bt), torch.zeros_like(below_bt)
    values = {
        "clip_low": below_bt,
        "clip_high": above_bt,
        "ratio_mean": ratio_bt,
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


def effective_sample_size(metrics: Mapping[str, float]) -> float:
    """Return (Σw)² / (n·Σw²) of the importance weights w before the correction; 1 means all equal."""
    return metrics["importance_mean"] ** 2 / metrics["importance_square"]
