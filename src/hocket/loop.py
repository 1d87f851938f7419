"""The whole of GRPO on one page: eight numbered lines from prompts to new weights on the server.

Rank 0 runs this loop; the other ranks follow its trainer (trainer/ranks.py). Each numbered line names the module to
read next.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from hocket.algorithm.kl import KlController
from hocket.algorithm.samples import Shaped, fate, pass_rate_metrics, shape, signal_metrics, train_samples
from hocket.checkpoints import Checkpoints
from hocket.config import Config
from hocket.data.stream import EXHAUSTED, PromptStream
from hocket.observe.console import Console
from hocket.observe.metrics import rollout_metrics, staleness_metrics, step_metrics, train_metrics
from hocket.observe.run_folder import RunFolder
from hocket.pool import ServerPool
from hocket.rewards.scorer import RewardScorer, refuse_failing
from hocket.rollout.collect import Batch, Plan, Play, collect
from hocket.rollout.evaluate import Evaluation
from hocket.rollout.pipeline import Pipeline, Replay
from hocket.sync.publish import Publisher
from hocket.sync.versions import Versions
from hocket.system import run_in_thread
from hocket.trainer.trainer import Trainer


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One training run: the parts that the loop brings together, each usable without the others.

    Attributes:
        stream: where the prompts of the batches come from; hears what became of each.
        play: plays one episode.
        plan: what to play in a step.
        replay: recorded batches in the place of new ones.
        kl: weighs a KL in the rewards.
        checkpoints: what the run can go on from; the folder's history says how far it already is.
    """

    config: Config
    trainer: Trainer
    servers: ServerPool
    stream: PromptStream
    play: Play
    scorer: RewardScorer
    plan: Callable[[int], Plan]
    replay: Replay | None = None
    evaluation: Evaluation
    versions: Versions
    publisher: Publisher
    kl: KlController
    folder: RunFolder
    console: Console
    checkpoints: Checkpoints

    async def train(self) -> dict[str, Any]:
        """Trains for `trainer.steps` steps, leaves everything in the run folder and returns summary.json's content.

        Where every prompt is retired before, the step that finds none is the last; it only saves and evaluates.
        """
        steps, max_staleness = self.config.trainer.steps, self.config.pipeline.max_staleness
        pipeline = Pipeline(
            self.new_batch, self.plan, steps=steps, max_staleness=max_staleness, progress=self.console.progress
        )
        async with self.replay or pipeline as batches:
            return await self._train(batches)

    async def _train(self, batches: Pipeline | Replay) -> dict[str, Any]:
        config = self.config
        await self.servers.wait_up()  # and up is who holds the trainer's weights: a broken hand-over shows here
        if not self.folder.history:
            self.folder.finish(0, await self._evaluate(step=0))

        for step in range(self.folder.last_step + 1, config.trainer.steps + 1):
            metrics: dict[str, float] = {}
            await self.servers.wait_up()  # who has come back is given the weights while the trainer is idle
            with timed(metrics, "time/step"):
                batch = await batches.batch(step)  # 1 prompts  data/, 2 rollouts  rollout/, 3 scores  rewards/
                last = step == config.trainer.steps or not batch.groups
                self.folder.rollouts(f"step_{step:06d}", batch.groups)  # at once: they explain whatever stops the run
                refuse_failing(batch.groups, config.rewards.max_error_rate)
                shaped = [shape(group, config.algorithm, config.rollout.max_tokens) for group in batch.groups]
                kept = [group for group in shaped if group.reason is None]
                metrics |= batch.metrics | signal_metrics(shaped) | rollout_metrics(batch.groups)
                if config.uses_pass_rates:
                    metrics |= pass_rate_metrics(batch.groups, config.pass_reward)
                if config.pipeline.replay is None:
                    bound = config.pipeline.max_staleness
                    metrics |= staleness_metrics(batch.groups, version=self.versions.current, bound=bound)
                metrics |= await self._learn(step, kept, last=last)
                if (config.eval.every_steps and step % config.eval.every_steps == 0) or last:
                    metrics |= await self._evaluate(step)
            metrics |= step_metrics(metrics)
            skipped = metrics.get("train/skipped", 0.0) > 0
            for group, after in zip(batch.groups, shaped, strict=True):
                if group.draw is not None:  # a replay draws nothing
                    outcome = fate(group, after.reason, reward=config.pass_reward, skipped=skipped)
                    self.stream.settle(group.draw, outcome)
            entries = () if config.pipeline.replay is not None else self.stream.entries()
            self.folder.finish(step, metrics, entries)  # 8 records      observe/run_folder.py
            self.checkpoints.complete(step, metrics)
            self.console.step(step, metrics)
            if not batch.groups:
                self.console.say(EXHAUSTED)
                break

        self.versions.save()
        return self.folder.summary(seed=config.trainer.seed, final_version=self.versions.current)

    async def _learn(self, step: int, groups: Sequence[Shaped], *, last: bool) -> dict[str, float]:
        """Train on the groups and publish the new weights; without a group the weights stay as they are."""
        if not groups and not self.checkpoints.due(step, last=last):
            return {}
        async with self.publisher.training(publishes=bool(groups)) as metrics:
            if groups:
                metrics |= await self._update(step, groups)
            metrics |= await run_in_thread(self.checkpoints.copy, step, last=last)
            if groups:
                with timed(metrics, "time/sync"):
                    metrics |= await self.publisher.publish()  # 7 weights      sync/publish.py
        return metrics

    async def _update(self, step: int, groups: Sequence[Shaped]) -> dict[str, float]:
        """Take the optimiser step of the groups."""
        metrics: dict[str, float] = {}
        self.console.progress(step, "training")
        with timed(metrics, "time/measure"):
            sequences = [one for group in groups for rollout in group.rollouts for one in rollout.sequences]
            measured = await run_in_thread(self.trainer.measure, sequences)
        algorithm = self.config.algorithm
        samples, shaping = train_samples(groups, measured, algorithm, self.kl.coef)  # 4 advantages   algorithm/
        self.kl.update(shaping.get("rollout/kl"), len(samples))
        keep = self.folder.skipped(step)
        stats = await run_in_thread(self.trainer.step, samples, keep=keep)  # 5 batches, 6 update      trainer/
        return metrics | shaping | train_metrics(stats)

    async def new_batch(self, plan: Plan) -> Batch:
        """Gather one batch; the pipeline calls this up to max_staleness steps ahead of training."""
        algorithm, max_tokens = self.config.algorithm, self.config.rollout.max_tokens
        return await collect(
            plan,
            self.stream.take,
            self.play,
            self.scorer.score,
            informative=lambda group: shape(group, algorithm, max_tokens).reason is None,
        )

    async def _evaluate(self, step: int) -> dict[str, float]:
        """Return the eval/* metrics of the weights that the server holds; empty without held-out prompts."""
        if not self.evaluation.datasets:
            return {}
        self.console.progress(step, "held-out evaluation")
        metrics: dict[str, float] = {}
        with timed(metrics, "time/eval"):
            measured, groups = await self.evaluation.run(f"eval {step}")
        self.folder.rollouts(f"eval_{step:06d}", groups)
        return metrics | measured


@contextmanager
def timed(metrics: dict[str, float], name: str) -> Iterator[None]:
    """Adds the wall seconds of its body to `metrics` under `name`."""
    start = time.perf_counter()
    yield
    metrics[name] = time.perf_counter() - start
