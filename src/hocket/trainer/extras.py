"""What an algorithm needs beside the policy: a column measured before a step, by a model of its own or not."""

import dataclasses
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from hocket.config import Config, ModelConfig, TrainerConfig
from hocket.trainer.batching import TrainBatch
from hocket.trainer.engine import DeepSpeedEngine
from hocket.trainer.policy import Policy
from hocket.trainer.ranks import Ranks
from hocket.trainer.step import Learner

Column = Callable[[TrainBatch], Tensor]  # → [b, t] numbers of a batch's targets, 0 where its mask is False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """What an extra is made of."""

    policy: Policy
    engine: DeepSpeedEngine  # the policy's
    load: Callable[[ModelConfig, type[Policy]], Any]
    settings: TrainerConfig
    dtype: torch.dtype  # of forward and backward passes
    ranks: Ranks

    def logprobs(self, batch: TrainBatch) -> Tensor:
        return cast(Tensor, self.engine.forward(batch)[0])


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """An extra on this rank."""

    measure: Column
    frozen: Any = None  # a model that no step changes, with `tensors` and `close`
    learner: Learner | None = None  # what a step trains beside the policy


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Extra:
    """One need of a run. `models.EXTRAS` has a function per kind, which returns it or None."""

    column: str  # its name in `TrainSample.columns`
    load: Callable[[Base], Loaded]
    name: str = ""  # of its model
    model: ModelConfig | None = None
    learns: bool = False  # whether a step trains the model
    delay: int = 0  # steps that the model learns before the policy does


def old_policy(config: Config) -> Extra | None:
    """Measure the policy's log-probs before a step, for ratios in its later updates.

    The only update of a step takes them from its own forward pass; without a correction, the engine's are compared.
    """
    if config.algorithm.updates == 1 or config.algorithm.correction == "none":
        return None
    return Extra(column="old_logprobs", load=lambda base: Loaded(measure=base.logprobs))
