"""Supervised fine-tuning: the cross-entropy of what the assistant said in demonstrations."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from hocket.algorithm.losses import LossOutput
from hocket.config import DataConfig, ModelConfig
from hocket.extras.stages import STAGES, pairs
from hocket.extras.stages.demonstrations import load_demonstrations
from hocket.extras.stages.driver import Stage, Unit
from hocket.trainer.batching import TrainBatch
from hocket.trainer.objective import Objective
from hocket.trainer.trainer import Trainer
from hocket.types import Metrics, TrainSample


@STAGES.register("sft")
class Sft(Stage):
    """The stage, which has no keys beside those of all stages (docs/how-to/sft_dpo.md)."""

    rows = "demonstrations"
    rate = "demonstrations mostly take 1e-5 or more"

    def objective(self, model: ModelConfig) -> Objective:
        return Objective(loss=sft_loss)

    def load(self, data: DataConfig, tokenizer: Any, longest: int) -> list[Unit]:
        sequences = load_demonstrations(data, tokenizer, longest)
        return [(pairs.sample(sequence),) for sequence in sequences]

    def held_out(self, trainer: Trainer, samples: Sequence[TrainSample]) -> Metrics:
        num_tokens = sum(sample.sequence.mask.count(True) for sample in samples)
        logprobs = itertools.chain.from_iterable(trainer.logprobs(samples))
        return {"eval/loss": -math.fsum(logprobs) / num_tokens}


def sft_loss(logprobs_bt: Tensor, entropy_bt: Tensor, batch: TrainBatch) -> LossOutput:
    """Compute the batch's share of the mean cross-entropy, in nats: −Σ mask · logprobs / tokens."""
    del entropy_bt
    loss = -logprobs_bt.where(batch.mask_bt, 0.0).sum() / batch.num_tokens_global
    return LossOutput(loss=loss, metrics={})
