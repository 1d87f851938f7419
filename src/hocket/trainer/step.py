"""Take one optimizer step, an update: forward and backward over micro-batches, then new weights."""

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


def _no_metrics(update: "Update") -> dict[str, float]:
    return {}


def _always() -> bool:
    return True


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Learner:
    """A model that steps train, with its optimizer and its loss: the policy, or a critic."""

    name: str
    engine: DeepSpeedEngine
    loss: Callable[[TrainBatch], LossOutput]  # computes a micro-batch's share of the global loss
    reads: Sequence[str] = ()  # columns of a batch that the loss reads
    rate: str = "trainer.learning_rate"  # the setting that error messages name
    metrics: Callable[["Update"], dict[str, float]] = _no_metrics  # added to the policy's metrics
    learns: Callable[[], bool] = _always
    """Whether the next step updates the model, or only computes its loss.

    False for the policy during critic.warmup_steps.
    """


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """One optimizer step of a learner, the same on every rank."""

    learner: Learner
    totals: Mapping[str, float]  # "loss" and its metrics, summed over micro-batches and ranks
    outcome: Literal["updated", "skipped", "idle"]
    """skipped: the gradient was not finite; idle: the learner does not learn yet."""
    grad_norm: float = math.nan  # before clipping; NaN if the step was skipped
    is_faulty: bool = False  # not finite twice, and float16's loss scale was not the cause
    bad_gradients: Sequence[str] = ()  # names of the parameters whose gradient was not finite


def update(learner: Learner, batches: Sequence[TrainBatch], ranks: Ranks, max_gap: float) -> Update:
    """Take one optimizer step; retry one that is not finite once, then skip it.

    Raises SyncError as `accumulate` does.
    """
    engine = learner.engine
    loss_scale = engine.loss_scale
    totals = accumulate(learner, batches, ranks, max_gap)
    if not learner.learns():
        return Update(learner=learner, totals=totals, outcome="idle", grad_norm=0.0)
    grad_norm = engine.step(rescale=math.isfinite(totals["loss"]))

    # A lowered loss scale explains a skipped float16 step. Any other one is tried again, as errors
    # of the hardware rarely repeat.
    is_faulty = grad_norm is None and engine.loss_scale == loss_scale
    bad_gradients: Sequence[str] = ()
    if is_faulty:
        totals = accumulate(learner, batches, ranks, max_gap)
        bad_gradients = engine.broken_gradients()  # read now: the step clears the gradients
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
    """Compute the loss of all micro-batches and, if the model learns, add up its gradients.

    The engine keeps this rank's gradients. Returns `Update.totals`. Raises SyncError where the mean
    difference between the log-probs of trainer and servers exceeds `max_gap`.
    """
    learns = learner.learns()
    rows: list[Tensor] = []  # of each micro-batch, its shares of the totals
    totals: dict[str, float] = {}
    for index, batch in enumerate(batches):
        with torch.set_grad_enabled(learns):
            output = learner.loss(batch)
        loss = output.loss
        shares = {"loss": loss.detach()}
        shares.update(output.metrics)
        rows.append(torch.stack([value.double() for value in shares.values()]))

        # The totals are known before the last backward pass: in that the ranks sum their gradients,
        # and an infinite loss may have finite ones. A NaN in the loss has the step skipped.
        is_last = index == len(batches) - 1
        if is_last:
            sums = ranks.total(torch.stack(rows).sum(dim=0).tolist())
            totals = dict(zip(shares, sums, strict=True))
            gap = totals.get("logprob_gap", 0.0)
            if gap > max_gap:
                raise SyncError(differ(gap, max_gap))
            if not math.isfinite(totals["loss"]):
                loss = loss * math.nan
        if learns:
            learner.engine.backward(loss, last=is_last)
    return totals
