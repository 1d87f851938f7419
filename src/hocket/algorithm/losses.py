"""Compute the policy loss. Suffixes: b rows, t next-token positions, one fewer than tokens.

Unlike in the papers (docs/algorithms.md), denominators cover the whole optimiser step: all micro-batches and ranks.
"""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from hocket.algorithm.choices import choose, k3, sequence_means
from hocket.config import LossConfig as LossConfig

MAX_LOG_RATIO = 20.0  # e^20 is far outside every clip range and still finite


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LossBatch:
    """What the loss reads of a micro-batch; counts are of the whole step, over all ranks."""

    rollout_logprobs_bt: Tensor  # the engine's
    advantages_bt: Tensor
    columns: Mapping[str, Tensor]  # "old_logprobs" of before the step, "ref_logprobs", ...
    mask_bt: Tensor  # True on trained tokens; elsewhere the numbers may be anything
    sample_bt: Tensor  # number of the sequence of each position, below b · t; -1: none
    num_tokens_global: int  # N, trained tokens; 0 gives a loss of 0
    num_sequences_global: int  # S, sequences with a trained token


class LossOutput(NamedTuple):
    """One micro-batch's share of the loss and of each metric."""

    loss: Tensor
    metrics: Mapping[str, Tensor]


def policy_loss(
    logprobs_bt: Tensor, entropy_bt: Tensor, batch: LossBatch, config: LossConfig
) -> LossOutput:
    """Return Σ share · (−w · objective + kl_coef · kl − entropy_coef · entropy), to be minimised, and its metrics.

    r = exp(logprobs − old), with its gradient; w = exp(old − rollout), detached and bounded by the correction. Without
    old log-probs: a correction takes old = logprobs, so r = 1; correction "none" takes old = rollout, so w = 1.
    """
    mask_bt = batch.mask_bt
    trainer_bt = batch.columns.get("old_logprobs", logprobs_bt).detach()
    old_bt = trainer_bt
    if "old_logprobs" not in batch.columns and config.correction == "none":
        old_bt = batch.rollout_logprobs_bt
    log_ratio_bt = log_policy_bt = masked_log_ratio(logprobs_bt, old_bt, mask_bt)
    if (
        config.ratio == "sequence"
    ):  # with a token's own gradient: advantages may differ within a sequence
        own_bt = masked_log_ratio(logprobs_bt, logprobs_bt.detach(), mask_bt)
        log_ratio_bt = own_bt + sequence_means(log_ratio_bt.detach(), mask_bt, batch.sample_bt)
    known = {  # what a function may take
        "ratio_bt": log_ratio_bt.exp(),
        "log_importance_bt": masked_log_ratio(trainer_bt, batch.rollout_logprobs_bt, mask_bt),
        "advantages_bt": batch.advantages_bt.where(mask_bt, 0.0),
        "logprobs_bt": logprobs_bt.where(mask_bt, 0.0),
        "rollout_logprobs_bt": batch.rollout_logprobs_bt.where(mask_bt, 0.0),
        "entropy_bt": entropy_bt.where(mask_bt, 0.0),
        "mask_bt": mask_bt,
        "sample_bt": batch.sample_bt,
    }
    if "ref_logprobs" in batch.columns:
        known["log_ratio"] = masked_log_ratio(logprobs_bt, batch.columns["ref_logprobs"], mask_bt)
    weight_bt = choose("correction", config.correction)(**known)
    objective_bt = choose("objective", config.objective)(
        **known, low=1 - config.clip_low, high=1 + config.clip_high
    )
    terms_bt = -weight_bt * objective_bt
    if config.kl != "off" and config.kl_in == "loss":
        terms_bt = terms_bt + config.kl_coef * choose("kl", config.kl)(**known)
    if config.entropy_coef:
        terms_bt = terms_bt - config.entropy_coef * entropy_bt
    shares_bt = choose("aggregate", config.aggregate)(
        mask_bt=mask_bt.to(terms_bt.dtype),
        sample_bt=batch.sample_bt,
        num_tokens=max(batch.num_tokens_global, 1),
        num_sequences=max(batch.num_sequences_global, 1),
        longest=config.constant_length,
    )
    metrics = policy_metrics(known, log_policy_bt, weight_bt, config, batch.num_tokens_global)
    return LossOutput(loss=(terms_bt.where(mask_bt, 0.0) * shares_bt).sum(), metrics=metrics)


def masked_log_ratio(numerator_bt: Tensor, denominator_bt: Tensor, mask_bt: Tensor) -> Tensor:
    """Return numerator − denominator of log-probs, clamped to ±20, and 0 where the mask is False."""
    # Masked before exp: padding may hold -inf, of which exp has NaN gradients.
    difference_bt = numerator_bt.where(mask_bt, 0.0) - denominator_bt.where(mask_bt, 0.0)
    return difference_bt.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


@torch.no_grad()
def policy_metrics(
    known: Mapping[str, Tensor],
    log_policy_bt: Tensor,
    weight_bt: Tensor,
    config: LossConfig,
    num_tokens: int,
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
    clips = choose("objective", config.objective).clips
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
