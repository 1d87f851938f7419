"""One optimiser step of one engine: forward and backward over the micro-batches, then the update.

Takes an engine, a function that gives a batch's share of the loss, and this rank's batches. Never knows which model
learns, or from what.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from hocket.algorithm.losses import LossOutput
from hocket.trainer.batching import TrainBatch
from hocket.trainer.engine import DeepSpeedEngine
from hocket.trainer.ranks import Ranks

ShareOfLoss = Callable[[TrainBatch], LossOutput]
"""Calls the engine on a batch and gives the batch's share of the global loss."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """What became of an optimiser step, the same on every rank.

    Attributes:
        totals: "loss" and the loss function's metrics, summed over all micro-batches and ranks.
        grad_norm: before clipping; None: loss or gradient was not finite, and nothing has changed.
        overflowed: it was not finite for float16's loss scale alone, which is lower now.
        gradients: names of parameters whose gradient was not finite.
    """

    totals: Mapping[str, float]
    grad_norm: float | None
    overflowed: bool = False
    gradients: tuple[str, ...] = ()

    @property
    def is_faulty(self) -> bool:
        """Whether something is wrong with weights or samples."""
        return self.grad_norm is None and not self.overflowed


def update(engine: DeepSpeedEngine, loss_of: ShareOfLoss, batches: Sequence[TrainBatch], ranks: Ranks) -> Update:
    """Takes the step. One that is not finite is run once more: a fluke is made good, anything else is looked at."""
    scale = engine.loss_scale
    totals = accumulate(engine, loss_of, batches, ranks)
    grad_norm = engine.step(rescale=math.isfinite(totals["loss"]))
    if grad_norm is not None:
        return Update(totals=totals, grad_norm=grad_norm)
    if engine.loss_scale != scale:
        return Update(totals=totals, grad_norm=None, overflowed=True)
    totals = accumulate(engine, loss_of, batches, ranks)
    gradients = tuple(engine.broken_gradients())  # costly, and gone after the step
    return Update(totals=totals, grad_norm=engine.step(rescale=False), gradients=gradients)


def accumulate(
    engine: DeepSpeedEngine, loss_of: ShareOfLoss, batches: Sequence[TrainBatch], ranks: Ranks, *, learn: bool = True
) -> dict[str, float]:
    """Runs this rank's micro-batches, leaves their gradient in the engine and returns `Update.totals`.

    Args:
        learn: false: only measures.
    """
    shares: list[Tensor] = []
    totals: dict[str, float] = {}
    for index, batch in enumerate(batches):
        with torch.set_grad_enabled(learn):
            output = loss_of(batch.to(ranks.device))
        share = {"loss": output.loss.detach(), **output.metrics}
        shares.append(torch.stack([value.double() for value in share.values()]))
        loss = output.loss
        last = index == len(batches) - 1
        if last:
            sums = ranks.sum(torch.stack(shares).sum(dim=0).tolist())
            totals = dict(zip(share, sums, strict=True))
            if not math.isfinite(totals["loss"]):
                loss = loss * math.nan  # a loss of inf can have finite gradients; this way the step is skipped
        if learn:
            engine.backward(loss, last=last)
    return totals
