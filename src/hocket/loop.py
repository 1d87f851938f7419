"""The whole of GRPO on one page: eight numbered lines from prompts to new weights on the server.

Rank 0 runs this loop; the other ranks follow its trainer (trainer/ranks.py). Each numbered line names the module to
read next.
"""

import dataclasses
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from hocket.algorithm.kl import KlController
from hocket.algorithm.samples import informative, train_samples
from hocket.checkpoints import Checkpoints
from hocket.config import Config
from hocket.data import PromptStream
from hocket.observe.console import Console
from hocket.observe.metrics import rollout_metrics, step_metrics, train_metrics
from hocket.observe.recorder import Recorder
from hocket.pool import ServerPool
from hocket.rewards import RewardScorer
from hocket.rollout.collect import in_order, play, refuse_failing, sampling_params
from hocket.rollout.episodes import Episodes
from hocket.rollout.evaluate import evaluate
from hocket.sync.base import WeightSync
from hocket.sync.turns import Turns
from hocket.trainer.trainer import Trainer
from hocket.types import Group, Prompt


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One training run: the parts that the loop brings together, each usable without the others.

    Attributes:
        prompts: endless, seeded prompts to train on.
        held_out: prompts of the evaluation; none: no evaluation.
        scorer: rewards of the training rollouts.
        judge: the one reward whose mean over held-out prompts is the accuracy.
        kl: weighs a KL in the rewards.
        episodes: how episodes of several turns are played; None: the model answers once.
        turns: where server and trainer share a GPU; publishing ends the trainer's turn.
        checkpoints: what the run can go on from; the recorder's history says how far it already is.
    """

    config: Config
    trainer: Trainer
    servers: ServerPool
    prompts: PromptStream
    held_out: Sequence[Prompt]
    scorer: RewardScorer
    judge: RewardScorer
    sync: WeightSync
    kl: KlController
    recorder: Recorder
    console: Console
    episodes: Episodes | None = None
    turns: Turns | None = None
    checkpoints: Checkpoints

    async def train(self) -> dict[str, Any]:
        """Trains for `trainer.steps` steps, leaves everything in the run folder and returns summary.json's content."""
        config, sync = self.config, self.sync
        await self.servers.wait_up()  # and up is who holds the trainer's weights: a broken hand-over shows here
        if not (history := self.recorder.history()):
            self.recorder.metrics(0, await self._evaluate(step=0))
            history = self.recorder.history()
        before, after = history[0], next((record for record in history[::-1] if "eval/accuracy" in record), {})
        start = time.perf_counter() - sum(record.get("time/step", 0.0) for record in history)

        for step in range(int(history[-1]["step"]) + 1, config.trainer.steps + 1):
            metrics: dict[str, float] = {}
            self.trainer.beat()  # a step without anything to learn has no other work for the other ranks
            with timed(metrics, "time/step"):
                prompts = self.prompts.take(config.rollout.prompts_per_step)  # 1 prompts      data/
                groups = await self._play(step, prompts, metrics)  # 2 rollouts   rollout/, envs/, 3 scores   rewards/
                kept, signal = informative(groups, config)
                metrics |= rollout_metrics(groups, version=sync.version) | signal
                if kept:
                    metrics |= await self._learn(step, kept)
                elif self.turns is None:  # else the trainer is off the GPU
                    metrics |= self.checkpoints.copy(step)
                if (config.eval.every_steps and step % config.eval.every_steps == 0) or step == config.trainer.steps:
                    after = await self._evaluate(step)
                    metrics |= after
            metrics |= step_metrics(metrics)
            self.recorder.metrics(step, metrics)  # 8 records      observe/
            self.checkpoints.complete(step, metrics)
            self.console.step(step, metrics)

        sync.save()
        return self.recorder.summary(
            before=before.get("eval/accuracy"),
            after=after.get("eval/accuracy"),
            steps=config.trainer.steps,
            train_seconds=time.perf_counter() - start,
            seed=config.trainer.seed,
            final_version=sync.version,
        )

    async def _learn(self, step: int, groups: Sequence[Group]) -> dict[str, float]:
        """Trains on the groups, publishes the new weights and returns what was measured on the way."""
        metrics: dict[str, float] = {}
        self.console.progress(step, "training")
        if self.turns is not None:
            metrics |= await self.turns.trainer()  # the server makes room     sync/turns.py
        with timed(metrics, "time/measure"):
            measured = self.trainer.measure([rollout for group in groups for rollout in group.rollouts])
        samples, shaping = train_samples(groups, measured, self.config, self.kl.coef)  # 4 advantages   algorithm/
        self.kl.update(shaping.get("rollout/kl"), len(samples))
        stats = self.trainer.step(samples, keep=self.recorder.skipped(step))  # 5 batches, 6 update      trainer/
        metrics |= shaping | train_metrics(stats) | self.checkpoints.copy(step)
        with timed(metrics, "time/sync"):
            metrics |= await self.sync.publish()  # 7 weights      sync/
        return metrics

    async def _play(self, step: int, prompts: Sequence[Prompt], metrics: dict[str, float]) -> list[Group]:
        """Returns the scored groups of one step, in the order of their prompts; times generation and what follows."""
        rollout = self.config.rollout
        groups: list[Group] = []
        start = time.perf_counter()

        def generated() -> None:
            metrics["time/generate"] = time.perf_counter() - start

        self.console.progress(step, "generating")
        async for group in play(
            prompts,
            server=self.servers,
            scorer=self.scorer,
            sampling=sampling_params(rollout, seed=self.config.trainer.seed, step=step),
            group_size=rollout.group_size,
            label=f"step {step}",
            timeout_s=rollout.timeout_s,
            on_generated=generated,
            episodes=self.episodes,
        ):
            groups.append(group)
            self.console.progress(step, f"{len(groups)}/{len(prompts)} groups scored")
        metrics["time/reward"] = time.perf_counter() - start - metrics["time/generate"]
        groups = in_order(groups)
        self.recorder.rollouts(f"step_{step:06d}", groups)  # at once: they explain whatever stops the run
        refuse_failing(groups, self.config.rewards.max_error_rate)
        return groups

    async def _evaluate(self, step: int) -> dict[str, float]:
        """Returns the eval/* metrics of the weights that the server holds; empty without held-out prompts."""
        if not self.held_out:
            return {}
        self.console.progress(step, "held-out evaluation")
        self.trainer.beat()
        metrics: dict[str, float] = {}
        with timed(metrics, "time/eval"):
            measured, groups = await evaluate(
                self.held_out,
                server=self.servers,
                scorer=self.judge,
                config=self.config,
                label=f"eval {step}",
                episodes=self.episodes,
            )
        self.recorder.rollouts(f"eval_{step:06d}", groups)
        return metrics | measured


@contextmanager
def timed(metrics: dict[str, float], name: str) -> Iterator[None]:
    """Adds the wall seconds of its body to `metrics` under `name`."""
    start = time.perf_counter()
    yield
    metrics[name] = time.perf_counter() - start
