"""Estimate the KL divergence from the reference policy per token, and adapt its coefficient."""

from collections.abc import Mapping

import torch
from torch import Tensor

from hocket.config.algorithm import AlgorithmConfig, Kl

MAX_ERROR = 0.2
HORIZON = 10_000  # rollouts


def kl_penalty(log_ratio: Tensor, estimator: Kl) -> Tensor:
    """Return the estimate of KL(policy ‖ reference) per sampled token, from x = log policy − log reference.

    k1 = x; k2 = x²/2; k3 = exp(−x) − 1 + x ≥ 0 (arXiv 2510.01555 compares their gradients).
    """
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return log_ratio.square() / 2
    return torch.expm1(-log_ratio) + log_ratio


class KlController:
    """Coefficient `coef` of a KL in the rewards: fixed, or adapted to kl_target (arXiv 1909.08593).

    coef ← coef · (1 + clip(kl / target − 1, ±0.2) · rollouts / 10,000)
    """

    def __init__(self, config: AlgorithmConfig) -> None:
        self.coef = config.kl_coef
        self._target = config.kl_target

    def update(self, kl: float | None, num_rollouts: int) -> None:
        """Adapt to the mean penalty per token; None if nothing was measured."""
        if self._target is not None and kl is not None:
            error = min(max(kl / self._target - 1, -MAX_ERROR), MAX_ERROR)
            self.coef *= 1 + error * num_rollouts / HORIZON

    def state(self) -> dict[str, float]:
        return {"coef": self.coef}

    def restore(self, state: Mapping[str, float]) -> None:
        """Continue from a `state`; a fixed coefficient stays as configured."""
        if self._target is not None:
            self.coef = state["coef"]
