"""Policy losses: pure functions of log-probabilities, one token at a time.

Legend of suffixes: b rows, t next-token axis. `mask_bt` is true on trained tokens. Denominators count the whole
optimiser step, over all micro-batches and ranks, so that contributions of micro-batches simply add up.
"""

import dataclasses
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped here before exp: e^20 is far outside every clip range and still finite."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LossConfig:
    """Knobs of the policy loss.

    Attributes:
        clip_low, clip_high: the probability ratio is clipped to [1 − clip_low, 1 + clip_high].
        correction: "truncate" weighs each token by min(exp(old − rollout), correction_high), which corrects for the
            difference between the engine that sampled and the trainer; "none" leaves it out.
        correction_high: cap of that weight.
    """

    clip_low: float = 0.2
    clip_high: float = 0.28
    correction: Literal["none", "truncate"] = "truncate"
    correction_high: float = 2.0


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
) -> LossOutput:
    """Returns −Σ mask · w · min(r·A, clip(r)·A) / num_tokens, minimised, and what was measured on the way.

    r = exp(logprobs − old) and w = min(exp(old − rollout), cap), detached. `old` is `old_logprobs_bt` where given;
    else, with a correction, the detached current log-probs (one optimiser step per batch needs no extra forward, and
    r is 1); else the rollout's own, without a weight. Inputs are not changed; masked positions may hold anything.

    Args:
        logprobs_bt: current policy, with gradient.
        rollout_logprobs_bt: what the engine recorded while sampling.
        advantages_bt: advantage of each token.
        mask_bt: bool, true on trained tokens.
        num_tokens: trained tokens of the whole optimiser step; 0 gives a loss of 0.
        num_sequences: sequences with a trained token in the whole optimiser step; the token mean does not need it.
        old_logprobs_bt: the trainer's log-probs before the step.
    """
    if config.correction not in ("none", "truncate"):
        raise ValueError(f"unknown correction {config.correction!r}")
    del num_sequences
    current_bt = logprobs_bt.detach()
    trainer_bt = current_bt if old_logprobs_bt is None else old_logprobs_bt.detach()
    corrected = config.correction != "none"
    reference_bt = rollout_logprobs_bt if old_logprobs_bt is None and not corrected else trainer_bt

    ratio_bt = _masked_log_ratio(logprobs_bt, reference_bt, mask_bt).exp()
    importance_bt = _masked_log_ratio(trainer_bt, rollout_logprobs_bt, mask_bt).exp()
    weight_bt = importance_bt.clamp(max=config.correction_high) if corrected else torch.ones_like(ratio_bt)

    advantages_bt = advantages_bt.where(mask_bt, 0.0)
    clipped_bt = ratio_bt.clamp(1 - config.clip_low, 1 + config.clip_high)
    objective_bt = torch.minimum(ratio_bt * advantages_bt, clipped_bt * advantages_bt)
    loss = -(weight_bt * objective_bt).sum() / max(num_tokens, 1)  # masked tokens have advantage 0

    share_bt = mask_bt.to(ratio_bt.dtype) / max(num_tokens, 1)
    with torch.no_grad():
        gap_bt = (trainer_bt - rollout_logprobs_bt).where(mask_bt, 0.0)
        high_bt = (ratio_bt > 1 + config.clip_high) & (advantages_bt > 0)
        low_bt = (ratio_bt < 1 - config.clip_low) & (advantages_bt < 0)
        metrics = {
            "clip_low": low_bt,
            "clip_high": high_bt,
            "ratio_mean": ratio_bt,
            "logprob_gap": gap_bt.abs(),
            "mismatch_kl": importance_bt - 1 - gap_bt,
            "importance_mean": importance_bt,
            "importance_square": importance_bt.square(),
            "importance_capped": importance_bt > config.correction_high,
        }
        return LossOutput(loss=loss, metrics={name: (value * share_bt).sum() for name, value in metrics.items()})


def value_loss(
    values_bt: Tensor, old_values_bt: Tensor, returns_bt: Tensor, mask_bt: Tensor, *, clip: float, num_tokens: int
) -> LossOutput:
    """Returns ½ Σ mask · max((V − ret)², (V_old + clip(V − V_old, ±clip) − ret)²) / num_tokens."""
    clipped_bt = old_values_bt + (values_bt - old_values_bt).clamp(-clip, clip)
    worst_bt = torch.maximum((values_bt - returns_bt).square(), (clipped_bt - returns_bt).square())
    return LossOutput(loss=0.5 * worst_bt.where(mask_bt, 0.0).sum() / max(num_tokens, 1), metrics={})


def sft_loss(logprobs_bt: Tensor, mask_bt: Tensor, *, num_tokens: int) -> LossOutput:
    """Returns −Σ mask · logprobs / num_tokens: the mean cross-entropy of the demonstrated tokens, in nats."""
    return LossOutput(loss=-logprobs_bt.where(mask_bt, 0.0).sum() / max(num_tokens, 1), metrics={})


def effective_sample_size(metrics: Mapping[str, float]) -> float:
    """Returns (Σw)² / (n·Σw²) of the uncapped importance weights w from aggregated metrics; 1 means all equal."""
    return metrics["importance_mean"] ** 2 / metrics["importance_square"]


def _masked_log_ratio(numerator_bt: Tensor, denominator_bt: Tensor, mask_bt: Tensor) -> Tensor:
    # Masked before exp: padding may hold -inf, and a mask after exp would turn that into NaN gradients.
    difference_bt = numerator_bt.where(mask_bt, 0.0) - denominator_bt.where(mask_bt, 0.0)
    return difference_bt.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
