"""Take one optimiser step, an update: forward and backward over micro-batches, then new weights."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from hocket.algorithm.losses import LossOutput
from hocket.errors import SyncError, differ
from hocket.trainer.batching import TrainBatch
from hocket.trainer.engine import DeepSpeedEngine
from hocket.trainer.ranks import Ranks


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Learner:
    """A model with its optimizer and its loss: the policy, or a critic."""

    name: str
    engine: DeepSpeedEngine
    loss: Callable[[TrainBatch], LossOutput]  # this batch's share of the step's
    reads: Sequence[str] = ()  # columns of a batch that the loss reads
    rate: str = "trainer.learning_rate"  # its setting
    metrics: Callable[["Update"], dict[str, float]] = lambda done: {}  # beside the policy's
    learns: Callable[[], bool] = lambda: (
        True
    )  # False: only compute the loss, as during critic.warmup_steps


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """One optimiser step of a learner, the same on every rank."""

    learner: Learner
    totals: Mapping[str, float]  # "loss" and its metrics, summed over micro-batches and ranks
    outcome: Literal[
        "updated", "skipped", "idle"
    ]  # skipped: not finite; idle: the learner does not learn yet
    grad_norm: float = math.nan  # before clipping; nan if skipped
    is_faulty: bool = False  # not finite twice, and not for float16's loss scale
    bad_gradients: Sequence[str] = ()  # parameters


def update(learner: Learner, batches: Sequence[TrainBatch], ranks: Ranks, max_gap: float) -> Update:
    """Take one optimiser step; retry a non-finite one once, then skip it. Raise as `accumulate`."""
    engine = learner.engine
    loss_scale = engine.loss_scale
    totals = accumulate(learner, batches, ranks, max_gap)
    if not learner.learns():
        return Update(learner=learner, totals=totals, outcome="idle", grad_norm=0.0)
    grad_norm = engine.step(rescale=math.isfinite(totals["loss"]))
    is_faulty = grad_norm is None and engine.loss_scale == loss_scale
    bad_gradients: Sequence[str] = ()
    if is_faulty:  # try again: errors of the hardware rarely repeat
        totals = accumulate(learner, batches, ranks, max_gap)
        bad_gradients = (
            engine.broken_gradients()
        )  # read before the step, which clears the gradients
        grad_norm = engine.step(rescale=False)
    if grad_norm is not None:
        return Update(learner=learner, totals=totals, outcome="updated", grad_norm=grad_norm)
    return Update(
        learner=learner,
        totals=totals,
        outcome="skipped",
        is_faulty=is_faulty,
        bad_gradients=bad_gradients,
    )


def accumulate(
    learner: Learner, batches: Sequence[TrainBatch], ranks: Ranks, max_gap: float
) -> dict[str, float]:
    """Leave this rank's gradients in the engine, if it learns; return `Update.totals`. SyncError beyond `max_gap`."""
    learns = learner.learns()
    shares: list[Tensor] = []
    totals: dict[str, float] = {}
    for index, batch in enumerate(batches):
        with torch.set_grad_enabled(learns):
            output = learner.loss(batch)
        loss = output.loss
        share = {"loss": output.loss.detach(), **output.metrics}
        shares.append(torch.stack([value.double() for value in share.values()]))
        last = index == len(batches) - 1
        if last:
            totals = dict(
                zip(share, ranks.total(torch.stack(shares).sum(dim=0).tolist()), strict=True)
            )
            if totals.get("logprob_gap", 0.0) > max_gap:
                raise SyncError(differ(totals["logprob_gap"], max_gap))
            if not math.isfinite(totals["loss"]):
                loss = (
                    loss * math.nan
                )  # an infinite loss may have finite gradients; NaN ones skip the step
        if learns:
            learner.engine.backward(loss, last=last)
    return totals
