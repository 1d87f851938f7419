"""Losses: pure functions of log-probabilities and values, one token at a time.

Legend of suffixes: b rows, t next-token axis. `mask_bt` is true on trained tokens. Denominators count the whole
optimiser step, over all micro-batches and ranks, so that contributions of micro-batches simply add up.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor

from hocket.algorithm.kl import kl_penalty, masked_log_ratio
from hocket.config import Config
from hocket.presets import CORRECTION_RANGES, DEFAULT, PRESETS, Aggregate, Clip, Correction, Kl, KlIn, PresetName, Ratio

MAX_SURVIVOR_WEIGHT = 2.0
"""Cap of a token's importance weight in a sequence that sequence_mask keeps."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LossConfig:
    """Knobs of the policy loss; config.AlgorithmConfig says what each does. The defaults are those without a preset."""

    ratio: Ratio = DEFAULT.ratio
    clip: Clip = DEFAULT.clip
    clip_low: float = DEFAULT.clip_low
    clip_high: float = DEFAULT.clip_high
    dual_clip: float | None = None
    aggregate: Aggregate = DEFAULT.aggregate
    constant_length: int | None = None
    correction: Correction = DEFAULT.correction
    correction_low: float = math.nan
    correction_high: float = math.nan
    kl: Kl = DEFAULT.kl
    kl_in: KlIn = DEFAULT.kl_in
    kl_coef: float = DEFAULT.kl_coef
    entropy_coef: float = 0.0

    def __post_init__(self) -> None:
        for name, bound in zip(
            ("correction_low", "correction_high"), CORRECTION_RANGES.get(self.correction, (0.0, 2.0)), strict=True
        ):
            if math.isnan(getattr(self, name)):
                object.__setattr__(self, name, bound)

    @classmethod
    def preset(cls, name: PresetName, **changes: Any) -> Self:
        """Returns a row of the table of presets, with changes."""
        row = PRESETS[name].knobs
        return cls(**{key: row[key] for key in _names(cls) if key in row} | changes)

    @classmethod
    def of(cls, config: Config) -> Self:
        """Returns what the run is configured to minimise."""
        knobs = {key: getattr(config.algorithm, key) for key in _names(cls)}
        if config.algorithm.aggregate == "constant" and config.algorithm.constant_length is None:
            knobs["constant_length"] = config.rollout.max_tokens
        return cls(**knobs)


def _names(kind: type[LossConfig]) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LossOutput:
    """This micro-batch's share of the loss and of each metric; sums over micro-batches and ranks are exact."""

    loss: Tensor
    metrics: Mapping[str, Tensor]


