"""What an algorithm needs beside the policy: a column that is measured before a step."""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from hocket.config import AlgorithmConfig, CriticConfig, ModelConfig, TrainerConfig
from hocket.trainer.batching import TrainBatch
from hocket.trainer.engine import DeepSpeedEngine
from hocket.trainer.policy import Policy
from hocket.trainer.ranks import Ranks
from hocket.trainer.step import Learner

Column = Callable[[TrainBatch], Tensor]  # → [b, t] numbers of a batch's targets, 0 where its mask is False


class Base(abc.ABC):
    """What an extra is made of."""

    policy: Policy
    engine: DeepSpeedEngine  # the policy's
    settings: TrainerConfig
    dtype: torch.dtype  # of forward and backward passes
    ranks: Ranks

    @abc.abstractmethod
    def load(self, model: ModelConfig, kind: type[Policy]) -> Any:
        """Load a model onto this rank's CPU or, but for rank 0 at ZeRO-3, the meta device."""

    def logprobs(self, batch: TrainBatch) -> Tensor:
        return cast(Tensor, self.engine.forward(batch)[0])


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """An extra on this rank."""

    measure: Column
    frozen: Any = None  # a model that no step changes, with `tensors`
    learner: Learner | None = None  # what a step trains beside the policy


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Extra:
    """One need of a config; `models.EXTRAS` has a function per kind."""

    column: str  # its name in `TrainSample.columns`
    load: Callable[[Base], Loaded]
    name: str = ""  # of its model
    model: ModelConfig | None = None
    learns: bool = False  # whether a step trains the model
    delay: int = 0  # steps that the model learns before the policy does


def old_policy(algorithm: AlgorithmConfig, critic: CriticConfig, model: ModelConfig) -> Extra | None:
    """Measure the policy's log-probs before a step: a correction needs them in its later updates."""
    if algorithm.updates == 1 or algorithm.correction == "none":
        return None
    return Extra(column="old_logprobs", load=lambda base: Loaded(measure=base.logprobs))
