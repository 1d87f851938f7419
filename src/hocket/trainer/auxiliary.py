"""What the configured algorithm minimises, and needs beside the policy."""

import functools
from collections.abc import Callable

from hocket.algorithm.losses import policy_loss
from hocket.config import AlgorithmConfig, Config, CriticConfig, ModelConfig
from hocket.trainer.critic import critic
from hocket.trainer.models import Extra, Objective
from hocket.trainer.reference import reference


def old_policy(algorithm: AlgorithmConfig, critic: CriticConfig, model: ModelConfig) -> Extra | None:
    """Measure the policy's log-probs before a step: corrections need them in later updates."""
    if algorithm.updates == 1 or algorithm.correction == "none":
        return None
    return Extra(column="old_logprobs", load=lambda models: models.columns["logprobs"])


Need = Callable[[AlgorithmConfig, CriticConfig, ModelConfig], Extra | None]
EXTRAS: tuple[Need, ...] = (old_policy, reference, critic)


def configured(config: Config) -> Objective:
    algorithm = config.algorithm
    made = (make(algorithm, config.critic, config.model) for make in EXTRAS)
    return Objective(
        loss=functools.partial(policy_loss, config=algorithm.loss(config.rollout.max_tokens)),
        temperature=config.rollout.temperature,
        epochs=algorithm.epochs,
        minibatches=algorithm.minibatches,
        extras=[extra for extra in made if extra is not None],
    )
