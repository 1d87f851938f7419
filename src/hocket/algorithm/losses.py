"""Compute the policy loss.

What `algorithm.objective`, `aggregate`, `kl` and `correction` name, such as PPO's clip, is in
choices.py.

Suffixes: b rows, t next-token positions, one fewer than tokens.

Unlike in the papers (docs/explanation/numerics.md), denominators cover the whole step: all
micro-batches and ranks.
"""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from hocket.algorithm.choices import choose, k3, sequence_means
from hocket.config import LossConfig

MAX_LOG_RATIO = 20.0  # e^20 is far outside every clip range and still finite


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LossBatch:
    """What the loss reads of a micro-batch; counts cover the whole step, over all ranks."""

    rollout_logprobs_bt: Tensor  # the engine's log-probs of the tokens, as they were sampled
    advantages_bt: Tensor
    columns: Mapping[str, Tensor]  # [bt] each: "old_logprobs" before the step, "ref_logprobs", ...
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
    """Compute a micro-batch's share of the loss, to be minimized, and its metrics.

    The loss is Σ share · (−w · objective + kl_coef · kl − entropy_coef · entropy), over tokens.

    r = exp(logprobs − old), with its gradient; w = exp(old − rollout), detached and bounded by the
    correction. Without old log-probs, a correction takes old = logprobs, so r = 1; the correction
    "none" takes old = rollout, so w = 1.
    """
    mask_bt = batch.mask_bt
    # The trainer's log-probs before the step: as measured, or else those of this pass.
    trainer_bt = batch.columns.get("old_logprobs", logprobs_bt).detach()
    # Those of the policy that r compares with. Where nothing was measured, and nothing corrects for
    # the engine, it is the engine's.
    old_bt = trainer_bt
    if "old_logprobs" not in batch.columns and config.correction == "none":
        old_bt = batch.rollout_logprobs_bt
    log_policy_bt = masked_log_ratio(logprobs_bt, old_bt, mask_bt)
    log_ratio_bt = log_policy_bt
    if config.ratio == "sequence":
        # The sequence's mean ratio is the value, but each token keeps a gradient of its own, since
        # advantages may differ within a sequence: this difference is 0 and has the gradient.
        gradient_bt = masked_log_ratio(logprobs_bt, logprobs_bt.detach(), mask_bt)
        means_bt = sequence_means(log_policy_bt.detach(), mask_bt, batch.sample_bt)
        log_ratio_bt = gradient_bt + means_bt

    # The arguments that a function chosen by algorithm.* may take.
    arguments = {
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
        reference_bt = batch.columns["ref_logprobs"]
        arguments["log_ratio"] = masked_log_ratio(logprobs_bt, reference_bt, mask_bt)

    # Each token's term, then its share in the loss.
    weight_bt = choose("correction", config.correction)(**arguments)
    bounds = {"low": 1 - config.clip_low, "high": 1 + config.clip_high}
    objective_bt = choose("objective", config.objective)(**arguments, **bounds)
    terms_bt = -weight_bt * objective_bt
    if config.kl != "off" and config.kl_in == "loss":
        terms_bt = terms_bt + config.kl_coef * choose("kl", config.kl)(**arguments)
    if config.entropy_coef:
        terms_bt = terms_bt - config.entropy_coef * entropy_bt
    shares_bt = choose("aggregate", config.aggregate)(
        mask_bt=mask_bt.to(terms_bt.dtype),
        sample_bt=batch.sample_bt,
        num_tokens=max(batch.num_tokens_global, 1),
        num_sequences=max(batch.num_sequences_global, 1),
        longest=config.constant_length,
    )
    loss = (terms_bt.where(mask_bt, 0.0) * shares_bt).sum()
    num_tokens = batch.num_tokens_global
    return LossOutput(loss, policy_metrics(arguments, log_policy_bt, weight_bt, config, num_tokens))


def masked_log_ratio(numerator_bt: Tensor, denominator_bt: Tensor, mask_bt: Tensor) -> Tensor:
    """Subtract log-probs, numerator − denominator, clamped to ±20; 0 where the mask is False."""
    # Masked before exp: padding may hold -inf, of which exp has NaN gradients.
    difference_bt = numerator_bt.where(mask_bt, 0.0) - denominator_bt.where(mask_bt, 0.0)
    return difference_bt.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


@torch.no_grad()
def policy_metrics(
    arguments: Mapping[str, Tensor],
    log_policy_bt: Tensor,
    weight_bt: Tensor,
    config: LossConfig,
    num_tokens: int,
) -> dict[str, Tensor]:
    """Compute this micro-batch's share of each metric's mean over `num_tokens`.

    Args:
        arguments: what `policy_loss` passes to the functions that the config chooses.
        log_policy_bt: policy over old policy per token, whatever the ratio is.
        weight_bt: importance weight after the correction.
        config: the loss's settings.
        num_tokens: trained tokens of the whole step, over all ranks.
    """
    ratio_bt = arguments["ratio_bt"]
    log_importance_bt = arguments["log_importance_bt"]
    importance_bt = log_importance_bt.exp()
    # Count a ratio outside the bounds where the objective clips it (choices.Clips).
    above_bt = ratio_bt > 1 + config.clip_high
    below_bt = ratio_bt < 1 - config.clip_low
    clips = choose("objective", config.objective).clips
    if clips == "pessimistic":
        above_bt &= arguments["advantages_bt"] > 0
        below_bt &= arguments["advantages_bt"] < 0
    elif clips == "none":
        above_bt = below_bt = torch.zeros_like(above_bt)
    # k3 takes the log-ratio of the policy that has sampled to the other one.
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
    if "log_ratio" in arguments:
        values["kl"] = k3(arguments["log_ratio"])
    share_bt = arguments["mask_bt"].to(ratio_bt.dtype) / max(num_tokens, 1)
    return {name: (value_bt * share_bt).sum() for name, value_bt in values.items()}
