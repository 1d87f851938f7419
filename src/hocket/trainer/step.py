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
from hocket.trainer.flops import ModelFlops, step_flops
from hocket.trainer.ranks import Ranks


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Learner:
    """A model that steps train, with its optimizer and its loss: the policy, or a critic."""

    name: str
    engine: DeepSpeedEngine
    loss: Callable[[TrainBatch], LossOutput]  # computes a micro-batch's share of the global loss
    reads: Sequence[str] = ()  # columns of a batch that the loss reads
    rate: str = "trainer.learning_rate"  # the setting that error messages name
    metrics: Callable[["Update"], dict[str, float]] = lambda update: {}  # beside `policy_metrics`
    learns: Callable[[], bool] = lambda: True
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
    # A lower loss scale mends a gradient that overflows in float16, but no loss.
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
    shares_of_batches: list[Tensor] = []  # of each micro-batch, its shares of the totals
    totals: dict[str, float] = {}
    for index, batch in enumerate(batches):
        with torch.set_grad_enabled(learns):
            output = learner.loss(batch)
        loss = output.loss
        shares = {"loss": loss.detach()}
        shares.update(output.metrics)
        shares_of_batches.append(torch.stack([value.double() for value in shares.values()]))

        # The ranks sum their gradients in the last backward pass: what is wrong with the totals
        # must show before it.
        is_last = index == len(batches) - 1
        if is_last:
            sums = ranks.total(torch.stack(shares_of_batches).sum(dim=0).tolist())
            totals = dict(zip(shares, sums, strict=True))
            gap = totals.get("logprob_gap", 0.0)
            if gap > max_gap:
                raise SyncError(differ(gap, max_gap))
            if not math.isfinite(totals["loss"]):
                # Its gradients may be finite. Those of NaN are not, so the step is skipped.
                loss = loss * math.nan
        if learns:
            learner.engine.backward(loss, last=is_last)
    return totals


def policy_metrics(
    done: Update, batches: Sequence[TrainBatch], ranks: Ranks, model: ModelFlops, peak_flops: float
) -> dict[str, float]:
    """Name the totals of the policy's update as metrics, and count its work over all ranks.

    `batches` are this rank's; `model` counts the policy's operations; `peak_flops` is the peak of
    all ranks together, in operations per second.
    """
    metrics = {}
    for name, total in done.totals.items():
        metrics[name if "/" in name else f"train/{name}"] = total
    num_tokens = batches[0].num_tokens_global
    positions, computed, layer_flops = ranks.total(_work_of(batches, model))
    head_flops = model.per_trained_token * num_tokens
    return metrics | {
        "train/grad_norm": done.grad_norm,
        "train/skipped": float(done.outcome == "skipped"),
        "train/updates": float(done.outcome != "idle"),
        "train/tokens": float(num_tokens),
        "train/sequences": float(batches[0].num_sequences_global),
        "train/micro_batches": float(len(batches)),
        "train/positions": positions,
        # Rows that ranks divide are padded, and may compute more than the positions.
        "train/shared": max(0.0, 1 - computed / positions),
        "train/seconds_at_peak": (layer_flops + head_flops) / peak_flops,
    }


def _work_of(batches: Sequence[TrainBatch], model: ModelFlops) -> list[float]:
    """Count the work of this rank's micro-batches.

    Returns [positions of their sequences, positions that are computed, operations of the layers at
    these]. A prefix that sequences share is computed once.
    """
    positions = 0
    ends: list[int] = []
    starts: list[int] = []  # a segment has the positions from start to end of its sequence
    for batch in batches:
        if not batch.places:  # a blank keeps the ranks in step, and counts as no work
            continue
        positions += sum(batch.lengths)
        ends += batch.segments.ends
        starts += batch.segments.starts
    # Attention at these positions sees all before them: the work up to `ends` without that up to
    # `starts`.
    operations = step_flops(model, ends, 0) - step_flops(model, starts, 0)
    return [positions, sum(ends) - sum(starts), operations]
