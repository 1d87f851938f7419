"""Adapt the coefficient of a KL in the rewards."""

from collections.abc import Mapping

from hocket.config.algorithm import AdaptiveKl, AlgorithmConfig

MAX_ERROR = 0.2


class KlController:
    """Coefficient `coef` of a KL in the rewards: fixed, or adapted to a target (arXiv 1909.08593).

    coef ← coef · (1 + clip(kl / target − 1, ±0.2) · rollouts / horizon)
    """

    def __init__(self, config: AlgorithmConfig) -> None:
        self.coef = config.kl_coef
        self._adapts = config.kl_in if isinstance(config.kl_in, AdaptiveKl) else None

    def update(self, kl: float | None, num_rollouts: int) -> None:
        """Adapt to the mean penalty per token; None if nothing was measured."""
        if self._adapts is not None and kl is not None:
            error = min(max(kl / self._adapts.target - 1, -MAX_ERROR), MAX_ERROR)
            self.coef *= 1 + error * num_rollouts / self._adapts.horizon

    def state(self) -> dict[str, float]:
        return {"coef": self.coef}

    def restore(self, state: Mapping[str, float]) -> None:
        """Continue from a `state`; a fixed coefficient stays as configured."""
        if self._adapts is not None:
            self.coef = state["coef"]
