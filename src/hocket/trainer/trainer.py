"""The trainer: rank 0 calls its methods, and all ranks run them together."""

import contextlib
import dataclasses
import functools
import gc
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hocket.algorithm.choices import choose
from hocket.algorithm.losses import LossOutput
from hocket.algorithm.samples import is_measured
from hocket.common.machine import cpu_threads, return_freed_memory
from hocket.common.registry import load_plugins
from hocket.common.tasks import LISTENERS, Span, note, run, seed_of
from hocket.config import Config, ModelConfig
from hocket.data import tokenizer as tokenizers
from hocket.errors import ConfigError, TrainerError
from hocket.observe.metrics import over_updates
from hocket.protocol import TensorLayout, TensorSpec, manifest, nccl
from hocket.trainer import attention, batching, choices, flops, guards, memory, packing, share_gpu
from hocket.trainer.batching import PackedRow, TrainBatch
from hocket.trainer.engine import POLICY, DeepSpeedEngine, Setup, in_buckets, whole_shape
from hocket.trainer.flops import Shape
from hocket.trainer.logprobs import CHUNK_TOKENS
from hocket.trainer.objective import Measure, Objective, configured
from hocket.trainer.policy import Policy, compute_dtype
from hocket.trainer.ranks import (
    AWAY,
    PerRank,
    Ranks,
    Sink,
    Together,
    deferring,
    on_all_ranks,
)
from hocket.trainer.state import BUCKET_BYTES, SavedTensors
from hocket.trainer.step import Learner, Update, accumulate, policy_metrics, update
from hocket.types import Columns, TokenSequence, TrainSample

Rows = Sequence[PackedRow]
"""The micro-batches of one rank: each is a row, which the rank has still to build."""
EXPORT_BYTES = 64 << 20  # bytes that ZeRO-3 gathers at a time for an export
STOPPED = "stop_kl ended the step before its update"
NO_UPDATE = {  # why an update changed no weight of the policy, by its outcome
    "skipped": "its update was not finite",
    "idle": "only the critic learnt: critic.warmup_steps",
}


