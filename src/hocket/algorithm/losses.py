"""Compute the policy loss: ratio, clip, aggregate. Suffixes: b rows, t next-token positions, one fewer than tokens.

Unlike in the papers (docs/algorithms.md), denominators cover the whole optimiser step: all micro-batches and ranks.
With a `correction`, every ratio is 1 in the first update of a step; the clip limits the later ones.
The functions that settings name are in choices.py, where yours may be added.
"""

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from hocket.algorithm.choices import choose, sequence_means
from hocket.algorithm.ratios import masked_log_ratio, policy_metrics
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
    entropy_bt: Tensor,  # with gradient for entropy_coef, or an objective that takes it
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
    known = {  # what a function may take
        "ratio_bt": log_ratio_bt.exp(),
        "log_importance_bt": masked_log_ratio(trainer_bt, rollout_logprobs_bt, mask_bt),
        "advantages_bt": advantages_bt.where(mask_bt, 0.0),
        "logprobs_bt": logprobs_bt.where(mask_bt, 0.0),
        "rollout_logprobs_bt": rollout_logprobs_bt.where(mask_bt, 0.0),
        "entropy_bt": entropy_bt.where(mask_bt, 0.0),
        "mask_bt": mask_bt,
        "sample_bt": sample_bt,
    }
    if ref_logprobs_bt is not None:
        known["log_ratio"] = masked_log_ratio(logprobs_bt, ref_logprobs_bt, mask_bt)
    weight_bt = choose("correction", config.correction)(**known)
    objective_bt = choose("clip", config.clip)(**known, low=1 - config.clip_low, high=1 + config.clip_high)
    terms_bt = -weight_bt * objective_bt
    if config.kl != "off" and config.kl_in == "loss":
        terms_bt = terms_bt + config.kl_coef * choose("kl", config.kl)(**known)
    if config.entropy_coef:
        terms_bt = terms_bt - config.entropy_coef * entropy_bt
    shares_bt = choose("aggregate", config.aggregate)(
        mask_bt=mask_bt.to(terms_bt.dtype),
        sample_bt=sample_bt,
        num_tokens=max(num_tokens, 1),
        num_sequences=max(num_sequences, 1),
        longest=config.constant_length,
    )
    metrics = policy_metrics(known, log_policy_bt, weight_bt, config, num_tokens)
    return LossOutput(loss=(terms_bt.where(mask_bt, 0.0) * shares_bt).sum(), metrics=metrics)
