"""What the configured algorithm minimises, and needs beside the policy."""

import functools

from hocket.algorithm.losses import policy_loss
from hocket.config import Config
from hocket.trainer.models import COLUMNS, Auxiliary, Objective, column


@column("old_logprobs")
def old_policy(config: Config) -> Auxiliary | None:
    """Measure the policy's log-probs before a step: corrections need them in later updates."""
    if config.algorithm.updates == 1 or config.algorithm.correction == "none":
        return None
    return Auxiliary(column="old_logprobs", load=lambda models: models.columns["logprobs"])


def configured(config: Config) -> Objective:
    """Return the objective of the section `algorithm`, with the columns that it needs."""
    algorithm = config.algorithm
    needed = (make(config) for make in COLUMNS.each())
    return Objective(
        loss=functools.partial(policy_loss, config=algorithm.loss(config.rollout.max_tokens)),
        temperature=config.rollout.temperature,
        epochs=algorithm.epochs,
        minibatches=algorithm.minibatches,
        auxiliaries=[auxiliary for auxiliary in needed if auxiliary is not None],
    )
