"""Reward models: a score at the last token, by which chosen completions lie above rejected ones
(Bradley-Terry)."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import logsigmoid
from transformers.modeling_layers import GradientCheckpointingLayer

from hocket.algorithm.losses import LossOutput
from hocket.config import DataConfig, ModelConfig
from hocket.errors import ConfigError
from hocket.extras.stages import STAGES, pairs
from hocket.extras.stages.driver import Stage, Unit
from hocket.extras.stages.preferences import load_preferences
from hocket.protocol import TensorSpec
from hocket.trainer.batching import TrainBatch
from hocket.trainer.float32_head import compute_in_float32
from hocket.trainer.flops import Shape
from hocket.trainer.objective import Objective
from hocket.trainer.policy import PREFIX, ScalarModel
from hocket.trainer.weights import head_of
from hocket.types import TokenSequence, TrainSample


class RewardModel(ScalarModel):
    """A sequence classifier with one output; behind its last attention it computes only the
    positions that are read."""

    scores = True

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        head = head_of(self.model)
        head.requires_grad_(True)  # beside an adapter, too
        compute_in_float32(head)
        self._row_n: Tensor | None = None  # places that are read; None: all
        *_, last = (
            layer for layer in self.model.modules() if isinstance(layer, GradientCheckpointingLayer)
        )
        if hasattr(last, "mlp") and not Shape.of(self.model).experts:
            last.mlp.forward = functools.partial(self._where_read, last.mlp.forward)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # rows differ in what is read
    def _where_read(self, forward: Callable[[Tensor], Tensor], hidden_brh: Tensor) -> Tensor:
        if self._row_n is None:
            return forward(hidden_brh)
        read_bnh = forward(hidden_brh.index_select(1, self._row_n))
        return read_bnh.new_zeros(hidden_brh.shape).index_copy(1, self._row_n, read_bnh)

    def forward(self, batch: TrainBatch) -> tuple[Tensor, ...]:
        self._row_n = batch.row_n  # for the backward pass, too, which may compute again
        return (super().forward(batch),)

    def write(
        self, folder: Path, named: Sequence[tuple[str, Tensor]], tokenizer: Any, dtype: torch.dtype
    ) -> dict[str, TensorSpec]:
        """Write a whole model, with an adapter merged into it."""
        self.weights.make_model(
            {name.removeprefix(PREFIX): tensor for name, tensor in named}, dtype, folder
        )
        return {}


@STAGES.register("rm")
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RmOptions(Stage):
    """The stage, made of the keys of the section rm (docs/stages.md)."""

    rows = "comparisons"
    rate = "reward models mostly take 1e-5, 10x as much with model.lora"

    center_coef: Annotated[float, Field(ge=0)] = (
        0.0  # weight of the term that keeps scores around 0
    )

    def objective(self, model: ModelConfig) -> Objective:
        return Objective(
            loss=functools.partial(comparison_loss, options=self), kind=RewardModel, unit=2
        )

    def load(self, data: DataConfig, tokenizer: Any, longest: int) -> list[Unit]:
        if tokenizer.chat_template and not data.chat_template:
            what = f"the reward reward_model would read text in {tokenizer.name_or_path}'s chat template"
            raise ConfigError(
                f"{what}: set data.chat_template=true, or take the template out of the model's folder"
            )
        pad = tokenizer.pad_token_id
        return [
            (_read(pair.chosen, pad, pair.margin or 0.0), _read(pair.rejected, pad, 0.0))
            for pair in load_preferences(data, tokenizer, longest, whole=True)
        ]


def _read(sequence: TokenSequence, pad: int | None, margin: float) -> TrainSample:
    """Return what the reward `reward_model` reads, without padding, and train on what it says at
    the last token."""
    ids = sequence.token_ids[:]
    while ids[-1] == pad:
        ids.pop()
    mask = (False,) * len(ids) + (True,)  # where the token that follows would be predicted
    read = dataclasses.replace(
        sequence, token_ids=ids + ids[-1:], mask=mask, logprobs=(0.0,) * len(mask)
    )
    return pairs.sample(read, margins=margin)


def comparison_loss(scores_bt: Tensor, batch: TrainBatch, options: RmOptions) -> LossOutput:
    """Return the batch's share of the mean over pairs of −log σ(r_w − r_l − margin) + center_coef
    (r_w + r_l)².

    r_w and r_l are the scores of chosen and rejected; the second term is of arXiv 2312.09244.
    """
    scores_p2 = pairs.sums(scores_bt, batch)
    chosen_p, rejected_p = scores_p2.unbind(dim=1)
    margins_bt = batch.columns.get("margins", torch.zeros_like(scores_bt))  # a rehearsal has none
    margins_p = pairs.sums(margins_bt, batch)[:, 0]
    losses_p = -logsigmoid(chosen_p - rejected_p - margins_p)
    losses_p = losses_p + options.center_coef * (chosen_p + rejected_p).square()
    return LossOutput(loss=pairs.mean(losses_p, batch), metrics=pairs.metrics(scores_p2, batch))
