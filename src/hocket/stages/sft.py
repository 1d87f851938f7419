"""Supervised fine-tuning: the cross-entropy of what the assistant said in demonstrations."""

import itertools
import math
from collections.abc import Sequence

from torch import Tensor

from hocket.algorithm.losses import LossOutput
from hocket.config import Config, DataConfig
from hocket.data import tokenizer as tokenizers
from hocket.data.demonstrations import load_demonstrations
from hocket.stages import STAGES
from hocket.stages.driver import Row, Stage
from hocket.trainer.batching import TrainBatch
from hocket.trainer.models import Objective
from hocket.trainer.trainer import Trainer
from hocket.types import TrainSample


@STAGES.register("sft")
def sft(config: Config) -> Stage:
    model = config.model

    def load(data: DataConfig) -> list[Row]:
        sequences = load_demonstrations(data, tokenizers.load(model.path), tokenizers.context_length(model))
        return [(TrainSample(sequence=one, advantages=(0.0,) * len(one.mask)),) for one in sequences]

    return Stage(
        settings=config.sft,
        rows="demonstrations",
        first="the first one, with what is taught in [[ ]]",
        rate="demonstrations mostly take 1e-5 or more",
        objective=Objective(loss=sft_loss),
        load=load,
        held_out=held_out_loss,
    )


def held_out_loss(trainer: Trainer, samples: Sequence[TrainSample]) -> dict[str, float]:
    num_tokens = sum(sample.sequence.mask.count(True) for sample in samples)
    return {"eval/loss": -math.fsum(itertools.chain(*trainer.logprobs(samples))) / num_tokens}


def sft_loss(logprobs_bt: Tensor, entropy_bt: Tensor, batch: TrainBatch) -> LossOutput:
    """Return −Σ mask · logprobs / tokens: the batch's share of the mean cross-entropy, in nats."""
    del entropy_bt
    return LossOutput(loss=-logprobs_bt.where(batch.mask_bt, 0.0).sum() / batch.num_tokens_global, metrics={})
