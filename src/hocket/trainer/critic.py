"""Train a critic, which estimates the return at every sampled token.

It is a model of its own with its own optimizer, and with a head that is zero at first.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hocket.algorithm.choices import choose
from hocket.algorithm.losses import LossOutput
from hocket.config import Config, CriticConfig, ModelConfig
from hocket.data import model_folder
from hocket.data import tokenizer as tokenizers
from hocket.trainer.batching import TrainBatch
from hocket.trainer.engine import DeepSpeedEngine
from hocket.trainer.float32_head import compute_in_float32
from hocket.trainer.objective import Auxiliary, LoadingTrainer, Measure, column
from hocket.trainer.policy import ScalarModel
from hocket.trainer.step import Learner, Update


class ValueModel(ScalarModel):
    """A language model with a head that computes the value before a token, in place of logits."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        logits = self.model.get_output_embeddings()
        head = nn.Linear(logits.in_features, 1, bias=False, dtype=logits.weight.dtype)
        nn.init.zeros_(head.weight)
        compute_in_float32(head)  # bfloat16 rounds values near 1 to steps of .004
        self.model.config.tie_word_embeddings = False
        self.model.set_output_embeddings(head)


@column("values")
def critic(config: Config) -> Auxiliary | None:
    """Train a critic and measure its values if the advantage needs them."""
    if "values" not in choose("advantage", config.algorithm.advantage).needs:
        return None
    settings = config.critic
    model = config.model.beside(settings.path)
    if settings.path is not None:
        tokenizer = model_folder.examine(model, "critic.path", head=None, needs_weights=False)
        tokenizers.check_same_ids(tokenizer, f"critic.path={settings.path}", config.model)
    return Auxiliary(
        model=model,
        learns=True,
        delay=settings.warmup_steps,  # the policy begins to learn after these
        column="values",
        load=functools.partial(_load, settings, model),
    )


def _load(settings: CriticConfig, model: ModelConfig, trainer: LoadingTrainer) -> Measure:
    """Load the critic, and add it to the models that a step trains."""
    # The critic's learning rate is constant; the other settings are those of the policy.
    changes = {"learning_rate": settings.learning_rate, "warmup_steps": 0, "schedule": "constant"}
    trainer_config = trainer.setup.config.model_copy(update=changes)
    setup = dataclasses.replace(trainer.setup, config=trainer_config)

    module = trainer.load_model(model, ValueModel)
    engine = DeepSpeedEngine(module, setup, name="critic")
    module.check_architecture(trainer.device)
    learner = Learner(
        name="critic",
        engine=engine,
        loss=functools.partial(critic_loss, engine.forward, settings.value_clip),
        reads=("values", "returns"),
        rate="critic.learning_rate",
        metrics=critic_metrics,
    )
    trainer.learners.append(learner)
    return engine.forward


def critic_loss(forward: Measure, clip: float | None, batch: TrainBatch) -> LossOutput:
    """Compute a micro-batch's share of the critic's loss, with what its metrics take.

    Args:
        forward: computes the values of the batch with gradients.
        clip: how far a value may move from the value before the step; None: any distance.
        batch: has the columns "values", from before the step, and "returns".
    """
    values_bt = forward(batch)
    returns_bt = batch.columns["returns"]
    loss = value_loss(
        values_bt,
        batch.columns["values"],
        returns_bt,
        batch.mask_bt,
        num_tokens=batch.num_tokens_global,
        clip=clip,
    )
    return LossOutput(loss=loss, metrics=moments(values_bt, returns_bt, batch))


def critic_metrics(done: Update) -> dict[str, float]:
    """Compute the critic's metrics of a step."""
    totals = done.totals
    return {
        "critic/loss": totals["loss"],
        "critic/grad_norm": done.grad_norm,
        "critic/skipped": float(done.outcome == "skipped"),
        "critic/explained_variance": explained_variance(totals),
        # The error is return − value.
        "critic/value_mean": totals["return_mean"] - totals["error_mean"],
        "critic/return_mean": totals["return_mean"],
    }


def value_loss(
    values_bt: Tensor,
    old_values_bt: Tensor,
    returns_bt: Tensor,
    mask_bt: Tensor,
    *,
    num_tokens: int,
    clip: float | None,
) -> Tensor:
    """Compute the clipped value loss of PPO (arXiv 1707.06347).

    It is ½ Σ mask · max((V − ret)², (V_old + clip(V − V_old) − ret)²) / num_tokens, where clip
    bounds its argument to ± `clip`, and changes nothing if that is None.
    """
    # Numbers at places that are not trained may be nan.
    values_bt = values_bt.where(mask_bt, 0.0)
    old_values_bt = old_values_bt.where(mask_bt, 0.0)
    returns_bt = returns_bt.where(mask_bt, 0.0)
    moves_bt = values_bt - old_values_bt
    clipped_bt = values_bt if clip is None else old_values_bt + moves_bt.clamp(-clip, clip)
    worst_bt = torch.maximum((values_bt - returns_bt).square(), (clipped_bt - returns_bt).square())
    return 0.5 * worst_bt.sum() / max(num_tokens, 1)


@torch.no_grad()
def moments(values_bt: Tensor, returns_bt: Tensor, batch: TrainBatch) -> dict[str, Tensor]:
    """Compute a micro-batch's share of the means that `explained_variance` takes, in float64."""
    weight_bt = batch.mask_bt.double() / max(batch.num_tokens_global, 1)
    returns_bt = returns_bt.double().where(batch.mask_bt, 0.0)
    errors_bt = returns_bt - values_bt.double().where(batch.mask_bt, 0.0)
    means = {
        "return_mean": returns_bt,
        "return_square": returns_bt.square(),
        "error_mean": errors_bt,
        "error_square": errors_bt.square(),
    }
    return {name: (value * weight_bt).sum() for name, value in means.items()}


def explained_variance(means: Mapping[str, float]) -> float:
    """Compute 1 − Var(return − value) / Var(return); nan if all returns are equal."""
    variance = means["return_square"] - means["return_mean"] ** 2
    unexplained = means["error_square"] - means["error_mean"] ** 2
    if not variance > 1e-12 * means["return_square"]:  # rounding alone; or nan
        return math.nan
    return 1 - unexplained / variance
