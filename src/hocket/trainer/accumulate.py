"""Forward and backward over the micro-batches of one optimiser step, for whichever engine learns from them."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hocket.algorithm.losses import LossOutput
from hocket.trainer.batching import TrainBatch
from hocket.trainer.engine import DeepSpeedEngine
from hocket.trainer.ranks import Ranks


def accumulate(
    engine: DeepSpeedEngine,
    loss_of: Callable[[TrainBatch], LossOutput],
    batches: Sequence[TrainBatch],
    ranks: Ranks,
    *,
    learn: bool = True,
) -> dict[str, float]:
    """Runs this rank's micro-batches and leaves their gradient in the engine.

    Args:
        loss_of: calls the engine on a batch and gives the batch's share of the global loss.
        learn: false: only measures.

    Returns:
        "loss" and the loss function's metrics, summed over all micro-batches and ranks.
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
