"""The critic estimates the return at every sampled token: a model under a head of zeros, with its own optimizer."""

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
    """A language model with the value before a token in place of its logits."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        logits = self.model.get_output_embeddings()
        head = nn.Linear(logits.in_features, 1, bias=False, dtype=logits.weight.dtype)
        nn.init.zeros_(head.weight)
        compute_in_float32(head)  # 16 bits round values near 1 to steps of .004
        self.model.config.tie_word_embeddings = False
        self.model.set_output_embeddings(head)


@column("values")
def critic(config: Config) -> Auxiliary | None:
    """Train a critic, and measure its values, where the advantage needs them."""
    if "values" not in choose("advantage", config.algorithm.advantage).needs:
        return None
    critic = config.critic
    model = config.model
    own = model.beside(critic.path)
    if critic.path is not None:
        tokenizer = model_folder.examine(own, "critic.path", head=None, needs_weights=False)
        tokenizers.check_same_ids(tokenizer, f"critic.path={critic.path}", model)
    load = functools.partial(_load, critic, own)
    return Auxiliary(model=own, learns=True, delay=critic.warmup_steps, column="values", load=load)


def _load(critic: CriticConfig, model: ModelConfig, trainer: LoadingTrainer) -> Measure:
    changes = {"learning_rate": critic.learning_rate, "warmup_steps": 0, "schedule": "constant"}
    settings = trainer.setup.config.model_copy(update=changes)
    module = trainer.load_model(model, ValueModel)
    engine = DeepSpeedEngine(
        module, dataclasses.replace(trainer.setup, config=settings), name="critic"
    )
    module.check_architecture(trainer.device)
    learner = Learner(
        name="critic",
        engine=engine,
        loss=functools.partial(critic_loss, engine.forward, critic.value_clip),
        reads=("values", "returns"),
        rate="critic.learning_rate",
        metrics=critic_metrics,
    )
    trainer.learners.append(learner)
    trainer.tensors.append(engine.tensors)
    return engine.forward


def critic_loss(forward: Measure, clip: float | None, batch: TrainBatch) -> LossOutput:
    values_bt = forward(batch)
    returns_bt = batch.columns["returns"]
    known = (batch.columns["values"], returns_bt, batch.mask_bt)
    loss = value_loss(values_bt, *known, num_tokens=batch.num_tokens_global, clip=clip)
    return LossOutput(loss=loss, metrics=moments(values_bt, returns_bt, batch))


def critic_metrics(done: Update) -> dict[str, float]:
    totals = done.totals
    return {
        "critic/loss": totals["loss"],
        "critic/grad_norm": done.grad_norm,
        "critic/skipped": float(done.outcome == "skipped"),
        "critic/explained_variance": explained_variance(totals),
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
    """Return ½ Σ mask · max((V − ret)², (V_old + clip(V − V_old) − ret)²) / num_tokens (arXiv 1707.06347)."""
    values_bt = values_bt.where(mask_bt, 0.0)
    old_values_bt = old_values_bt.where(mask_bt, 0.0)
    returns_bt = returns_bt.where(mask_bt, 0.0)
    moves_bt = values_bt - old_values_bt
    clipped_bt = values_bt if clip is None else old_values_bt + moves_bt.clamp(-clip, clip)
    worst_bt = torch.maximum((values_bt - returns_bt).square(), (clipped_bt - returns_bt).square())
    return 0.5 * worst_bt.sum() / max(num_tokens, 1)


@torch.no_grad()
def moments(values_bt: Tensor, returns_bt: Tensor, batch: TrainBatch) -> dict[str, Tensor]:
    """Return this micro-batch's share of what `explained_variance` takes, in float64."""
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
    """Return 1 − Var(return − value) / Var(return); nan where all returns are alike."""
    variance = means["return_square"] - means["return_mean"] ** 2
    unexplained = means["error_square"] - means["error_mean"] ** 2
    return 1 - unexplained / variance if variance > 1e-12 * means["return_square"] else math.nan
