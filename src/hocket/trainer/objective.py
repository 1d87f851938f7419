"""What a step minimises, and what it measures for that before the update."""

import dataclasses
import functools
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from hocket.algorithm.losses import LossOutput, policy_loss
from hocket.common.registry import Registry
from hocket.config import Config, ModelConfig
from hocket.trainer.batching import TrainBatch
from hocket.trainer.engine import DeepSpeedEngine, Setup
from hocket.trainer.logprobs import TokenStatistics, chosen_statistics
from hocket.trainer.policy import Policy, skeleton
from hocket.trainer.step import Learner
from hocket.types import TokenSequence

BatchLoss = Callable[..., LossOutput]
"""(logprobs_bt with gradient, entropy_bt, batch) → this micro-batch's share of the global loss; of a scalar model:
(values_bt with gradient, batch)."""
Measure = Callable[[TrainBatch], Tensor]
"""Computes a column of a batch: a [b, t] number per target, 0 where the mask is False."""
AskServer = Callable[
    [Sequence[TokenSequence], str | None], Coroutine[Any, Any, Sequence[Sequence[float]]]
]
"""(sequences, the servers' token) → a number per token, 0 where it was not sampled."""


class LoadingTrainer(Protocol):
    """A trainer that is loading its models: what an auxiliary's `load` may use of it, and add to."""

    device: torch.device
    setup: Setup
    policy: Policy
    engine: DeepSpeedEngine  # of the policy
    learners: list[Learner]  # the policy, then the auxiliary models that a step trains
    tensors: list[Callable[[], Iterator[Tensor]]]  # of each model
    columns: dict[
        str, Measure
    ]  # that can be measured so far: "logprobs" of the policy, then auxiliaries'

    def load_model(self, model: ModelConfig, kind: type[Policy]) -> Any:
        """Load a model onto this rank's CPU or, but for rank 0 at ZeRO-3, the meta device."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Auxiliary:
    """A column of numbers per token that an objective needs, measured before a step, with the model it takes."""

    column: str  # its name in `TrainSample.columns`
    load: Callable[["LoadingTrainer"], Measure] | None = (
        None  # adds what it loads to `learners` and `tensors`
    )
    ask: AskServer | None = None  # in place of `load`: rank 0 asks a server
    model: ModelConfig | None = None  # of its own
    learns: bool = False  # whether a step trains that model
    delay: int = 0  # steps that it learns before the policy does


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """A loss, how often a batch is used for it, and the columns that it needs."""

    loss: BatchLoss  # of the policy
    kind: type[Policy] = Policy  # of the trained model
    temperature: float = 1.0  # of the distribution whose log-probs the loss gets
    epochs: int = 1
    minibatches: int = 1  # of an epoch
    unit: int = 1  # samples, one after another, that no micro-batch divides
    auxiliaries: Sequence[Auxiliary] = ()
    statistics: TokenStatistics | None = None  # of the policy's tokens

    def models(self, policy: ModelConfig) -> list[tuple[ModelConfig, Any]]:
        """List every model's config and skeleton, the policy's first."""
        result = [(policy, skeleton(policy, self.kind))]
        for auxiliary in self.auxiliaries:
            if auxiliary.model is not None:
                whole = skeleton(auxiliary.model)
                result.append(
                    (auxiliary.model, whole if auxiliary.learns else whole.requires_grad_(False))
                )
        return result


COLUMNS: Registry[Callable[[Config], Auxiliary | None]] = Registry(
    "column",
    old_logprobs="hocket.trainer.objective",
    ref_logprobs="hocket.trainer.reference",
    values="hocket.trainer.critic",
)
column = COLUMNS.register
"""Decorator of a function that returns what measures a column, or None where the config needs it not.

Example: a plugin whose advantage grows with the policy's entropy before the step.

    @column("entropies")
    def entropies(config: Config) -> Auxiliary | None:
        if "entropies" not in choose("advantage", config.algorithm.advantage).needs:
            return None
        return Auxiliary(column="entropies", load=lambda trainer: lambda batch: trainer.engine.forward(batch)[1])

    @advantage("curious", per="token", needs=("entropies",))
    def curious(rewards_t: Tensor, entropies_t: Tensor, bonus: float = 0.1) -> Tensor:
        return rewards_t.sum() + bonus * entropies_t
"""


@column("old_logprobs")
def old_policy(config: Config) -> Auxiliary | None:
    """Measure the policy's log-probs before a step: corrections need them in later updates."""
    if config.algorithm.updates == 1 or config.algorithm.correction == "none":
        return None
    return Auxiliary(column="old_logprobs", load=lambda trainer: trainer.columns["logprobs"])


def configured(config: Config) -> Objective:
    """Make the objective of the section `algorithm`, with the columns that it needs."""
    algorithm = config.algorithm
    auxiliaries = []
    for make in COLUMNS.each():
        auxiliary = make(config)
        if auxiliary is not None:
            auxiliaries.append(auxiliary)
    return Objective(
        loss=functools.partial(policy_loss, config=algorithm.loss(config.rollout.max_tokens)),
        temperature=config.rollout.temperature,
        epochs=algorithm.epochs,
        minibatches=algorithm.minibatches,
        auxiliaries=auxiliaries,
        statistics=chosen_statistics(config),
    )
