"""Keep batches under way, each begun as early as the bound on staleness allows.

Step s trains on batch s with weights that have taken s - 1 steps. Batch s begins once
s - 1 - max_staleness of these steps are taken. That alone bounds how old rollouts get; slow ones
are waited for.
"""

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from decimal import Decimal
from typing import Protocol

from hocket.client.pool import Deadline
from hocket.common.tasks import cancel, note, seed_of
from hocket.config import RolloutConfig
from hocket.observe.metrics import staleness_metrics
from hocket.protocol import SamplingParams
from hocket.rollout.collect import Batch, Plan

NewBatch = Callable[[Plan], Awaitable[Batch]]
"""Gathers the batch of a plan."""


class BatchSource(Protocol):
    """Gives the batches that a run trains on."""

    def begin_early(self, step: int) -> None:
        """Begin a step's batch while the step before is still evaluated, if that is allowed."""

    async def batch(self, step: int, *, version: int | None = None) -> Batch:
        """Return a step's batch, empty at the stream's end."""


Batches = Callable[[NewBatch], AbstractAsyncContextManager[BatchSource]]
"""Opens a source of batches for a run."""
PROGRESS_S = 0.2  # seconds between reports of a batch's progress


def sampling_params(
    config: RolloutConfig, *, seed: int, step: int, temperature: float | None = None
) -> SamplingParams:
    """Return a step's sampling parameters; (seed, step) alone decide its random numbers."""
    return SamplingParams(
        temperature=config.temperature if temperature is None else temperature,
        max_tokens=config.max_tokens,
        stop=config.stop,
        seed=seed_of(seed, step),
    )


def plan_step(
    step: int, config: RolloutConfig, *, seed: int, oversampling: float, max_staleness: int
) -> Plan:
    """Plan a step's batch, whose time begins now."""
    # As decimals, because in binary 100 * 1.15 is 114.99...
    at_most = int(config.prompts_per_step * Decimal(str(oversampling)))
    # Up to 1 + max_staleness batches share the servers.
    timeout_s = config.timeout_s * (1 + max_staleness)
    return Plan(
        label=f"step {step}",
        sampling=sampling_params(config, seed=seed, step=step),
        group_size=config.group_size,
        wanted=config.prompts_per_step,
        at_most=at_most,
        deadline=Deadline(timeout_s),
    )


@dataclasses.dataclass
class Pipeline(AbstractAsyncContextManager["Pipeline"]):
    """Gathers a run's batches. Use it by `async with`."""

    new_batch: NewBatch
    plan: Callable[[int], Plan]  # plans the batch of a step
    _: dataclasses.KW_ONLY
    steps: int  # number of the run's steps
    max_staleness: int
    # Whether a batch may begin while an evaluation waits for its last rewards. The trainer must
    # not need the servers' GPU then.
    early: bool = True
    progress: Callable[[int, str], None] = lambda step, line: None  # shows why a step waits

    def __post_init__(self) -> None:
        # The batches under way, by step. All times below are by time.perf_counter.
        self._begun: dict[int, tuple[Plan, asyncio.Task[None]]] = {}
        self._last_call: float | None = None  # time of the last call of `batch`
        self._finished = 0.0  # time at which a batch was last complete
        self._counted = 0.0  # time up to which `_idle_s` was counted
        self._idle_s = 0.0  # seconds without a batch under way since the last call of `batch`

    async def __aexit__(self, *exc_info: object) -> None:
        await cancel([task for _, task in self._begun.values()])

    async def batch(self, step: int, *, version: int | None = None) -> Batch:
        """Return a step's batch, empty at the stream's end, with its metrics.

        version: the weight version of the step before, which has been published. Raise ServerError
        if the servers failed before the batch's deadline, and RewardError if rewards failed again
        and again.
        """
        start = time.perf_counter()
        queued = sum(len(plan.batch.groups) for plan, _ in self._begun.values())
        metrics = {"pipeline/queued_groups": float(queued)}

        # This batch and, up to the bound, the next ones may begin now.
        self._begin(step, start)
        if self._last_call is not None:
            metrics["pipeline/wait_for_policy"] = self._idle_s / (start - self._last_call)
        self._last_call = start
        self._idle_s = 0.0

        plan, task = self._begun[step]
        batch = plan.batch
        while not task.done():
            scored = f"{len(batch.groups)}/{batch.num_drawn} groups scored"
            self.progress(step, f"generating, {scored}")
            await asyncio.wait({task}, timeout=PROGRESS_S)
        task.result()  # raises what the task raised
        del self._begun[step]

        # A batch that was complete before `start` took no time of this step.
        generated = max(start, batch.generated)
        metrics["time/generate"] = note("time/generate", start, generated)
        metrics["time/reward"] = note("time/reward", generated)
        if batch.groups:
            metrics["time/batch"] = note("time/batch", batch.started, batch.generated, "rollouts")
        if plan.at_most > plan.wanted:
            metrics["rollout/oversampling"] = batch.num_drawn / plan.wanted
        if version is not None:
            metrics |= staleness_metrics(batch.groups, version=version, bound=self.max_staleness)
        batch.metrics = metrics
        return batch

    def begin_early(self, step: int) -> None:
        """Begin the batches that `batch` would, as their weights are on the servers already."""
        if self.early:
            self._begin(step, time.perf_counter())

    def _begin(self, step: int, now: float) -> None:
        """Begin the batches that may begin once `step` has, and count the time without any."""
        if all(task.done() for _, task in self._begun.values()):
            self._idle_s += now - max(self._finished, self._counted)
        self._counted = now
        for due in range(step, min(step + self.max_staleness, self.steps) + 1):
            if due not in self._begun:
                plan = self.plan(due)
                self._begun[due] = plan, asyncio.create_task(self._gather(plan))

    async def _gather(self, plan: Plan) -> None:
        await self.new_batch(plan)
        self._finished = time.perf_counter()
