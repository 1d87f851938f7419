"""What the configured algorithm minimises, and needs beside the policy."""

from collections.abc import Callable

from torch import Tensor

from hocket.algorithm.losses import LossConfig, LossOutput, policy_loss
from hocket.config import AlgorithmConfig, Config, CriticConfig, ModelConfig
from hocket.trainer.batching import TrainBatch
from hocket.trainer.critic import critic
from hocket.trainer.models import BatchLoss, Extra, Objective
from hocket.trainer.reference import reference


def old_policy(algorithm: AlgorithmConfig, critic: CriticConfig, model: ModelConfig) -> Extra | None:
    """Measure the policy's log-probs before a step: a correction needs them in its later updates."""
    if algorithm.updates == 1 or algorithm.correction == "none":
        return None
    return Extra(column="old_logprobs", load=lambda models: models.policy_logprobs)


Need = Callable[[AlgorithmConfig, CriticConfig, ModelConfig], Extra | None]
EXTRAS: tuple[Need, ...] = (old_policy, reference, critic)


def configured(config: Config) -> Objective:
    algorithm = config.algorithm
    made = (make(algorithm, config.critic, config.model) for make in EXTRAS)
    return Objective(
        loss=configured_loss(algorithm.loss(config.rollout.max_tokens)),
        temperature=config.rollout.temperature,
        epochs=algorithm.epochs,
        minibatches=algorithm.minibatches,
        extras=[extra for extra in made if extra is not None],
    )


def configured_loss(settings: LossConfig) -> BatchLoss:
    def loss(logprobs_bt: Tensor, entropy_bt: Tensor, batch: TrainBatch) -> LossOutput:
        return policy_loss(
            logprobs_bt,
            batch.rollout_logprobs_bt,
            batch.advantages_bt,
            batch.mask_bt,
            config=settings,
            num_tokens=batch.num_tokens_global,
            num_sequences=batch.num_sequences_global,
            old_logprobs_bt=batch.columns.get("old_logprobs"),
            ref_logprobs_bt=batch.columns.get("ref_logprobs"),
            entropy_bt=entropy_bt,
            sample_bt=batch.sample_bt,
        )

    return loss
