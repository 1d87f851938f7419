"""Compute the policy loss. Suffixes: b rows, t next-token positions, one fewer than tokens.

Unlike in the papers (docs/algorithms.md), denominators cover the whole optimiser step: all micro-batches and ranks.
"""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from hocket.algorithm.choices import choose, sequence_means
from hocket.algorithm.ratios import masked_log_ratio, policy_metrics
from hocket.config import LossConfig as LossConfig


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


def policy_loss(logprobs_bt: Tensor, entropy_bt: Tensor, batch: LossBatch, config: LossConfig) -> LossOutput:
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
    if config.ratio == "sequence":  # with a token's own gradient: advantages may differ within a sequence
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
    objective_bt = choose("clip", config.clip)(**known, low=1 - config.clip_low, high=1 + config.clip_high)
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
