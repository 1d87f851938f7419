"""Keep batches under way, each begun as early as the bound on staleness allows.

Step s trains on batch s with weights that have taken s - 1 steps: batch s begins once s - 1 - max_staleness of them
are taken. That alone bounds how old rollouts get; slow ones are waited for.
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
from hocket.observe.metrics import rollout_metrics, staleness_metrics
from hocket.protocol import SamplingParams
from hocket.rollout.collect import Batch, Plan

NewBatch = Callable[[Plan], Awaitable[Batch]]
"""Gathers a plan's batch."""


class BatchSource(Protocol):
    """Gives the batches that a run trains on."""

    def begin_early(self, step: int) -> None:
        """Begin a step's batch while the step before is still evaluated, where that may be."""

    async def batch(self, step: int, *, version: int | None = None) -> Batch:
        """Return a step's batch, empty at the stream's end."""


Batches = Callable[[NewBatch], AbstractAsyncContextManager[BatchSource]]
"""Opens a source of batches for a run."""
PROGRESS_S = 0.2


def sampling_params(
    config: RolloutConfig, *, seed: int, step: int, temperature: float | None = None
) -> SamplingParams:
    """Return a step's sampling; (seed, step) alone decide its random numbers."""
    return SamplingParams(
        temperature=config.temperature if temperature is None else temperature,
        max_tokens=config.max_tokens,
        stop=config.stop,
        seed=seed_of(seed, step),
    )


def plan_step(
    step: int, config: RolloutConfig, *, seed: int, oversampling: float, max_staleness: int
) -> Plan:
    """Return the plan of a step's batch, whose time begins now."""
    return Plan(
        label=f"step {step}",
        sampling=sampling_params(config, seed=seed, step=step),
        group_size=config.group_size,
        wanted=config.prompts_per_step,
        at_most=int(
            config.prompts_per_step * Decimal(str(oversampling))
        ),  # 100 * 1.15 is 114.99... in binary
        deadline=Deadline(
            config.timeout_s * (1 + max_staleness)
        ),  # these batches share the servers
    )


@dataclasses.dataclass
class Pipeline(AbstractAsyncContextManager["Pipeline"]):
    """Gathers a run's batches. Use it by `async with`."""

    new_batch: NewBatch
    plan: Callable[[int], Plan]  # of a step
    _: dataclasses.KW_ONLY
    steps: int
    max_staleness: int
    early: bool = True  # while an evaluation waits for its last rewards; the trainer must not need the servers' GPU
    progress: Callable[[int, str], None] = lambda step, what: None  # what a step waits for

    def __post_init__(self) -> None:
        self._begun: dict[int, tuple[Plan, asyncio.Task[None]]] = {}
        self._asked: float | None = None
        self._finished = self._looked = self._idle_s = 0.0

    async def __aexit__(self, *exc_info: object) -> None:
        await cancel([task for _, task in self._begun.values()])

    async def batch(self, step: int, *, version: int | None = None) -> Batch:
        """Return a step's batch, empty at the stream's end, once `version` of the step before is published."""
        start = time.perf_counter()
        metrics = {
            "pipeline/queued_groups": float(
                sum(len(plan.batch.groups) for plan, _ in self._begun.values())
            )
        }
        self._begin(step, start)
        if self._asked is not None:
            metrics["pipeline/wait_for_policy"] = self._idle_s / (start - self._asked)
        self._asked = start
        self._idle_s = 0.0
        plan, task = self._begun[step]
        while not task.done():
            self.progress(
                step, f"generating, {len(plan.batch.groups)}/{plan.batch.num_drawn} groups scored"
            )
            await asyncio.wait({task}, timeout=PROGRESS_S)
        task.result()
        del self._begun[step]
        batch = plan.batch
        generated = max(start, batch.generated)
        metrics["time/generate"] = note("time/generate", start, generated)
        metrics["time/reward"] = note("time/reward", generated)
        if batch.groups:
            metrics["time/batch"] = note("time/batch", batch.started, batch.generated, "rollouts")
        if plan.at_most > plan.wanted:
            metrics["rollout/oversampling"] = batch.num_drawn / plan.wanted
        if version is not None:
            metrics |= staleness_metrics(batch.groups, version=version, bound=self.max_staleness)
        batch.metrics = metrics | rollout_metrics(batch.groups)
        return batch

    def begin_early(self, step: int) -> None:
        """Begin what `batch` would, as the weights for it are on the servers."""
        if self.early:
            self._begin(step, time.perf_counter())

    def _begin(self, step: int, now: float) -> None:
        if all(task.done() for _, task in self._begun.values()):
            self._idle_s += now - max(self._finished, self._looked)
        self._looked = now
        for due in range(step, min(step + self.max_staleness, self.steps) + 1):
            if due not in self._begun:
                plan = self.plan(due)
                self._begun[due] = plan, asyncio.create_task(self._gather(plan))

    async def _gather(self, plan: Plan) -> None:
        await self.new_batch(plan)
        self._finished = time.perf_counter()
