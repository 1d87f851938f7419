"""The distance from the reference policy, token by token, and the coefficient that it is penalised with."""

from collections.abc import Mapping

import torch
from torch import Tensor

from hocket.config import AlgorithmConfig
from hocket.presets import Kl

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped here before exp: e^20 is far outside every clip range and still finite."""
MAX_ERROR = 0.2
"""Adaptive coefficients change as if the distance were at most this share off its target."""


def masked_log_ratio(numerator_bt: Tensor, denominator_bt: Tensor, mask_bt: Tensor) -> Tensor:
    """Returns numerator − denominator of log-probs within ±20, and 0 where the mask is false, whatever stands there."""
    # Masked before exp: padding may hold -inf, and a mask after exp would turn that into NaN gradients.
    difference_bt = numerator_bt.where(mask_bt, 0.0) - denominator_bt.where(mask_bt, 0.0)
    return difference_bt.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def kl_penalty(log_ratio: Tensor, estimator: Kl) -> Tensor:
    """Returns the estimate of KL(policy ‖ reference) from each x = log policy − log reference of a sampled token.

    k1 = x; k2 = x²/2; k3 = exp(−x) − 1 + x ≥ 0 (arXiv 2510.01555 compares their gradients).
    """
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return log_ratio.square() / 2
    if estimator == "k3":
        return torch.expm1(-log_ratio) + log_ratio
    raise ValueError(f"unknown estimator of the KL divergence: {estimator!r}")


class KlController:
    """The coefficient of a KL in the rewards: fixed, or adapted step by step (arXiv 1909.08593).

    coef ← coef · (1 + clip(kl / target − 1, ±.2) · rollouts / horizon)

    Attributes:
        coef: what the penalty is multiplied with now.
    """

    def __init__(self, config: AlgorithmConfig) -> None:
        self.coef = config.kl_coef
        self._target = config.kl_target
        self._horizon = config.kl_horizon

    def update(self, kl: float | None, num_rollouts: int) -> None:
        """Adapts to the mean penalty of a token in a step with so many rollouts; None: nothing was measured."""
        if self._target is not None and kl is not None:
            error = min(max(kl / self._target - 1, -MAX_ERROR), MAX_ERROR)
            self.coef *= 1 + error * num_rollouts / self._horizon

    def state(self) -> dict[str, float]:
        """Returns what `restore` needs to go on from here."""
        return {"coef": self.coef}

    def restore(self, state: Mapping[str, float]) -> None:
        """Goes on from a `state`; a fixed coefficient is what is configured now."""
        if self._target is not None:
            self.coef = state["coef"]
