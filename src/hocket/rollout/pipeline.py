"""One batch of scored groups after another, each begun as early as the bound on staleness allows.

Step s trains on batch s with weights that have taken s - 1 steps, so batch s may begin once s - 1 - max_staleness of
them are taken. That alone bounds how old rollouts get: what is slow is waited for, never thrown away, which would
favour short answers. A batch is the next prompts of the stream, whoever is fast. Knows nothing of losses and weights.
"""

import asyncio
import dataclasses
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Self

from hocket.config import Config
from hocket.data import PromptStream
from hocket.rollout.coalescer import Generator
from hocket.rollout.collect import Scorer, in_order, play, sampling_params
from hocket.rollout.played import Player, Wave
from hocket.types import Group, Prompt

MAX_WAVES = 8
"""Requests for prompts of one batch at the same time: replacements that come one by one go together."""


@dataclasses.dataclass(slots=True)
class Batch:
    """What one step trains on.

    Attributes:
        metrics: how long the step has waited for it, and what else was going on.
        end: when it must have been generated, by time.monotonic.
        started, generated: when it began and when its last token was sampled, by time.perf_counter.
    """

    draws: dict[int, Prompt] = dataclasses.field(default_factory=dict)
    groups: list[Group] = dataclasses.field(default_factory=list)
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    end: float = math.inf
    started: float = dataclasses.field(default_factory=time.perf_counter)
    generated: float = 0.0


class Pipeline:
    """Plays the batches of a run. Use it inside one event loop, and as `async with`: leaving it ends what is played.

    Args:
        config: its rollout, pipeline and trainer sections, and algorithm.oversampling, are used.
        stream: where prompts come from.
        server: generates.
        scorer: scores each rollout as soon as its episode is over.
        informative: whether a group teaches anything; the place of one that does not is taken by the next prompt.
        episodes: how they are played; None: in a single turn.
        progress: told (step, what) while `batch` waits.
    """

    def __init__(
        self,
        config: Config,
        stream: PromptStream,
        *,
        server: Generator,
        scorer: Scorer,
        informative: Callable[[Group], bool],
        episodes: Player | None = None,
        progress: Callable[[int, str], None] = lambda step, what: None,
    ) -> None:
        self._config = config
        self._stream = stream
        self._server = server
        self._scorer = scorer
        self._informative = informative
        self._episodes = episodes
        self._progress = progress
        self._batches: dict[int, Batch] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._came: float | None = None
        self._finished = 0.0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def batch(self, step: int) -> Batch:
        """Returns the batch of a step once it is complete. Call it when the weights of the step before are published.

        It is smaller, or empty, where the stream has no more prompts.

        Raises:
            ServerError: generation failed; neither environments nor scoring raise.
        """
        start = time.perf_counter()
        metrics = {"pipeline/queued_groups": float(sum(len(batch.groups) for batch in self._batches.values()))}
        if self._came is not None:
            busy = any(not task.done() for task in self._tasks.values())
            idle_s = 0.0 if busy else start - max(self._finished, self._came)
            metrics["pipeline/wait_for_policy"] = idle_s / (start - self._came)
        self._came = start
        for due in range(step, min(step + self._config.pipeline.max_staleness, self._config.trainer.steps) + 1):
            if due not in self._batches:
                self._batches[due] = Batch(end=time.monotonic() + deadline_s(self._config))
                self._tasks[due] = asyncio.create_task(self._collect(due))
        self._progress(step, "generating")
        await self._tasks[step]
        batch = self._batches.pop(step)
        del self._tasks[step]
        generate_s = max(0.0, batch.generated - start)
        metrics |= {"time/generate": generate_s, "time/reward": time.perf_counter() - start - generate_s}
        if batch.groups:
            metrics["time/batch"] = batch.generated - batch.started
        if self._config.algorithm.oversampling > 1:
            metrics["rollout/oversampling"] = len(batch.draws) / self._config.rollout.prompts_per_step
        batch.metrics = metrics
        return batch

    async def _collect(self, step: int) -> None:
        """Plays the prompts of one batch, and others in the place of those whose groups teach nothing, within a bound.

        Which prompts these are depends, while no other batch draws, on what each of them gave alone: they are the first
        of the stream that are enough.
        """
        wanted = self._config.rollout.prompts_per_step
        most = int(wanted * self._config.algorithm.oversampling)
        batch = self._batches[step]
        waves: dict[asyncio.Task[Group | None], AsyncIterator[Group]] = {}
        lacking = wanted
        try:
            while True:
                number = min(lacking, most - len(batch.draws))
                if number and len(waves) < MAX_WAVES:
                    lacking -= number
                    if draws := self._stream.take(number):
                        wave = self._play(step, batch, draws)
                        waves[asyncio.create_task(_next(wave))] = wave
                if not waves:
                    break
                done, _ = await asyncio.wait(waves, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    wave = waves.pop(task)
                    if (group := task.result()) is None:
                        continue
                    waves[asyncio.create_task(_next(wave))] = wave
                    batch.groups.append(group)
                    lacking += not self._informative(group)
                    if step == min(self._batches):
                        self._progress(step, f"{len(batch.groups)}/{len(batch.draws)} groups scored")
        finally:
            for task in waves:
                task.cancel()
            await asyncio.gather(*waves, return_exceptions=True)
        groups = zip(in_order(batch.groups), batch.draws, strict=True)
        batch.groups = [dataclasses.replace(group, draw=draw) for group, draw in groups]
        self._finished = time.perf_counter()

    def _play(self, step: int, batch: Batch, draws: Mapping[int, Prompt]) -> AsyncIterator[Group]:
        """Begins to play more prompts for a batch."""
        rollout, first = self._config.rollout, len(batch.draws)
        batch.draws |= draws

        def generated() -> None:
            batch.generated = time.perf_counter()

        wave = Wave(
            prompts=list(draws.values()),
            sampling=sampling_params(rollout, seed=self._config.trainer.seed, step=step),
            group_size=rollout.group_size,
            label=f"step {step}",
            timeout_s=max(0.0, batch.end - time.monotonic()),
            first=first,
        )
        return play(wave, server=self._server, scorer=self._scorer, on_generated=generated, episodes=self._episodes)


def deadline_s(config: Config) -> float:
    """Returns the seconds within which a batch, or an evaluation, must be generated: so many share the servers."""
    return config.rollout.timeout_s * (1 + config.pipeline.max_staleness)


async def _next(wave: AsyncIterator[Group]) -> Group | None:
    return await anext(wave, None)
