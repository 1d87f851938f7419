"""One update, with an engine that notes what it is asked: what is summed, what skips it, and when it is tried again."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from hocket.algorithm.losses import LossOutput
from hocket.errors import SyncError
from hocket.trainer.step import Learner, Update, update


class Engine:
    """Has the norms that are given, one for each step; None: it was not finite."""

    def __init__(self, norms: Sequence[float | None] = (0.5,), scales: Sequence[float | None] = (None, None)) -> None:
        self._norms, self._scales = iter(norms), iter(scales)
        self.asked: list[Any] = []

    @property
    def loss_scale(self) -> float | None:
        return next(self._scales)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        loss.backward()  # type: ignore[no-untyped-call]
        self.asked.append((float(loss.detach()), last))

    def step(self, *, rescale: bool) -> float | None:
        self.asked.append(f"step, {rescale=}")
        return next(self._norms)

    def broken_gradients(self) -> list[str]:
        self.asked.append("broken_gradients")
        return ["model.norm"]


class Ranks:
    """Stands for two ranks with the same share."""

    def __init__(self) -> None:
        self.calls = 0

    def total(self, shares: Sequence[float]) -> list[float]:
        self.calls += 1
        return [2 * share for share in shares]


@dataclasses.dataclass
class World:
    """A model of one weight, 1, whose loss of a batch is the batch; of each batch the gap is 0.125, if it has one."""

    engine: Engine
    metrics: Sequence[str] = ("logprob_gap", "tokens")
    ranks: Any = dataclasses.field(default_factory=Ranks)
    learns: bool | None = None
    graphs: list[bool] = dataclasses.field(default_factory=list)

    def update(self, *batches: float, max_gap: float = math.inf) -> Update:
        weight = torch.ones((), requires_grad=True)

        def loss(batch: Any) -> LossOutput:
            found = weight * batch
            self.graphs.append(found.requires_grad)
            known = {"logprob_gap": torch.tensor(0.125), "tokens": torch.tensor(3)}
            return LossOutput(loss=found, metrics={name: known[name] for name in self.metrics})

        options: Any = {} if self.learns is None else {"learns": lambda: self.learns}
        engine: Any = self.engine
        return update(Learner(name="policy", engine=engine, loss=loss, **options), batches, self.ranks, max_gap)  # type: ignore[arg-type]


def test_an_update_sums_losses_and_metrics_over_micro_batches_and_ranks_and_steps_once() -> None:
    world = World(Engine())
    done = world.update(1.0, 2.5)
    assert done.totals == {"loss": 7.0, "logprob_gap": 0.5, "tokens": 12.0}
    assert (done.outcome, done.grad_norm, done.is_faulty, done.bad_gradients) == ("updated", 0.5, False, ())
    assert world.engine.asked == [(1.0, False), (2.5, True), "step, rescale=True"]
    assert world.ranks.calls == 1


def test_shares_are_summed_in_float64() -> None:
    # In float32, whose numbers near 2^24 are 2 apart, the ones would be lost.
    assert World(Engine()).update(2.0**24, 1.0, 1.0, 1.0).totals["loss"] == 2 * (2**24 + 3)


def test_a_learner_that_waits_computes_its_loss_without_gradients_and_does_not_step() -> None:
    world = World(Engine(), learns=False)
    done = world.update(1.0, 2.5)
    assert (done.outcome, done.grad_norm, done.totals["loss"]) == ("idle", 0.0, 7.0)
    assert world.engine.asked == []
    assert world.graphs == [False, False]


def test_a_fluke_is_tried_again_with_sums_of_its_own() -> None:
    world = World(Engine(norms=[None, 0.5]))
    done = world.update(1.0)
    assert (done.outcome, done.grad_norm, done.totals["loss"]) == ("updated", 0.5, 2.0)
    again = [(1.0, True), "broken_gradients", "step, rescale=False"]
    assert world.engine.asked == [(1.0, True), "step, rescale=True", *again]


def test_what_is_not_finite_twice_is_skipped_as_a_fault_and_names_the_gradients() -> None:
    done = World(Engine(norms=[None, None])).update(1.0)
    assert (done.outcome, done.is_faulty, done.bad_gradients) == ("skipped", True, ["model.norm"])
    assert math.isnan(done.grad_norm)


def test_an_overflow_that_lowered_the_loss_scale_is_skipped_at_once_and_is_no_fault() -> None:
    world = World(Engine(norms=[None], scales=[4096.0, 2048.0]))
    done = world.update(1.0)
    assert (done.outcome, done.is_faulty, done.bad_gradients) == ("skipped", False, ())
    assert world.engine.asked == [(1.0, True), "step, rescale=True"]


def test_a_good_step_at_a_scale_that_has_not_changed_is_none_either() -> None:
    assert World(Engine(scales=[4096.0, 4096.0])).update(1.0).outcome == "updated"


@pytest.mark.parametrize("share", [math.inf, math.nan])
def test_a_loss_that_is_not_finite_makes_the_gradient_nan_and_leaves_the_loss_scale(share: float) -> None:
    world = World(Engine(norms=[None, None]))
    assert world.update(1.0, share).is_faulty
    first, (last, is_last), step, *_ = world.engine.asked
    assert (first, is_last, step) == ((1.0, False), True, "step, rescale=False")
    assert math.isnan(last)


def test_a_gap_above_the_allowed_one_ends_the_step_before_its_last_backward_pass() -> None:
    world = World(Engine())
    assert world.update(1.0, 2.5, max_gap=0.5).outcome == "updated"  # exactly as much is allowed
    world = World(Engine())
    with pytest.raises(SyncError, match=r"0\.5"):
        world.update(1.0, 2.5, max_gap=0.499)
    assert world.engine.asked == [(1.0, False)]
    critic = World(Engine(), metrics=("tokens",))  # has none
    assert critic.update(1.0, 2.5, max_gap=0.5).outcome == "updated"
