"""Direct preference optimization (DPO) and its kin.

The policy learns to give chosen completions a higher probability than rejected ones, each measured
against a reference.
"""

import dataclasses
import functools
from typing import Annotated, Any, Literal

from pydantic import Field
from torch import Tensor
from torch.nn.functional import logsigmoid

from hocket.algorithm.losses import LossOutput
from hocket.config import DataConfig, ModelConfig
from hocket.config.sections import UserPath
from hocket.extras.stages import STAGES, pairs
from hocket.extras.stages.driver import Stage, Unit
from hocket.extras.stages.preferences import load_preferences
from hocket.trainer.batching import TrainBatch
from hocket.trainer.objective import Auxiliary, Objective
from hocket.trainer.reference import frozen

REFERENCE = "ref_logprobs"  # a column: the reference's log-prob of the sequence, at its end


@STAGES.register("dpo")
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DpoOptions(Stage):
    """The stage, made of the keys of the section dpo (docs/how-to/sft_dpo.md)."""

    rows = "preferences"
    rate = "preferences mostly take 5e-7 to 5e-6, 10x as much with model.lora"

    loss: Literal["dpo", "ipo", "cdpo", "robust", "simpo"] = "dpo"
    beta: Annotated[float, Field(gt=0)] = 0.1
    # The share of pairs that are assumed to be the wrong way round.
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    length_normalized: bool = False  # means over tokens in place of sums
    gamma: Annotated[float, Field(ge=0)] = 0.0  # the margin of simpo
    reference: UserPath | None = None  # None: the model that training starts from

    def __post_init__(self) -> None:
        for option, value, losses in (
            ("label_smoothing", self.label_smoothing, ("cdpo", "robust")),
            ("gamma", self.gamma, ("simpo",)),
            ("reference", self.reference, ("dpo", "ipo", "cdpo", "robust")),
        ):
            if value and self.loss not in losses:
                raise ValueError(
                    f"{option} has no effect with loss={self.loss}, only with {' or '.join(losses)}"
                )

    def objective(self, model: ModelConfig) -> Objective:
        if self.loss == "simpo":
            auxiliaries = []
        elif self.reference is not None:
            auxiliaries = [frozen(self.reference, "dpo.reference", model)]
        else:  # the policy, measured once before the first step
            own_logprobs = Auxiliary(
                column=REFERENCE, load=lambda trainer: trainer.columns["logprobs"]
            )
            auxiliaries = [own_logprobs]
        loss = functools.partial(pair_loss, options=self)
        return Objective(loss=loss, auxiliaries=auxiliaries, unit=2)

    def load(self, data: DataConfig, tokenizer: Any, longest: int) -> list[Unit]:
        return [
            (pairs.sample(pair.chosen), pairs.sample(pair.rejected))
            for pair in load_preferences(data, tokenizer, longest)
        ]


def pair_loss(
    logprobs_bt: Tensor, entropy_bt: Tensor, batch: TrainBatch, options: DpoOptions
) -> LossOutput:
    """Compute the batch's share of the mean of `losses` over pairs.

    h = log π(chosen) / ref(chosen) − log π(rejected) / ref(rejected), where log-probs are summed
    over tokens, or averaged; simpo has no ref.
    """
    del entropy_bt
    logps_p2 = pairs.sums(logprobs_bt, batch)
    ratios_p2 = logps_p2
    if REFERENCE in batch.columns:
        reference_p2 = pairs.sums(batch.columns[REFERENCE], batch)
        # Columns are float32: what rounds to the same number is no difference.
        is_equal_p2 = logps_p2.float() == reference_p2.float()
        ratios_p2 = logps_p2 - logps_p2.detach().where(is_equal_p2, reference_p2)
    compared_p2 = ratios_p2
    if options.length_normalized or options.loss in ("ipo", "simpo"):
        compared_p2 = ratios_p2 / pairs.sums(batch.mask_bt, batch)
    chosen_p, rejected_p = compared_p2.unbind(dim=1)
    loss = pairs.mean(losses(chosen_p - rejected_p, options), batch)
    rewards_p2 = compared_p2 if options.loss == "simpo" else ratios_p2
    metrics = pairs.metrics(options.beta * rewards_p2, batch)
    chosen_logps_p, rejected_logps_p = logps_p2.detach().unbind(dim=1)
    metrics["logps/chosen"] = pairs.mean(chosen_logps_p, batch)
    metrics["logps/rejected"] = pairs.mean(rejected_logps_p, batch)
    return LossOutput(loss=loss, metrics=metrics)


def losses(h_p: Tensor, options: DpoOptions) -> Tensor:
    """Compute the loss of each pair, with x = beta h − gamma and e = label_smoothing.

    dpo:     −log σ(x), arXiv 2305.18290
    simpo:   −log σ(x), arXiv 2405.14734
    cdpo:    −(1 − e) log σ(x) − e log σ(−x), Mitchell's note of 2023
    robust:  [−(1 − e) log σ(x) + e log σ(−x)] / (1 − 2e), arXiv 2403.00409
    ipo:     (h − 1 / (2 beta))², arXiv 2310.12036, of means over tokens as in TRL
    """
    if options.loss == "ipo":
        return (h_p - 1 / (2 * options.beta)).square()
    x_p = options.beta * h_p - options.gamma
    share = options.label_smoothing
    right_p = -(1 - share) * logsigmoid(x_p)
    wrong_p = -share * logsigmoid(-x_p)
    if options.loss == "robust":
        return (right_p - wrong_p) / (1 - 2 * share)
    return right_p + wrong_p