class Trainer(Together):
    """Trains the model, on one rank or on several together.

    Every rank makes a Trainer. Rank 0 calls its methods, from one thread at a time; the others
    `follow`. ranks.py says how.

    Example: one update, and the trained model as files.

        with Trainer(config) as trainer:
            if trainer.ranks.is_main:
                metrics = trainer.step(samples)
                trainer.export(Path("my-model"))
            else:
                trainer.follow()

    Args:
        config: the run's settings.
        objective: the loss and its columns; by default the config's algorithm decides.
        ranks: the processes that train together; by default those that this process's launcher
            started. Ranks that a caller passes stay open after the trainer is closed.
    """

    def __init__(
        self, config: Config, *, objective: Objective | None = None, ranks: Ranks | None = None
    ) -> None:
        self._config = config
        self._objective = objective or configured(config)
        owns_ranks = ranks is None
        if ranks is None:
            # The processes of this machine share its cores.
            processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
            threads = cpu_threads(config.model.path, processes=processes)
            ranks = Ranks(config.sync.collective_timeout_s, threads)
        super().__init__(ranks, owns_ranks=owns_ranks)
        self.device = self.ranks.device

        self.untrained: dict[int, str] = {}  # groups that the last step did not train → the reason
        self._skipped_in_row = 0  # steps in a row whose updates were all skipped
        self._fitted_for: int | None = None  # hash of what micro_batch_tokens=auto was measured for
        self.away: share_gpu.Offloaded = ()  # the state that is in CPU memory while a server runs

        # For the advice of an out-of-memory error: `_load` measures with micro-batches of this size
        # first. `_longest` counts the positions of the longest sequence of the work under way.
        self.micro_batch_tokens = CHUNK_TOKENS
        self._longest = 0

        # A rank above 0 collects its spans of the trace here until `_send_spans`.
        self._spans: list[Span] = []
        if config.observe.trace is not None and not self.ranks.is_main:
            LISTENERS.append(self._spans.append)

        settings = config.trainer
        if self.device.type == "cpu":
            settings = settings.unmeasured()
        try:
            self.tokenizer = tokenizers.load(config.model.path)
            self.setup = Setup(
                config=settings, dtype=compute_dtype(config.model, self.device), ranks=self.ranks
            )
            with self.ranks.deadline("loading the models"), self.explaining("start"):
                self._load()
        except BaseException:
            if self.owns_ranks:
                self.ranks.destroy()
            raise
        self.adapter = self.policy.weights.adapter

    # Loading

    def _load(self) -> None:
        """Load the policy and its optimizer, then the auxiliary models, on every rank."""
        self._longest = 1  # the sequences of a rehearsal can be as short as that
        self._check_plugins()
        settings = self.setup.config
        choices.check(settings)
        self.attention = attention.choose_kernel(self.device)

        # Refuse what the memory has no room for, before anything is loaded.
        models = self._objective.models(self._config.model)
        self.estimate = memory.check(
            models, settings, self.setup.dtype, self.device, self.ranks.size
        )
        _, policy_skeleton = models[0]
        self.flops = flops.model_flops(policy_skeleton)
        settings = settings.with_rate(
            sum(parameter.numel() for parameter in policy_skeleton.parameters()),
            has_adapter=self._config.model.lora is not None,
        )
        self.setup = dataclasses.replace(self.setup, config=settings)

        # Which part of a row this rank computes is set before any forward pass.
        self.ranks.part = attention.WHOLE
        if settings.sequence_parallel > 1:
            self.ranks.part = choices.chosen_row_division()(settings.sequence_parallel, self.ranks)
        self._load_policy()
        self._choose_packing()
        (self.peak_flops,) = self.ranks.sum([flops.peak_flops(self.device, self.setup.dtype)])

        # Each auxiliary adds a trained model to `learners`, a frozen one to `tensors`.
        self.tensors: list[Callable[[], Iterator[Tensor]]] = []
        self.columns: dict[str, Measure] = {"logprobs": self._measure_logprobs}
        for auxiliary in self._objective.auxiliaries:
            if auxiliary.load is not None:
                self.columns[auxiliary.column] = auxiliary.load(self)

        # The size of a micro-batch comes last: measuring it needs all models in memory.
        if settings.micro_batch_tokens == "auto":
            self._fit_micro_batch()
        else:
            self.micro_batch_tokens = settings.micro_batch_tokens

    def _load_policy(self) -> None:
        """Load the policy, and make its optimizer."""
        self.policy: Policy = self.load_model(self._config.model, self._objective.kind)
        self.policy.statistics = self._objective.statistics
        self.engine = DeepSpeedEngine(self.policy, self.setup, name=POLICY)
        self.policy.check_architecture(self.device)

        # The policy learns once the auxiliary models have learnt for `_delay` steps; the schedule
        # of its learning rate has the steps after these.
        auxiliaries = self._objective.auxiliaries
        self._delay = max((auxiliary.delay for auxiliary in auxiliaries), default=0)
        self.engine.plan(self.setup.config.steps - self._delay)
        policy = Learner(
            name=POLICY,
            engine=self.engine,
            loss=self._policy_loss,
            reads=[auxiliary.column for auxiliary in auxiliaries],
            learns=self._is_warmup_over,
        )
        self.learners = [policy]

    def _choose_packing(self) -> None:
        """Choose how samples are packed into rows."""
        shape = Shape.of(self.policy.model)
        self._row_tokens = memory.row_tokens(shape, on_gpu=self.device.type != "cpu")
        # Attention to so many tokens costs as much as all else at a position. Most tokens in a row
        # are of other sequences, which are not seen: a GPU skips them, so that they cost nothing. A
        # CPU computes them, and sharing a prefix must save more than that.
        pairs = math.inf if self.device.type == "cuda" else self.flops.pairs
        self._packer = packing.chosen_packer(
            self.setup.config.share_prefixes, pairs=pairs, key_share=shape.key_share
        )

    def _is_warmup_over(self) -> bool:
        """Check whether the trained auxiliary models have learnt for `_delay` steps."""
        auxiliaries = self.learners[1:]
        return all(auxiliary.engine.num_steps >= self._delay for auxiliary in auxiliaries)

    def _measure_logprobs(self, batch: TrainBatch) -> Tensor:
        logprobs_bt: Tensor = self.engine.forward(batch)[0]
        return logprobs_bt

    def _check_plugins(self) -> None:
        """Raise ConfigError on rank 0 where another rank imported different plugin files.

        The ranks would otherwise sum gradients of different losses.
        """
        hashes = [plugin.sha256 for plugin in load_plugins(self._config.plugins)]
        if any(others != hashes for others in self.ranks.gather(hashes)):
            raise ConfigError(
                "a file under plugins is not the same for all ranks: "
                "copy that of rank 0 to every host"
            )

    def load_model(self, model: ModelConfig, kind: type[Policy]) -> Any:
        """Load a model onto this rank's CPU.

        At ZeRO-3 only rank 0 loads the weights; the other ranks make meta tensors.
        """
        algorithm = self._config.algorithm
        settings = self.setup.config
        objective_arguments = choose("objective", algorithm.objective).arguments
        uses_entropy = algorithm.entropy_coef > 0 or "entropy_bt" in objective_arguments
        return kind(
            model,
            dtype=self.setup.parameter_dtype(),
            temperature=self._objective.temperature,
            gradient_checkpointing=settings.gradient_checkpointing,
            kernels=settings.kernels,
            entropy_gradient=uses_entropy,
            seed=settings.seed,
            loads=self.ranks.is_main or self.setup.stage < 3,
        )

    def _fit_micro_batch(self) -> None:
        """Set the size of a micro-batch to the largest that has room."""
        config = self._config
        # A server on the same GPU needs memory beside the trainer, unless the two take turns.
        leaves = 0 if config.gpus_apart or config.launch.share_gpu else memory.BESIDE
        # A resumed run takes the size of its checkpoint only if all of this is equal.
        settings = config.model_dump_json(
            include={"model", "algorithm", "critic", "trainer"}, exclude={"trainer": {"steps"}}
        )
        gpu = torch.cuda.get_device_name(self.device)
        self._fitted_for = seed_of(settings, leaves, self.ranks.size, gpu)
        longest = tokenizers.context_length(config.model) - 1
        self.micro_batch_tokens = memory.fit_micro_batch(
            self.learners, self.ranks, leaves=leaves, longest=longest
        )

    @contextlib.contextmanager
    def explaining(self, work: str) -> Iterator[None]:
        """Raise an out-of-memory error as a TrainerError that names settings which need less."""
        self._longest = 0  # until `_built` knows the sequences of the work
        try:
            yield
        except Exception as error:
            if not guards.is_out_of_memory(error):
                raise
            raise guards.out_of_memory(
                error,
                self.setup.config,
                micro_batch_tokens=self.micro_batch_tokens,
                work=work,
                longest=self._longest,
                on_gpu=self.device.type == "cuda",
            ) from error

    def release(self) -> None:
        for learner in self.learners:
            learner.engine.close()

    # Sizes

    @property
    def num_parameters(self) -> int:
        """Count the policy's parameters over all ranks."""
        return sum(whole_shape(parameter).numel() for parameter in self.policy.parameters())

    @property
    def description(self) -> str:
        """Describe a step for the run's first lines: its memory and kernel, and each `auto`."""
        parts = [f"a step needs {self.estimate}", f"attention: {self.attention}"]
        if self._config.trainer.learning_rate == "auto":
            rate = self.setup.config.learning_rate
            parts.append(f"trainer.learning_rate=auto is {rate:g}, by the number of parameters")
        if self._fitted_for is not None:
            tokens = self.micro_batch_tokens
            fits = f"sequences of up to {tokens + 1} tokens have room"
            parts.append(f"trainer.micro_batch_tokens=auto is {tokens}: {fits}")
        return "; ".join(parts)

    @property
    def policy_learns(self) -> bool:
        """Whether the next step may change the policy: not during critic.warmup_steps."""
        return self.learners[0].learns()

    def check_fits(self, samples: Sequence[TrainSample]) -> None:
        """Raise TrainerError if no sample has a trained token, or a micro-batch has no room."""
        packing.check_fits(
            samples, self.micro_batch_tokens, unit=self._objective.unit, packer=self._packer
        )

    def _divide(self, samples: Sequence[TrainSample]) -> PerRank:
        """Pack samples into rows, and divide these among the ranks: rank r gets item r."""
        self.check_fits(samples)

        @functools.cache  # many sequences have the same length
        def cost(length: int) -> float:
            return flops.step_flops(self.flops, [length], length)

        # Neighboring ranks compute a row together, and get the same rows.
        ranks_per_row = self._config.trainer.sequence_parallel
        divided = batching.divide(
            samples,
            micro_batch_tokens=self.micro_batch_tokens,
            num_ranks=self.ranks.size // ranks_per_row,
            row_tokens=self._row_tokens,
            cost=cost,
            unit=self._objective.unit,
            packer=self._packer,
        )
        rows_of_ranks = []
        for rows in divided:
            rows_of_ranks += [rows] * ranks_per_row
        return PerRank(rows_of_ranks)

    def _built(self, rows: Rows) -> list[TrainBatch]:
        """Build this rank's micro-batches on its device."""
        batches = [packed_row(self.device, self.ranks.part) for packed_row in rows]
        self._longest = max(batch.segments.longest for batch in batches)
        return batches

    # Steps

    def step(
        self,
        samples: Sequence[TrainSample],
        *,
        number: int = 0,
        keep: Path | None = None,
        max_gap: float = math.inf,
    ) -> dict[str, float]:
        """Take one update for each mini-batch of a step; returns the means of their metrics.

        An update that is not finite is skipped. Several steps in a row without any update raise
        TrainerError.

        Args:
            samples: the batch, with the columns that `measure` gave.
            number: the step's number, which decides how the mini-batches are drawn.
            keep: file that the samples of a skipped update are written to.
            max_gap: largest mean difference between the log-probs of trainer and servers. With
                sync.on_mismatch=stop a larger one raises SyncError before any update.
        """
        start = time.perf_counter()
        self.check_fits(samples)
        learning_rate = self.engine.learning_rate if self.policy_learns else 0.0
        stop_kl = self._config.algorithm.stop_kl or math.inf
        if self._config.sync.on_mismatch != "stop":
            max_gap = math.inf

        # Take one update for each mini-batch, which holds whole groups. With several epochs, a
        # group has several updates: it is untrained until one of them succeeds.
        groups = [sample.group for sample in samples]
        self.untrained = dict.fromkeys(groups, STOPPED)
        metrics_of_updates: list[dict[str, float]] = []
        faults: list[str] = []
        minibatches = batching.minibatches(
            groups,
            epochs=self._objective.epochs,
            count=self._objective.minibatches,
            seed=seed_of(self._config.trainer.seed, "minibatches", number),
        )
        for places in minibatches:
            part = [samples[place] for place in places]
            updates, update_metrics = self._update(self._divide(part), max_gap)
            max_gap = math.inf  # later updates compare weights that the servers never had
            metrics_of_updates.append(update_metrics)
            self._note_untrained(part, updates[0])
            if any(update.is_faulty for update in updates):
                faults.append(guards.first_fault(part, updates))
                if keep is not None:
                    guards.keep_batch(keep, part, faults[-1], self.tokenizer.decode)
            if update_metrics.get("train/policy_kl", 0.0) > stop_kl:
                break
        self.end_step()

        step_metrics = self._step_metrics(metrics_of_updates, start, learning_rate)
        all_are_faulty = len(faults) == len(metrics_of_updates)
        if all_are_faulty:
            self._count_skipped(faults[-1], keep)
        elif step_metrics["train/skipped"] < 1:
            self._skipped_in_row = 0
        # Else float16's loss scale was too high, which neither counts nor ends the count.
        return step_metrics

    def _note_untrained(self, samples: Sequence[TrainSample], done: Update) -> None:
        """Note which groups of samples the policy's update has trained, or why it has not."""
        for sample in samples:
            if done.outcome == "updated":
                self.untrained.pop(sample.group, None)
            elif sample.group in self.untrained:
                self.untrained[sample.group] = NO_UPDATE[done.outcome]

    def _count_skipped(self, fault: str, keep: Path | None) -> None:
        """Count a step without an update; raises TrainerError after too many of them in a row."""
        self._skipped_in_row += 1
        if self._skipped_in_row >= guards.MAX_SKIPPED_STEPS:
            raise TrainerError(
                f"the optimizer skipped {self._skipped_in_row} steps in a row, as loss or gradient "
                f"was not finite; the first fault of the last one (the samples: {keep}): {fault}"
            )

    def _step_metrics(
        self, of_updates: Sequence[dict[str, float]], start: float, learning_rate: float
    ) -> dict[str, float]:
        """Combine the metrics of the updates of a step that began at `start`."""
        seconds = note("time/train", start)
        metrics = over_updates(of_updates, seconds, by_batch="old_logprobs" in self.columns)
        metrics["train/learning_rate"] = learning_rate
        metrics["time/train"] = seconds
        # A step faster than the peak shows that the peak was measured too low, while other
        # processes used the cores: raise it to the step's.
        if metrics["train/mfu"] > 1:
            self.peak_flops *= metrics["train/mfu"]
            metrics["train/mfu"] = 1.0
        return metrics

    @on_all_ranks
    def _update(self, rows: Rows, max_gap: float) -> tuple[list[Update], dict[str, float]]:
        """Update the policy and the trained auxiliary models.

        Returns one Update per learner, the policy's first, and the metrics by their full names.
        """
        batches = self._built(rows)
        loss_scale = self.engine.loss_scale  # before the update, which may lower it
        updates = [update(learner, batches, self.ranks, max_gap) for learner in self.learners]
        metrics = policy_metrics(updates[0], batches, self.ranks, self.flops, self.peak_flops)
        if loss_scale is not None:
            metrics["train/loss_scale"] = loss_scale
        for done in updates:
            metrics |= done.learner.metrics(done)
        return updates, metrics

    def _policy_loss(self, batch: TrainBatch) -> LossOutput:
        """Compute the objective's loss of a micro-batch, with entropy and statistics as metrics."""
        # The columns are log-probs, entropy and those of the statistics; or, of a model that scores
        # whole sequences, the scores alone.
        columns = self.engine.forward(batch)
        output = self._objective.loss(*columns[:2], batch)
        if len(columns) == 1:
            return output
        metrics = {"entropy": columns[1].detach().sum() / batch.num_tokens_global}
        metrics |= self._sums(batch, columns)
        metrics |= output.metrics
        return LossOutput(loss=output.loss, metrics=metrics)

    def _sums(self, batch: TrainBatch, columns: Sequence[Tensor]) -> dict[str, Tensor]:
        statistics = self._objective.statistics
        if statistics is None:
            return {}
        return statistics.sums(batch, *columns)

    @on_all_ranks
    def plan(self, steps: int) -> None:
        """Plan the learning rate's schedule to end after `steps` in place of trainer.steps."""
        self.engine.plan(steps)

    @on_all_ranks
    def end_step(self) -> None:
        """Count a step of the run, trained or not: the learning rate depends on their number."""
        # The policy comes first: whether it learns depends on the step counts of the others.
        for learner in self.learners:
            if learner.learns():
                learner.engine.num_steps += 1
        if self.device.type == "cpu":
            return_freed_memory()
        if self._config.observe.trace is not None:
            self._send_spans()

    def _send_spans(self) -> None:
        """Send rank 0 the spans of the other ranks.

        Each machine's performance counter starts at another moment, so Unix time connects them.
        """
        to_unix = time.time() - time.perf_counter()
        for spans, to_unix_there in self.ranks.gather((self._spans, to_unix)):
            delay = to_unix_there - to_unix
            for span in spans:
                note(span.name, span.start + delay, span.end + delay, span.who)
        self._spans.clear()

    # Measuring without a step

    def measure(self, sequences: Sequence[TokenSequence]) -> list[Columns]:
        """Measure the columns of each sequence that the algorithm needs before the step.

        Returns one mapping for each sequence, or [] if the algorithm needs no columns.
        """
        auxiliaries = self._objective.auxiliaries
        if not auxiliaries:
            return []
        columns: list[Columns] = [{} for _ in sequences]

        # Leave out sequences that will surely not be trained. Advantages don't matter here.
        places = []
        samples = []
        for place, sequence in enumerate(sequences):
            if is_measured(sequence, self._config.algorithm):
                zeros = (0.0,) * len(sequence.token_ids)
                places.append(place)
                samples.append(TrainSample(sequence=sequence, advantages=zeros))
        if not samples:
            return columns

        # Models in the trainer measure first, then those on servers.
        names = tuple(auxiliary.column for auxiliary in auxiliaries if auxiliary.load)
        for index, measured in self._numbers(self._divide(samples), names).items():
            columns[places[index]] = measured
        measured_sequences = [sample.sequence for sample in samples]
        for auxiliary in auxiliaries:
            if auxiliary.ask:
                answers = run(auxiliary.ask(measured_sequences, self._config.token))
                for place, values in zip(places, answers, strict=True):
                    columns[place] = dict(columns[place]) | {auxiliary.column: values}
        return columns

    def logprobs(self, samples: Sequence[TrainSample]) -> list[Sequence[float]]:
        """Compute the log-probs of each sample's tokens, 0 where its mask is False."""
        return [columns["logprobs"] for columns in self.numbers(samples)]

    def numbers(self, samples: Sequence[TrainSample]) -> list[Columns]:
        """Compute "logprobs" and "entropy" of each sample's tokens."""
        by_place = self._numbers(self._divide(samples), None)
        return [by_place[place] for place in range(len(samples))]

    @on_all_ranks
    @torch.no_grad()
    def _numbers(self, rows: Rows, names: Sequence[str] | None) -> dict[int, Columns]:
        """Compute columns of the samples, on rank 0 those of all ranks: result[place][column].

        `names` are keys of `columns`; None means "logprobs" and "entropy" in one forward pass.
        """
        columns_by_place: dict[int, Columns] = {}
        for batch in self._built(rows):
            if names is not None:
                columns = {name: self.columns[name](batch) for name in names}
            else:
                # A model that scores whole sequences has no entropy: its scores are "logprobs".
                values = self.engine.forward(batch)
                columns = dict(zip(("logprobs", "entropy"), values, strict=False))
            columns_by_place |= batching.unpack(batch, columns)

        # Ranks that compute a row together all have its columns: the first of them sends these.
        if self.ranks.part.number > 0:
            columns_by_place = {}
        result: dict[int, Columns] = {}
        for columns_of_rank in self.ranks.gather(columns_by_place):
            result |= columns_of_rank
        return result

    def evaluate(self, samples: Sequence[TrainSample]) -> dict[str, float]:
        """Compute the loss and the metrics of the objective without a step: `Update.totals`."""
        return dict(self._evaluate(self._divide(samples)))

    @on_all_ranks
    def _evaluate(self, rows: Rows) -> dict[str, float]:
        idle = dataclasses.replace(self.learners[0], learns=lambda: False)  # no backward pass
        return accumulate(idle, self._built(rows), self.ranks, math.inf)

    def compare(self, samples: Sequence[TrainSample]) -> tuple[float, dict[str, float]]:
        """Compare the log-probs of the trainer with those of the server's engine.

        Every sample must have a sampled token. Returns the mean |difference| over all sampled
        tokens, and the sums of the objective's `statistics`.
        """
        sums = dict(self._compare(self._divide(samples)))
        return sums.pop("gap") / sums.pop("tokens"), sums

    @on_all_ranks
    @torch.no_grad()
    def _compare(self, rows: Rows) -> dict[str, float]:
        sums_of_batches: list[Tensor] = []
        names: list[str] = []
        for batch in self._built(rows):
            columns = self.engine.forward(batch)
            gap_bt = (columns[0] - batch.rollout_logprobs_bt).abs().double()
            sums = {"tokens": batch.mask_bt.double().sum(), "gap": gap_bt.sum()}
            sums |= self._sums(batch, columns)
            names = list(sums)
            sums_of_batches.append(torch.stack(list(sums.values())))
        # The sums leave the GPU once, not after each micro-batch.
        totals = self.ranks.total(torch.stack(sums_of_batches).sum(dim=0).tolist())
        return dict(zip(names, totals, strict=True))

    @on_all_ranks
    def forget(self) -> None:
        """Free the frozen models, once nothing more is measured."""
        self.columns.clear()
        self.tensors.clear()
        gc.collect()  # hooks of ZeRO-3 hold a model in a cycle

    # Weights

    def export(self, folder: Path) -> dict[str, TensorSpec]:
        """Write the weights as servers get them; returns the specs of the tensors in memory."""
        named: list[tuple[str, Tensor]] = []
        is_freed = self.engine.stage == 3  # whether a tensor is freed after its bucket

        def take(bucket: Sequence[tuple[str, Tensor]]) -> None:
            for name, tensor in bucket:
                named.append((name, tensor.to("cpu", copy=is_freed)))

        self._stream(EXPORT_BYTES, False, sink=take)
        return self.policy.write(folder, named, self.tokenizer, self.setup.dtype)

    def layout(self, max_bytes: int, *, trained: bool = False) -> list[list[TensorLayout]]:
        """Describe the buckets that `stream` will pass to its sink."""
        buckets = self.engine.layout(max_bytes, trained=trained)
        return [nccl.layout(self.policy.as_published(bucket)) for bucket in buckets]

    def stream(self, max_bytes: int, sink: Sink, *, trained: bool = False) -> None:
        """Pass all weights, or only the trained ones, to `sink` in buckets of about max_bytes.

        An error of the sink is raised once all ranks have ended, and leaves the trainer usable.
        """

        def convert_and_pass(bucket: Sequence[tuple[str, Tensor]]) -> None:
            sink(self.policy.as_published(bucket))

        with deferring(convert_and_pass) as take:
            self._stream(max_bytes, trained, sink=take)

    @on_all_ranks
    def _stream(self, max_bytes: int, trained: bool, *, sink: Any = None) -> None:
        """Pass the parameters to rank 0's sink in buckets, by their names in the trainer."""
        for bucket in self.engine.buckets(max_bytes, trained=trained):  # only rank 0 gets any
            sink(bucket)

    # Checkpoints

    def state(self, sink: Sink) -> dict[str, Any]:
        """Pass a checkpoint's tensors to `sink` in buckets, float32 on the CPU.

        Returns the state that is no tensor, ready for JSON.
        """
        with deferring(sink) as take:
            engines = self._state(sink=take)
        return {
            "engines": engines,
            "skipped_in_row": self._skipped_in_row,
            "micro_batch": {"tokens": self.micro_batch_tokens, "measured_for": self._fitted_for},
            "dtype": manifest.dtype_name(self.setup.dtype),
        }

    @on_all_ranks
    def _state(self, *, sink: Any = None) -> dict[str, Any]:
        """Pass the tensors of all learners to the sink; returns their counters."""
        for learner in self.learners:
            for bucket in in_buckets(learner.engine.state(), BUCKET_BYTES):  # only rank 0 gets any
                sink(dict(bucket))
        return {learner.name: learner.engine.counters() for learner in self.learners}

    def restore(self, saved: SavedTensors, state: Mapping[str, Any]) -> None:
        """Restore a checkpoint: its tensors, and the result of the method `state`.

        Raises TrainerError for the state of another model, before anything changes.
        """
        expected: dict[str, tuple[int, ...]] = {}
        for learner in self.learners:
            expected |= learner.engine.shapes()
        saved.check(expected)
        self._restore(state, read=saved.read)
        self._skipped_in_row = state["skipped_in_row"]

    @on_all_ranks
    def _restore(
        self, state: Mapping[str, Any], *, read: Callable[[str], Tensor] | None = None
    ) -> None:
        for learner in self.learners:
            learner.engine.restore(read, state["engines"][learner.name])
        # Micro-batches of another size would sum gradients in another order.
        size = state["micro_batch"]
        if self._fitted_for is not None and self._fitted_for == size["measured_for"]:
            self.micro_batch_tokens = size["tokens"]

    # Sharing a GPU with a server

    def offload(self) -> None:
        """Move all training state to CPU memory."""
        if self.refusal != AWAY:
            self._offload()
            self.refusal = AWAY

    @on_all_ranks
    def _offload(self) -> None:
        self.away = share_gpu.offload(self.all_tensors(), self.device)

    def all_tensors(self) -> Iterator[Tensor]:
        """Yield the tensors of all models and optimizers."""
        for learner in self.learners:
            yield from learner.engine.tensors()
        for tensors_of_model in self.tensors:
            yield from tensors_of_model()

    def onload(self) -> None:
        """Move the training state back to the GPU, bit for bit."""
        if self.refusal == AWAY:
            self.refusal = ""
            self._onload()

    @on_all_ranks
    def _onload(self) -> None:
        share_gpu.onload(self.away, self.device)
        self.away = ()
