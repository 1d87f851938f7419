"""GRPO on one page: eight numbered lines from prompts to new weights on the servers.

Rank 0 runs this loop; the other ranks follow its trainer (trainer/ranks.py). Each numbered line
names the file to read next. If a server dies, client/pool.py gives its work to the others, and
`wait_up` brings it back between two steps.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

from hocket.algorithm.samples import (
    KlController,
    ScoredGroup,
    outcome_of,
    signal_metrics,
    train_samples,
)
from hocket.client.pool import ServerPool
from hocket.common.tasks import run_in_thread, timed
from hocket.config import Config
from hocket.data.mixture import Stream
from hocket.data.stream import EXHAUSTED
from hocket.observe.console import Console
from hocket.observe.metrics import rollout_metrics, step_metrics
from hocket.observe.run_folder import RunFolder
from hocket.rewards.scorer import Scorer, refuse_failing
from hocket.rollout.collect import Batch, Plan, Play, collect
from hocket.rollout.evaluate import Evaluation
from hocket.rollout.pipeline import Batches, BatchSource
from hocket.run_part import RunPart
from hocket.sync.publish import Publisher
from hocket.trainer.checkpoints import Checkpoints
from hocket.trainer.trainer import Trainer
from hocket.types import Group, Metrics, Rollout, TokenSequence


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One training run: the parts that the loop connects, each usable without the others."""

    config: Config
    servers: ServerPool
    stream: Stream  # draws prompts, and records the outcome of each
    play: Play  # plays one episode: a single turn, several turns, or an agent
    scorer: Scorer
    # Prepares a group's rewards for training; `reason` says why it has no signal, else None.
    shape: Callable[[Group], ScoredGroup]
    batches: Batches  # opens the pipeline, which gathers batches ahead of training, or a replay
    trainer: Trainer
    kl: KlController  # coefficient of a KL in the rewards
    publisher: Publisher
    evaluation: Evaluation
    folder: RunFolder  # metrics, rollouts and ledger; its history says which step comes next
    checkpoints: Checkpoints
    console: Console
    parts: Sequence[RunPart] = ()  # what watches the run, keeps something of it, or ends it

    async def train(self) -> dict[str, Any]:
        """Train for trainer.steps steps and leave everything in the run folder.

        Returns the content of summary.json.
        """
        # A server is up once it holds the trainer's weights, so a broken sync fails here.
        await self.servers.wait_up()
        if not self.folder.history:  # a new run: step 0 is the evaluation before training
            self.record(0, await self.evaluate(0))
        async with self.batches(self.new_batch) as batches:
            for step in range(self.folder.last_step + 1, self.config.trainer.steps + 1):
                if await self.take_step(step, batches):
                    break
        self.publisher.versions.save()
        summaries = [part.summary() for part in self.parts]
        return self.folder.summary(final_version=self.publisher.versions.current, more=summaries)

    async def take_step(self, step: int, batches: BatchSource) -> bool:
        """Take one step; return whether the run ends with it."""
        metrics: Metrics = {}
        await self.servers.wait_up()  # sync servers that came back; the trainer is idle now
        with timed(metrics, "time/step"):
            batch = await batches.batch(step, version=self.publisher.versions.current)
            with timed(metrics, "time/record"):
                # Write the rollouts before anything that follows can fail.
                await run_in_thread(self.folder.rollouts, f"step_{step:06d}", batch.groups)
                metrics |= batch.metrics | rollout_metrics(batch.groups)
            refuse_failing(batch.groups, self.config.rewards.max_error_rate)
            groups = [self.shape(group) for group in batch.groups]
            # An empty batch means that no prompts are left.
            last = step == self.config.trainer.steps or not groups
            metrics |= await self.train_and_publish(step, groups, last=last)

            interval = self.config.eval.every_steps
            evaluates = last or (interval > 0 and step % interval == 0)
            if evaluates:
                # The next batch begins as soon as the servers have generated the evaluation.
                metrics |= await self.evaluate(step, lambda: batches.begin_early(step + 1))
        metrics |= step_metrics(metrics)

        # Every part is asked, as each may count the steps. A run ends with an evaluation.
        ends = False
        for part in self.parts:
            if part.ends(step, metrics):
                self.console.say(f"{type(part).__name__} ends the run after step {step}")
                ends = True
        if ends and not evaluates:
            with timed(metrics, "time/step"):
                metrics |= await self.evaluate(step)
            metrics |= step_metrics(metrics)
        self.record(step, metrics)
        if not groups:
            self.console.say(EXHAUSTED)
        return ends or last

    async def new_batch(self, plan: Plan) -> Batch:
        """Gather one batch; the pipeline calls this up to max_staleness steps ahead of training."""
        return await collect(
            plan,
            self.stream.take,  # 1 prompts  data/stream.py
            self.play,  # 2 rollouts  rollout/players.py, episode.py
            self.scorer,  # 3 scores  rewards/scorer.py
            has_signal=lambda group: self.shape(group).reason is None,
        )

    async def train_policy(
        self, step: int, groups: Sequence[ScoredGroup], max_gap: float
    ) -> Metrics:
        """Update the policy on groups with a signal. Nothing else changes the trainer's weights.

        `max_gap` is the largest train/logprob_gap with which they may be trained.
        """
        metrics: Metrics = {}
        self.console.progress(step, "training")
        sequences: list[TokenSequence] = []
        for group in groups:
            for scored in group.scored:
                sequences += scored.rollout.sequences
        # Log-probs of the reference and of the old policy, values of the critic.
        with timed(metrics, "time/measure"):
            measured = await run_in_thread(self.trainer.measure, sequences)

        # 4 advantages: of each rollout, or each token  algorithm/samples.py, advantages.py
        with timed(metrics, "time/samples"):
            samples, shaping = train_samples(groups, measured, self.config.algorithm, self.kl.coef)
            self.kl.update(shaping.get("rollout/kl"), sum(len(group.scored) for group in groups))
            for part in self.parts:
                await run_in_thread(part.samples, step, samples)

        # 5 loss, 6 update: algorithm.epochs x algorithm.minibatches times
        #                   algorithm/losses.py, trainer/step.py
        keep = self.folder.skipped(step)  # file of the samples, if an update is not finite
        trained = await run_in_thread(
            self.trainer.step, samples, number=step, keep=keep, max_gap=max_gap
        )
        return metrics | shaping | trained

    async def train_and_publish(
        self, step: int, scored_groups: Sequence[ScoredGroup], *, last: bool
    ) -> Metrics:
        """Train on the groups with a signal, and publish the new weights if there are any.

        Every prompt of the batch gets its outcome: the stream may then draw others.
        """
        trainable = [group for group in scored_groups if group.reason is None]
        metrics = signal_metrics(scored_groups, self.stream.uses_pass_rates)
        publishes = bool(trainable) and self.trainer.policy_learns
        # Within this block no server is brought up: the trainer's weights change.
        async with self.publisher.training(publishes=publishes) as gpu_metrics:
            rollouts = [scored_group.group.rollouts for scored_group in scored_groups]
            metrics |= await self.check_rollouts(rollouts, bool(trainable))
            # The lowest of these bounds is the largest train/logprob_gap that may be trained.
            bounds = [part.max_gap() for part in self.parts]
            bounds.append(self.publisher.max_gap(itertools.chain(*rollouts)))
            max_gap = min(bounds)
            if max_gap < math.inf:
                metrics["sync/max_gap"] = max_gap
            if trainable:
                metrics |= await self.train_policy(step, trainable, max_gap)
            else:
                await run_in_thread(self.trainer.end_step)  # the learning rate counts it as well
            for part in self.parts:
                metrics |= part.trained(metrics)
            metrics |= await run_in_thread(self.checkpoints.copy, step, last=last)
            if publishes:
                with timed(metrics, "time/sync"):
                    metrics |= await self.publisher.publish()  # 7 weights  sync/publish.py

        number = 0  # of a group among `trainable`, as the trainer counts them
        for scored_group in scored_groups:
            fault = None  # why the trainer left its samples out: a gradient was not finite, ...
            if scored_group.reason is None:
                fault = self.trainer.untrained.get(number)
                number += 1
            draw = scored_group.group.draw
            if draw >= 0:  # replayed rollouts were not drawn
                self.stream.settle(draw, outcome_of(scored_group, fault))
        self.folder.ledger(step, self.stream.entries())  # before the next prompts are drawn
        return metrics | gpu_metrics

    async def check_rollouts(
        self, groups: Sequence[Sequence[Rollout]], trains: bool | None
    ) -> Metrics:
        """Have the parts check a batch's rollouts before anything is learnt from them.

        `trains` is that of `RunPart.rolled_out`. What a part raises ends the run.
        """
        metrics: Metrics = {}
        for part in self.parts:
            metrics |= await part.rolled_out(groups, trains)
        return metrics

    async def evaluate(self, step: int, generated: Callable[[], None] = lambda: None) -> Metrics:
        """Measure the weights that the servers hold; return eval/* metrics.

        They are empty without held-out prompts. `generated` is called once the servers are idle.
        """
        if not self.evaluation.prompts:
            return {}
        metrics: Metrics = {}
        self.console.progress(step, "held-out evaluation")
        with timed(metrics, "time/eval"):
            measured, groups = await self.evaluation.run(f"eval {step}", generated)
            await run_in_thread(self.folder.rollouts, f"eval_{step:06d}", groups)
            self.console.progress(step, "checking the evaluation")
            # The trainer is held: parts compare these rollouts with its weights.
            async with self.publisher.training(publishes=False):
                metrics |= await self.check_rollouts([group.rollouts for group in groups], None)
                for part in self.parts:
                    metrics |= await run_in_thread(part.evaluated, step, measured)
        return metrics | measured

    def record(self, step: int, metrics: Metrics) -> None:
        """Write the step's metrics and complete its checkpoint."""
        self.folder.finish(step, metrics)  # 8 records  observe/run_folder.py
        for part in self.parts:
            part.recorded(step, metrics)
        try:
            self.checkpoints.complete(step, metrics)
        finally:  # after a Ctrl-C it raises; the step is finished all the same
            self.console.step(step, metrics)
