"""Train reward models: the score at the last token is higher for chosen than for rejected
completions (Bradley-Terry)."""

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
    """A sequence classifier with one output.

    The MLP of the last layer computes only the positions whose score is read.
    """

    scores = True

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        head = head_of(self.model)
        head.requires_grad_(True)  # beside an adapter, too
        compute_in_float32(head)
        self._row_n: Tensor | None = None  # the positions that are read; None: all
        layers = [
            layer for layer in self.model.modules() if isinstance(layer, GradientCheckpointingLayer)
        ]
        mlp = getattr(layers[-1], "mlp", None)
        if mlp is not None and not Shape.of(self.model).experts:
            mlp.forward = functools.partial(self._where_read, mlp.forward)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # rows differ in what is read
    def _where_read(self, forward: Callable[[Tensor], Tensor], hidden_brh: Tensor) -> Tensor:
        """Compute the positions that are read; the others are 0."""
        if self._row_n is None:
            return forward(hidden_brh)
        read_bnh = forward(hidden_brh.index_select(1, self._row_n))
        return read_bnh.new_zeros(hidden_brh.shape).index_copy(1, self._row_n, read_bnh)

    def forward(self, batch: TrainBatch) -> tuple[Tensor, ...]:
        self._row_n = batch.row_n  # kept for the backward pass, which may compute the layer again
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
    """The stage, made of the keys of the section rm (docs/how-to/sft_dpo.md)."""

    rows = "comparisons"
    rate = "reward models mostly take 1e-5, 10x as much with model.lora"

    # The weight of the term that keeps scores around 0.
    center_coef: Annotated[float, Field(ge=0)] = 0.0

    def objective(self, model: ModelConfig) -> Objective:
        loss = functools.partial(comparison_loss, options=self)
        return Objective(loss=loss, kind=RewardModel, unit=2)

    def load(self, data: DataConfig, tokenizer: Any, longest: int) -> list[Unit]:
        if tokenizer.chat_template and not data.chat_template:
            raise ConfigError(
                f"the reward reward_model would read text in {tokenizer.name_or_path}'s chat "
                "template: set data.chat_template=true, or take the template out of the model's "
                "folder"
            )
        pad = tokenizer.pad_token_id
        return [
            (_read(pair.chosen, pad, pair.margin or 0.0), _read(pair.rejected, pad, 0.0))
            for pair in load_preferences(data, tokenizer, longest, whole=True)
        ]


def _read(sequence: TokenSequence, pad: int | None, margin: float) -> TrainSample:
    """Make a sample of the tokens that the reward `reward_model` reads, whose last is trained.

    `pad`: the padding token, which is taken off the end.
    """
    ids = sequence.token_ids[:]
    while ids[-1] == pad:
        ids.pop()
    # Position i of a sample trains what the model computes at token i − 1: so the last token is
    # doubled, for the score at it to be trained.
    mask = (False,) * len(ids) + (True,)
    zeros = (0.0,) * len(mask)
    read = dataclasses.replace(sequence, token_ids=ids + ids[-1:], mask=mask, logprobs=zeros)
    return pairs.sample(read, margins=margin)


def comparison_loss(scores_bt: Tensor, batch: TrainBatch, options: RmOptions) -> LossOutput:
    """Compute the batch's share of the mean over pairs of the Bradley-Terry loss.

    It is −log σ(r_w − r_l − margin) + center_coef (r_w + r_l)², with the scores r_w of the chosen
    and r_l of the rejected completion; the second term is from arXiv 2312.09244.
    """
    scores_p2 = pairs.sums(scores_bt, batch)
    chosen_p, rejected_p = scores_p2.unbind(dim=1)
    margins_bt = batch.columns.get("margins", torch.zeros_like(scores_bt))  # a rehearsal has none
    margins_p = pairs.sums(margins_bt, batch)[:, 0]
    losses_p = -logsigmoid(chosen_p - rejected_p - margins_p)
    losses_p = losses_p + options.center_coef * (chosen_p + rejected_p).square()
    return LossOutput(loss=pairs.mean(losses_p, batch), metrics=pairs.metrics(scores_p2, batch))