def policy_loss(
    logprobs_bt: Tensor,
    rollout_logprobs_bt: Tensor,
    advantages_bt: Tensor,
    mask_bt: Tensor,
    *,
    config: LossConfig,
    num_tokens: int,
    num_sequences: int,
    old_logprobs_bt: Tensor | None = None,
    ref_logprobs_bt: Tensor | None = None,
    entropy_bt: Tensor | None = None,
    sample_bt: Tensor | None = None,
) -> LossOutput:
    """Returns Σ share · (−w · objective + kl_coef · kl − entropy_coef · entropy), minimised, and what was measured.

    The objective is made of r = exp(logprobs − old) and the advantage; w = exp(old − rollout) after the correction,
    detached. A token's share is 1/N, 1/(S · tokens of its sequence), 1/S or 1/(S · constant_length), by `aggregate`.
    `old` is `old_logprobs_bt` where given; else, with a correction, the detached current log-probs (one optimiser step
    per batch needs no extra forward, and r is 1); else the rollout's own, and w is 1. Inputs are not changed; masked
    positions may hold anything.

    Args:
        logprobs_bt: current policy, with gradient.
        rollout_logprobs_bt: what the engine recorded while sampling.
        advantages_bt: advantage of each token.
        mask_bt: bool, true on trained tokens.
        num_tokens: N, trained tokens of the whole optimiser step; 0 gives a loss of 0.
        num_sequences: S, sequences with a trained token in the whole optimiser step.
        old_logprobs_bt: the trainer's log-probs before the step.
        ref_logprobs_bt: the reference policy's, for a KL in the loss and its metric.
        entropy_bt: of the policy's next-token distribution; with gradient for entropy_coef.
        sample_bt: which sequence a position belongs to, all of it in this micro-batch; default: each row is one.
    """
    if sample_bt is None:
        sample_bt = torch.arange(len(mask_bt), device=mask_bt.device)[:, None].expand_as(mask_bt)
    current_bt = logprobs_bt.detach()
    trainer_bt = current_bt if old_logprobs_bt is None else old_logprobs_bt.detach()
    sampler = old_logprobs_bt is None and config.correction == "none"
    log_ratio_bt = masked_log_ratio(logprobs_bt, rollout_logprobs_bt if sampler else trainer_bt, mask_bt)
    if config.ratio == "sequence":  # with a token's own gradient, so that advantages may differ within a sequence
        own_bt = masked_log_ratio(logprobs_bt, current_bt, mask_bt)
        log_ratio_bt = own_bt + _sequence_means(log_ratio_bt.detach(), mask_bt, sample_bt)
    ratio_bt = log_ratio_bt.exp()
    log_importance_bt = masked_log_ratio(trainer_bt, rollout_logprobs_bt, mask_bt)
    weight_bt = _correction(log_importance_bt, mask_bt, sample_bt, config)

    advantages_bt = advantages_bt.where(mask_bt, 0.0)
    terms_bt = -weight_bt * _objective(ratio_bt, advantages_bt, logprobs_bt.where(mask_bt, 0.0), config)
    metrics = _measured(ratio_bt, log_importance_bt, weight_bt, advantages_bt, config)
    if ref_logprobs_bt is not None:
        distance_bt = masked_log_ratio(logprobs_bt, ref_logprobs_bt, mask_bt)
        metrics["kl"] = kl_penalty(distance_bt.detach(), "k3")
        if config.kl != "off" and config.kl_in == "loss":
            terms_bt = terms_bt + config.kl_coef * kl_penalty(distance_bt, config.kl)
    elif config.kl != "off" and config.kl_in == "loss":
        raise ValueError(f"kl={config.kl} in the loss needs ref_logprobs_bt")
    if config.entropy_coef:
        if entropy_bt is None:
            raise ValueError("entropy_coef needs entropy_bt")
        terms_bt = terms_bt - config.entropy_coef * entropy_bt

    trained_bt = mask_bt.to(ratio_bt.dtype)
    loss_bt = terms_bt.where(mask_bt, 0.0) * _shares(trained_bt, sample_bt, config, num_tokens, num_sequences)
    share_bt = trained_bt / max(num_tokens, 1)
    return LossOutput(loss=loss_bt.sum(), metrics={name: (value * share_bt).sum() for name, value in metrics.items()})


def _sequence_sums(values_bt: Tensor, sample_bt: Tensor) -> Tensor:
    """Returns at every position the sum over its sequence, float64."""
    _, index_bt = torch.unique(sample_bt, return_inverse=True)
    index_n, values_n = index_bt.flatten(), values_bt.double().flatten()
    return torch.zeros_like(values_n).index_add(0, index_n, values_n)[index_bt]


def _sequence_means(values_bt: Tensor, mask_bt: Tensor, sample_bt: Tensor) -> Tensor:
    """Returns at every position the mean over its sequence's trained tokens; values are 0 elsewhere."""
    lengths_bt = _sequence_sums(mask_bt, sample_bt).clamp(min=1)
    return (_sequence_sums(values_bt, sample_bt) / lengths_bt).to(values_bt.dtype)


