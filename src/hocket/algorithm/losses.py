"""Compute the policy loss: ratio, clip, aggregate. Suffixes: b rows, t next-token positions, one fewer than tokens.

Unlike in the papers (docs/algorithms.md), denominators cover the whole optimiser step: all micro-batches and ranks.
With a `correction`, every ratio is 1 in the first update of a step; the clip limits the later ones.
To add a loss: a value of `clip` in config/algorithm.py, and a branch of `_objective`.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from hocket.algorithm.kl import kl_penalty
from hocket.algorithm.ratios import importance_weight, masked_log_ratio, policy_metrics, sequence_means, sequence_sums
from hocket.config import LossConfig as LossConfig


class LossOutput(NamedTuple):
    """One micro-batch's share of the loss and of each metric."""

    loss: Tensor
    metrics: Mapping[str, Tensor]


def policy_loss(
    logprobs_bt: Tensor,  # current policy, with gradient
    rollout_logprobs_bt: Tensor,  # recorded by the engine while sampling
    advantages_bt: Tensor,
    mask_bt: Tensor,  # True on trained tokens; elsewhere the inputs may hold anything
    *,
    config: LossConfig,
    num_tokens: int,  # N, trained tokens of the whole step; 0 gives a loss of 0
    num_sequences: int,  # S, sequences of the whole step with a trained token
    entropy_bt: Tensor,  # with gradient for entropy_coef
    sample_bt: Tensor,  # number of the sequence of each position, below b · t; -1: none
    old_logprobs_bt: Tensor | None = None,  # the trainer's, before the step
    ref_logprobs_bt: Tensor | None = None,  # the reference policy's, for a KL in the loss and its metric
) -> LossOutput:
    """Return Σ share · (−w · objective + kl_coef · kl − entropy_coef · entropy), to be minimised, and its metrics.

    r = exp(logprobs − old), with its gradient; w = exp(old − rollout), detached and bounded by the correction. Without
    old_logprobs_bt: a correction takes old = logprobs, so r = 1; correction "none" takes old = rollout, so w = 1.
    """
    trainer_bt = (logprobs_bt if old_logprobs_bt is None else old_logprobs_bt).detach()
    old_bt = rollout_logprobs_bt if old_logprobs_bt is None and config.correction == "none" else trainer_bt
    log_ratio_bt = log_policy_bt = masked_log_ratio(logprobs_bt, old_bt, mask_bt)
    if config.ratio == "sequence":  # with a token's own gradient: advantages may differ within a sequence
        own_bt = masked_log_ratio(logprobs_bt, logprobs_bt.detach(), mask_bt)
        log_ratio_bt = own_bt + sequence_means(log_ratio_bt.detach(), mask_bt, sample_bt)
    ratio_bt = log_ratio_bt.exp()
    log_importance_bt = masked_log_ratio(trainer_bt, rollout_logprobs_bt, mask_bt)
    weight_bt = importance_weight(log_importance_bt, mask_bt, sample_bt, config)
    advantages_bt = advantages_bt.where(mask_bt, 0.0)
    terms_bt = -weight_bt * _objective(ratio_bt, advantages_bt, logprobs_bt.where(mask_bt, 0.0), config)
    log_reference_bt = None if ref_logprobs_bt is None else masked_log_ratio(logprobs_bt, ref_logprobs_bt, mask_bt)
    if config.kl != "off" and config.kl_in == "loss":
        assert log_reference_bt is not None, "a KL in the loss needs ref_logprobs_bt"
        terms_bt = terms_bt + config.kl_coef * kl_penalty(log_reference_bt, config.kl)
    if config.entropy_coef:
        terms_bt = terms_bt - config.entropy_coef * entropy_bt
    shares_bt = _shares(mask_bt.to(ratio_bt.dtype), sample_bt, config, max(num_tokens, 1), max(num_sequences, 1))
    metrics = policy_metrics(
        ratio_bt,
        log_policy_bt,
        log_importance_bt,
        weight_bt,
        advantages_bt,
        log_reference_bt,
        mask_bt,
        config,
        num_tokens,
    )
    return LossOutput(loss=(terms_bt.where(mask_bt, 0.0) * shares_bt).sum(), metrics=metrics)


def _objective(ratio_bt: Tensor, advantages_bt: Tensor, logprobs_bt: Tensor, config: LossConfig) -> Tensor:
    clipped_bt = ratio_bt.clamp(1 - config.clip_low, 1 + config.clip_high)
    if config.clip == "none":
        return ratio_bt * advantages_bt
    if config.clip == "cispo":
        return clipped_bt.detach() * advantages_bt * logprobs_bt
    assert config.clip == "ppo", f"clip={config.clip} has no objective here"
    smaller_bt = torch.minimum(ratio_bt * advantages_bt, clipped_bt * advantages_bt)
    if config.dual_clip is None:
        return smaller_bt
    return torch.maximum(smaller_bt, config.dual_clip * advantages_bt).where(advantages_bt < 0, smaller_bt)


def _shares(trained_bt: Tensor, sample_bt: Tensor, config: LossConfig, num_tokens: int, num_sequences: int) -> Tensor:
    """Return the weight of each token in the loss: 1/N, 1/(S · tokens of its sequence), 1/S, or 1/(S · length)."""
    if config.aggregate == "token_mean":
        return trained_bt / num_tokens
    if config.aggregate == "seq_mean_token_mean":
        return trained_bt / (sequence_sums(trained_bt, sample_bt).clamp(min=1).to(trained_bt.dtype) * num_sequences)
    if config.aggregate == "seq_mean_token_sum":
        return trained_bt / num_sequences
    assert config.constant_length is not None, "aggregate=constant needs constant_length, the longest completion"
    return trained_bt / (num_sequences * config.constant_length)