def _correction(log_importance_bt: Tensor, mask_bt: Tensor, sample_bt: Tensor, config: LossConfig) -> Tensor:
    """Returns the weight of each token, from its log-ratio of trainer and engine."""
    low, high = config.correction_low, config.correction_high
    importance_bt = log_importance_bt.exp()
    if config.correction == "none":
        return torch.ones_like(importance_bt)
    if config.correction == "truncate":
        return importance_bt.clamp(low, high)
    if config.correction == "mask":
        return importance_bt.where((importance_bt >= low) & (importance_bt <= high), 0.0)
    if config.correction == "sequence_mask":
        mean_bt = _sequence_means(log_importance_bt, mask_bt, sample_bt).exp()
        return importance_bt.clamp(max=MAX_SURVIVOR_WEIGHT).where((mean_bt >= low) & (mean_bt <= high), 0.0)
    raise ValueError(f"unknown correction {config.correction!r}")


def _objective(ratio_bt: Tensor, advantages_bt: Tensor, logprobs_bt: Tensor, config: LossConfig) -> Tensor:
    """Returns what is maximised of each token: min(r·A, clip(r)·A), clip(r)·A·log-prob with clip(r) detached, or r·A.

    With dual_clip c, that of a negative advantage is at least c·A.
    """
    clipped_bt = ratio_bt.clamp(1 - config.clip_low, 1 + config.clip_high)
    if config.clip == "none":
        return ratio_bt * advantages_bt
    if config.clip == "cispo":
        return clipped_bt.detach() * advantages_bt * logprobs_bt
    if config.clip != "ppo":
        raise ValueError(f"unknown clip {config.clip!r}")
    smaller_bt = torch.minimum(ratio_bt * advantages_bt, clipped_bt * advantages_bt)
    if config.dual_clip is None:
        return smaller_bt
    bounded_bt = torch.maximum(smaller_bt, config.dual_clip * advantages_bt)
    return bounded_bt.where(advantages_bt < 0, smaller_bt)


def _shares(trained_bt: Tensor, sample_bt: Tensor, config: LossConfig, num_tokens: int, num_sequences: int) -> Tensor:
    """Returns what each trained token counts in the loss, 0 elsewhere."""
    num_tokens, num_sequences = max(num_tokens, 1), max(num_sequences, 1)
    if config.aggregate == "token_mean":
        return trained_bt / num_tokens
    if config.aggregate == "seq_mean_token_mean":
        lengths_bt = _sequence_sums(trained_bt, sample_bt).clamp(min=1).to(trained_bt.dtype)
        return trained_bt / (lengths_bt * num_sequences)
    if config.aggregate == "seq_mean_token_sum":
        return trained_bt / num_sequences
    if config.aggregate != "constant":
        raise ValueError(f"unknown aggregate {config.aggregate!r}")
    if config.constant_length is None:
        raise ValueError("aggregate=constant needs constant_length, the longest completion")
    return trained_bt / (num_sequences * config.constant_length)


@torch.no_grad()
def _measured(
    ratio_bt: Tensor, log_importance_bt: Tensor, weight_bt: Tensor, advantages_bt: Tensor, config: LossConfig
) -> dict[str, Tensor]:
    """Returns what is measured of each token."""
    importance_bt = log_importance_bt.exp()
    above_bt, below_bt = ratio_bt > 1 + config.clip_high, ratio_bt < 1 - config.clip_low
    if config.clip == "ppo":  # whose minimum is the unclipped term elsewhere
        above_bt, below_bt = above_bt & (advantages_bt > 0), below_bt & (advantages_bt < 0)
    elif config.clip == "none":
        above_bt, below_bt = torch.zeros_like(above_bt), torch.zeros_like(below_bt)
    return {
        "clip_low": below_bt,
        "clip_high": above_bt,
        "ratio_mean": ratio_bt.detach(),
        "logprob_gap": log_importance_bt.abs(),
        "mismatch_kl": kl_penalty(-log_importance_bt, "k3"),
        "importance_mean": importance_bt,
        "importance_square": importance_bt.square(),
        "importance_capped": (weight_bt != importance_bt) & (config.correction != "none"),
    }


def effective_sample_size(metrics: Mapping[str, float]) -> float:
    """Returns (Σw)² / (n·Σw²) of the uncapped importance weights w from aggregated metrics; 1 means all equal."""
    return metrics["importance_mean"] ** 2 / metrics["importance_square"]
