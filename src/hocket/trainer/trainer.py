"""The trainer: rank 0 calls its methods, and all ranks run them together."""

import contextlib
import dataclasses
import functools
import gc
import itertools
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
from hocket.trainer import attention, batching, choices, flops, guards, memory, share_gpu
from hocket.trainer.batching import Make, TrainBatch
from hocket.trainer.engine import POLICY, DeepSpeedEngine, Setup, in_buckets, whole_shape
from hocket.trainer.flops import Shape
from hocket.trainer.logprobs import CHUNK_TOKENS
from hocket.trainer.objective import Measure, Objective, configured
from hocket.trainer.policy import Policy, compute_dtype
from hocket.trainer.ranks import Ranks
from hocket.trainer.state import BUCKET_BYTES, SavedTensors
from hocket.trainer.step import Learner, Update, accumulate, update
from hocket.types import Columns, TokenSequence, TrainSample

Share = Sequence[Make]
"""Functions that build the micro-batches of one rank."""
Sink = Callable[[Any], None]
"""Takes one bucket: [(name, tensor)] of weights, {name: tensor} of a checkpoint."""
EXPORT_BYTES = 64 << 20  # that ZeRO-3 gathers at a time for an export
AWAY = "it is off the GPU; call onload() first"
BROKEN = "it broke in an earlier call"
CLOSED = "it is closed"
NO_UPDATE = {
    "stopped": "stop_kl ended the step before its update",
    "skipped": "its update was not finite",
    "idle": "only the critic learnt: critic.warmup_steps",
}


class PerRank(tuple[Any, ...]):
    """An argument of a common method of which rank r gets item r."""


def on_all_ranks(method: Callable[..., Any]) -> Any:
    """Decorate a method of Trainer that all ranks run together when rank 0 calls it.

    Positional arguments go to every rank; keyword arguments stay on rank 0. The result is rank 0's.
    """
    work = method.__name__

    @functools.wraps(method)
    def call(self: "Trainer", *args: Any, **local: Any) -> Any:
        if self._refusal:  # before the others start: the error leaves all ranks usable
            raise TrainerError(f"the trainer can't {work.strip('_')}: {self._refusal}")
        self._refusal = BROKEN  # until the work has ended well
        self.ranks.send([(work, _arguments_of(rank, args)) for rank in range(self.ranks.size)])
        result = self._run(work, _arguments_of(0, args), local)
        self._refusal = ""
        return result

    return call


def _arguments_of(rank: int, args: Sequence[Any]) -> list[Any]:
    return [arg[rank] if isinstance(arg, PerRank) else arg for arg in args]


class Trainer(contextlib.AbstractContextManager["Trainer"]):
    """Trains the model. Every rank constructs it; rank 0 calls its methods, from one thread at a time; others `follow`.

    An error within a common method ends all ranks. `objective`: default the algorithm's; a caller's `ranks` stay open.

    Example:

        with Trainer(config) as trainer:
            if trainer.ranks.is_main:
                metrics = trainer.step(samples)
                trainer.export(Path("my-model"))
            else:
                trainer.follow()
    """

    def __init__(self, config: Config, *, objective: Objective | None = None, ranks: Ranks | None = None) -> None:
        self._config = config
        self._objective = objective or configured(config)
        self._owns_ranks = ranks is None
        threads = cpu_threads(config.model.path, processes=int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        self.ranks = ranks or Ranks(config.sync.collective_timeout_s, threads)
        self.device = self.ranks.device
        # Why nothing can be done now.
        self._refusal = "" if self.ranks.is_main else f"this is rank {self.ranks.rank}, and ranks above 0 only follow"
        self._skipped_in_row = 0
        self.untrained: dict[int, str] = {}  # groups that the last step has not trained, with the reason
        self.micro_batch_tokens = CHUNK_TOKENS  # of the first rehearsal
        self.fitted_for: int | None = None  # hash of what micro_batch_tokens=auto depends on
        self._longest = 1  # positions of this rank's longest sequence in the current work
        self.away: share_gpu.Offloaded = ()
        self._spans: list[Span] = []  # that rank 0 has not received
        if config.observe.trace is not None and not self.ranks.is_main:
            LISTENERS.append(self._spans.append)
        settings = config.trainer.unmeasured() if self.device.type == "cpu" else config.trainer
        try:
            self.tokenizer = tokenizers.load(config.model.path)
            self.setup = Setup(config=settings, dtype=compute_dtype(config.model, self.device), ranks=self.ranks)
            with self.ranks.deadline("loading the models"), self._naming_memory("start"):
                self._load()
        except BaseException:
            if self._owns_ranks:
                self.ranks.destroy()
            raise
        self.adapter = self.policy.weights.adapter

    def __exit__(self, kind: object, cause: BaseException | None, trace: object) -> None:
        try:
            self.close()
        except TrainerError:
            if cause is None:  # else it follows from the cause
                raise

    # Loading

    def _load(self) -> None:
        """Load the policy and its optimizer, then the auxiliary models, on every rank."""
        self._check_plugins()
        settings = self.setup.config
        choices.check(settings)
        self.attention = attention.choose_kernel(self.device)

        # Refuse what the memory has no room for, before anything is loaded.
        models = self._objective.models(self._config.model)
        self.estimate = memory.check(models, settings, self.setup.dtype, self.device, self.ranks.size)
        self.flops = flops.model_flops(models[0][1])

        self.ranks.part = attention.WHOLE
        if settings.sequence_parallel > 1:
            self.ranks.part = choices.chosen_row_division()(settings.sequence_parallel, self.ranks)
        self.policy: Policy = self.load_model(self._config.model, self._objective.kind)
        self.policy.statistics = self._objective.statistics

        # How samples are packed into rows.
        shape = Shape.of(self.policy.model)
        self._row_tokens = memory.row_tokens(shape, on_gpu=self.device.type != "cpu")
        pairs = math.inf if self.device.type == "cuda" else self.flops.pairs
        packer = batching.chosen_packer(settings.share_prefixes, pairs=pairs, key_share=shape.key_share)
        self._packing: dict[str, Any] = {"unit": self._objective.unit, "packer": packer}
        (self.peak_flops,) = self.ranks.sum([flops.peak_flops(self.device, self.setup.dtype)])

        # The policy's optimizer steps once the auxiliary models have learnt for `delay` steps.
        delay = max((auxiliary.delay for auxiliary in self._objective.auxiliaries), default=0)
        self.engine = DeepSpeedEngine(self.policy, self.setup, name=POLICY)
        self.engine.plan(settings.steps - delay)
        self.policy.check_architecture(self.device)
        policy = Learner(
            name=POLICY,
            engine=self.engine,
            loss=self._policy_loss,
            reads=[auxiliary.column for auxiliary in self._objective.auxiliaries],
            learns=lambda: all(other.engine.num_steps >= delay for other in self.learners[1:]),
        )
        self.learners = [policy]
        self.tensors: list[Callable[[], Iterator[Tensor]]] = [self.engine.tensors]  # of each model
        self.columns: dict[str, Measure] = {"logprobs": lambda batch: self.engine.forward(batch)[0]}
        for auxiliary in self._objective.auxiliaries:
            if auxiliary.load is not None:
                self.columns[auxiliary.column] = auxiliary.load(self)
        fixed = settings.micro_batch_tokens
        self.micro_batch_tokens = self._fitted() if fixed == "auto" else fixed

    def _check_plugins(self) -> None:
        """Raise ConfigError on rank 0 where another has imported other files: gradients would differ."""
        hashes = [plugin.sha256 for plugin in load_plugins(self._config.plugins)]
        if any(others != hashes for others in self.ranks.gather(hashes)):
            raise ConfigError("a file under plugins is not the same for all ranks: copy that of rank 0 to every host")

    def load_model(self, model: ModelConfig, kind: type[Policy]) -> Any:
        """Load a model onto this rank's CPU or, but for rank 0 at ZeRO-3, the meta device."""
        algorithm = self._config.algorithm
        settings = self.setup.config
        return kind(
            model,
            dtype=self.setup.parameter_dtype(),
            temperature=self._objective.temperature,
            gradient_checkpointing=settings.gradient_checkpointing,
            kernels=settings.kernels,
            entropy_gradient=algorithm.entropy_coef > 0
            or "entropy_bt" in choose("objective", algorithm.objective).arguments,
            seed=settings.seed,
            loads=self.ranks.is_main or self.setup.stage < 3,
        )

    def _fitted(self) -> int:
        """Measure how many tokens a micro-batch has room for."""
        config = self._config
        leaves = 0 if config.gpus_apart or config.launch.share_gpu else memory.BESIDE
        used = config.model_dump_json(
            include={"model", "algorithm", "critic", "trainer"}, exclude={"trainer": {"steps"}}
        )
        self.fitted_for = seed_of(used, leaves, self.ranks.size, torch.cuda.get_device_name(self.device))
        longest = tokenizers.context_length(config.model) - 1
        return memory.fit_micro_batch(self.learners, self.ranks, leaves=leaves, longest=longest)

    # Running together

    def follow(self) -> None:
        """Do what rank 0 sends until it closes. Raise TrainerError if rank 0 dies."""
        work = ""
        while work != "_close":
            work, args = self.ranks.receive()
            self._run(work, args, {})
        self._leave()

    def _run(self, work: str, args: Sequence[Any], local: Mapping[str, Any]) -> Any:
        """Run this rank's part of a common method."""
        self._longest = 0
        self.ranks.use_this_thread()
        name = work.strip("_")
        start = time.perf_counter()
        with self.ranks.deadline(f"doing the common {name}"), self._naming_memory(name):
            result = getattr(type(self), work).__wrapped__(self, *args, **local)
        note(name, start, who=f"trainer, rank {self.ranks.rank}")
        return result

    @contextlib.contextmanager
    def _naming_memory(self, work: str) -> Iterator[None]:
        """Say of an error for lack of memory which work it was and which settings need less."""
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

    def close(self) -> None:
        """Release all ranks; after a failure in common work only a single one."""
        if self._refusal in ("", AWAY):
            self._refusal = ""
            self._close()
            self._refusal = CLOSED
            self._leave()
        elif self._refusal == BROKEN and self._owns_ranks and self.ranks.size == 1:  # this process may train again
            self.ranks.destroy()

    @on_all_ranks
    def _close(self) -> None:
        for learner in self.learners:
            learner.engine.close()

    def _leave(self) -> None:
        if self._owns_ranks:
            self.ranks.close()

    # Sizes

    @property
    def num_parameters(self) -> int:
        return sum(whole_shape(parameter).numel() for parameter in self.policy.parameters())

    @property
    def memory(self) -> str:
        line = f"a step needs {self.estimate}; attention: {self.attention}"
        if self.fitted_for is None:
            return line
        tokens = self.micro_batch_tokens
        return f"{line}; trainer.micro_batch_tokens=auto is {tokens}: sequences of up to {tokens + 1} tokens have room"

    @property
    def policy_learns(self) -> bool:
        """Whether the next step may change the policy: not during critic.warmup_steps."""
        return self.learners[0].learns()

    def check_fits(self, samples: Sequence[TrainSample]) -> None:
        """Raise TrainerError for one that no micro-batch has room for, or if none has a trained token."""
        batching.check_fits(samples, self.micro_batch_tokens, **self._packing)

    def _shares(self, samples: Sequence[TrainSample]) -> PerRank:
        """Divide samples among the ranks."""
        self.check_fits(samples)
        copies = self._config.trainer.sequence_parallel
        shares = batching.divide(
            samples,
            micro_batch_tokens=self.micro_batch_tokens,
            num_ranks=self.ranks.size // copies,
            row_tokens=self._row_tokens,
            cost=functools.cache(lambda length: flops.step_flops(self.flops, [length], length)),
            **self._packing,
        )
        return PerRank(share for share in shares for _ in range(copies))

    def _built(self, share: Share) -> list[TrainBatch]:
        """Build this rank's micro-batches."""
        batches = [make(self.device, self.ranks.part) for make in share]
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
        """Take one update for each mini-batch of step `number`; return the means of their metrics.

        One that is not finite is skipped, its samples written to `keep`; too many steps of these raise TrainerError.
        `max_gap`: of the servers' log-probs, above which sync.on_mismatch=stop raises SyncError before any update.
        """
        self.check_fits(samples)
        start = time.perf_counter()
        learning_rate = self.engine.learning_rate if self.policy_learns else 0.0
        groups = [sample.group for sample in samples]
        outcomes = dict.fromkeys(groups, "stopped")
        metrics: list[dict[str, float]] = []
        faults: list[str] = []
        stop_kl = self._config.algorithm.stop_kl or math.inf
        seed = seed_of(self._config.trainer.seed, "minibatches", number)
        objective = self._objective
        bound = max_gap if self._config.sync.on_mismatch == "stop" else math.inf
        for places in batching.minibatches(groups, epochs=objective.epochs, count=objective.minibatches, seed=seed):
            part = [samples[place] for place in places]
            done, measured = self._update(self._shares(part), bound)
            bound = math.inf  # later ones compare other weights
            metrics.append(measured)
            for sample in part:
                if outcomes[sample.group] != "updated":
                    outcomes[sample.group] = done[0].outcome
            if any(update.is_faulty for update in done):
                faults.append(guards.first_fault(part, done))
                if keep is not None:
                    guards.keep_batch(keep, part, faults[-1], self.tokenizer.decode)
            if measured.get("train/policy_kl", 0.0) > stop_kl:
                break
        self.untrained = {group: NO_UPDATE[how] for group, how in outcomes.items() if how != "updated"}
        self.end_step()
        seconds = note("time/train", start)
        measured = over_updates(metrics, seconds, by_batch="old_logprobs" in self.columns)
        measured |= {"train/learning_rate": learning_rate, "time/train": seconds}
        if len(faults) == len(metrics):
            self._count_skipped(faults[-1], keep)
        elif measured["train/skipped"] < 1:  # else by too high a loss scale
            self._skipped_in_row = 0
        if measured["train/mfu"] > 1:  # the peak was measured while others used the cores
            self.peak_flops *= measured["train/mfu"]
            measured["train/mfu"] = 1.0
        return measured

    @on_all_ranks
    def _update(self, share: Share, max_gap: float) -> tuple[list[Update], dict[str, float]]:
        """Update every learner; return its metrics, too."""
        batches = self._built(share)
        loss_scale = self.engine.loss_scale
        done = [update(learner, batches, self.ranks, max_gap) for learner in self.learners]
        policy = done[0]
        num_tokens = batches[0].num_tokens_global
        positions, computed, operations = self.ranks.total(self._work_of(batches))
        of_head = self.flops.per_trained_token * num_tokens
        metrics = {
            **policy.totals,
            "grad_norm": policy.grad_norm,
            "skipped": float(policy.outcome == "skipped"),
            "updates": float(policy.outcome != "idle"),
            "tokens": float(num_tokens),
            "sequences": float(batches[0].num_sequences_global),
            "micro_batches": float(len(batches)),
            "positions": positions,
            "shared": max(0.0, 1 - computed / positions),  # rows that ranks divide are padded
            "seconds_at_peak": (operations + of_head) / self.peak_flops,
        }
        if loss_scale is not None:
            metrics["loss_scale"] = loss_scale
        named = {name if "/" in name else f"train/{name}": value for name, value in metrics.items()}
        for one in done:
            named |= one.learner.metrics(one)
        return done, named

    def _policy_loss(self, batch: TrainBatch) -> LossOutput:
        columns = self.engine.forward(batch)
        output = self._objective.loss(*columns[:2], batch)
        if len(columns) == 1:  # of a scalar model
            return output
        metrics = {"entropy": columns[1].detach().sum() / batch.num_tokens_global}
        return LossOutput(loss=output.loss, metrics=metrics | self._sums(batch, columns) | dict(output.metrics))

    def _sums(self, batch: TrainBatch, columns: Sequence[Tensor]) -> dict[str, Tensor]:
        statistics = self._objective.statistics
        return statistics.sums(batch, *columns) if statistics else {}

    def _work_of(self, batches: Sequence[TrainBatch]) -> list[float]:
        """Count the positions of this rank's sequences, those computed, and the layers' operations for these."""
        rows = [batch.segments for batch in batches if batch.places]
        ends = [end for row in rows for end in row.ends]
        starts = [start for row in rows for start in row.starts]
        positions = sum(sum(batch.lengths) for batch in batches if batch.places)
        operations = flops.step_flops(self.flops, ends, 0) - flops.step_flops(self.flops, starts, 0)
        return [positions, sum(ends) - sum(starts), operations]

    @on_all_ranks
    def plan(self, steps: int) -> None:
        """Have the learning rate's schedule end after `steps`, not trainer.steps."""
        self.engine.plan(steps)

    @on_all_ranks
    def end_step(self) -> None:
        """Count a step of the run, with a signal or without: the learning rate goes by steps."""
        for learner in self.learners:  # the policy first: whether it learns depends on the steps of the others
            learner.engine.num_steps += learner.learns()
        if self.device.type == "cpu":
            return_freed_memory()
        if self._config.observe.trace is not None:
            self._send_spans()

    def _send_spans(self) -> None:
        """Send rank 0 what the other ranks did, by the clock of their machines."""
        unix = time.time() - time.perf_counter()
        spans = [span._replace(start=span.start + unix, end=span.end + unix) for span in self._spans]
        self._spans.clear()
        for span in itertools.chain(*self.ranks.gather(spans)):
            note(span.name, span.start - unix, span.end - unix, span.who)

    def _count_skipped(self, fault: str, keep: Path | None) -> None:
        self._skipped_in_row += 1
        if self._skipped_in_row >= guards.MAX_SKIPPED_STEPS:
            raise TrainerError(
                f"the optimiser skipped {self._skipped_in_row} steps in a row, as loss or gradient was not finite; "
                f"the first fault of the last one (the samples: {keep}): {fault}"
            )

    # Measuring without a step

    def measure(self, sequences: Sequence[TokenSequence]) -> list[Columns]:
        """Measure the columns that the algorithm needs of each sequence before the step; [] where it needs none."""
        auxiliaries = self._objective.auxiliaries
        if not auxiliaries:
            return []
        columns: list[Columns] = [{} for _ in sequences]
        used = [place for place, sequence in enumerate(sequences) if is_measured(sequence, self._config.algorithm)]
        samples = []
        for place in used:
            zeros = (0.0,) * len(sequences[place].token_ids)
            samples.append(TrainSample(sequence=sequences[place], advantages=zeros))
        if samples:
            names = tuple(auxiliary.column for auxiliary in auxiliaries if auxiliary.load)
            for index, measured in self._numbers(self._shares(samples), names).items():
                columns[used[index]] = measured
            for auxiliary in auxiliaries:
                if auxiliary.ask:
                    answers = run(auxiliary.ask([sequences[place] for place in used], self._config.token))
                    for place, values in zip(used, answers, strict=True):
                        columns[place] = {**columns[place], auxiliary.column: values}
        return columns

    def logprobs(self, samples: Sequence[TrainSample]) -> list[Sequence[float]]:
        """Compute the log-probs of each sample's tokens, 0 where its mask is False."""
        return [columns["logprobs"] for columns in self.numbers(samples)]

    def numbers(self, samples: Sequence[TrainSample]) -> list[Columns]:
        """Compute "logprobs" and "entropy" of each sample's tokens."""
        by_place = self._numbers(self._shares(samples), None)
        return [by_place[place] for place in range(len(samples))]

    @on_all_ranks
    @torch.no_grad()
    def _numbers(self, share: Share, names: Sequence[str] | None) -> dict[int, Columns]:
        """Compute columns by the sample's place, on rank 0 for all; None: the policy's log-probs and entropy."""
        numbers: dict[int, Columns] = {}
        for batch in self._built(share):
            if names is None:
                columns = dict(zip(("logprobs", "entropy"), self.engine.forward(batch), strict=False))
            else:
                columns = {name: self.columns[name](batch) for name in names}
            numbers |= batching.unpack(batch, columns)
        if self.ranks.part.number:  # other ranks of the same rows send the same
            numbers = {}
        together: dict[int, Columns] = {}
        for of_rank in self.ranks.gather(numbers):
            together |= of_rank
        return together

    def evaluate(self, samples: Sequence[TrainSample]) -> dict[str, float]:
        """Compute "loss" and metrics of the objective, as `Update.totals`, without a step."""
        return dict(self._evaluate(self._shares(samples)))

    @on_all_ranks
    def _evaluate(self, share: Share) -> dict[str, float]:
        idle = dataclasses.replace(self.learners[0], learns=lambda: False)
        return accumulate(idle, self._built(share), self.ranks, math.inf)

    def compare(self, samples: Sequence[TrainSample]) -> tuple[float, dict[str, float]]:
        """Return the mean |trainer − engine log-prob| over sampled tokens, which no sample is without.

        Also returns the sums of the objective's `statistics`.
        """
        sums = dict(self._compare(self._shares(samples)))
        return sums.pop("gap") / sums.pop("tokens"), sums

    @on_all_ranks
    @torch.no_grad()
    def _compare(self, share: Share) -> dict[str, float]:
        rows: list[Tensor] = []
        names: list[str] = []
        for batch in self._built(share):
            columns = self.engine.forward(batch)
            gap_bt = (columns[0] - batch.rollout_logprobs_bt).abs().double()
            sums = {"tokens": batch.mask_bt.double().sum(), "gap": gap_bt.sum(), **self._sums(batch, columns)}
            names = list(sums)
            rows.append(torch.stack(list(sums.values())))
        return dict(zip(names, self.ranks.total(torch.stack(rows).sum(dim=0).tolist()), strict=True))

    @on_all_ranks
    def forget(self) -> None:
        """Let go of models beside the policy that don't learn, once they have measured for the last time."""
        for auxiliary in self._objective.auxiliaries:
            self.columns.pop(auxiliary.column, None)  # a server's was never there
        del self.tensors[len(self.learners) :]
        gc.collect()  # hooks of ZeRO-3 hold a model in a cycle

    # Weights

    def export(self, folder: Path) -> dict[str, TensorSpec]:
        """Write the weights as published; return the specs of the tensors in memory."""
        named: list[tuple[str, Tensor]] = []

        def take(bucket: Sequence[tuple[str, Tensor]]) -> None:
            copies = self.engine.stage == 3  # at other stages a tensor outlives its bucket
            named.extend((name, tensor.to("cpu", copy=copies)) for name, tensor in bucket)

        self._stream(EXPORT_BYTES, False, sink=take)
        return self.policy.write(folder, named, self.tokenizer, self.setup.dtype)

    def layout(self, max_bytes: int, *, trained: bool = False) -> list[list[TensorLayout]]:
        """Describe the buckets that `stream` will give."""
        buckets = self.engine.layout(max_bytes, trained=trained)
        return [nccl.layout(self.policy.as_published(bucket)) for bucket in buckets]

    def stream(self, max_bytes: int, sink: Sink, *, trained: bool = False) -> None:
        """Give `sink` the weights, or the trained ones, in buckets of about max_bytes.

        Its error leaves the trainer usable.
        """
        with _deferring(lambda bucket: sink(self.policy.as_published(bucket))) as take:
            self._stream(max_bytes, trained, sink=take)

    @on_all_ranks
    def _stream(self, max_bytes: int, trained: bool, *, sink: Any = None) -> None:
        for bucket in self.engine.buckets(max_bytes, trained=trained):  # on rank 0 alone
            sink(bucket)

    # Checkpoints

    def state(self, sink: Sink) -> dict[str, Any]:
        """Give `sink` a checkpoint's tensors, float32 on the CPU, in buckets; return the rest for JSON."""
        with _deferring(sink) as take:
            engines = self._state(sink=take)
        return {
            "engines": engines,
            "skipped_in_row": self._skipped_in_row,
            "micro_batch": {"tokens": self.micro_batch_tokens, "measured_for": self.fitted_for},
            "dtype": manifest.dtype_name(self.setup.dtype),
        }

    @on_all_ranks
    def _state(self, *, sink: Any = None) -> dict[str, Any]:
        """Give the tensors of all learners to the sink; return their counters."""
        for learner in self.learners:
            for bucket in in_buckets(learner.engine.state(), BUCKET_BYTES):  # on rank 0 alone
                sink(dict(bucket))
        return {learner.name: learner.engine.counters() for learner in self.learners}

    def restore(self, saved: SavedTensors, rest: Mapping[str, Any]) -> None:
        """Restore what `state` gave; raise TrainerError, before anything changes, for another model's."""
        expected: dict[str, tuple[int, ...]] = {}
        for learner in self.learners:
            expected |= learner.engine.shapes()
        saved.check(expected)
        self._restore(rest, read=saved.read)
        self._skipped_in_row = rest["skipped_in_row"]

    @on_all_ranks
    def _restore(self, rest: Mapping[str, Any], *, read: Callable[[str], Tensor] | None = None) -> None:
        for learner in self.learners:
            learner.engine.restore(read, rest["engines"][learner.name])
        size = rest["micro_batch"]
        if self.fitted_for is not None and self.fitted_for == size["measured_for"]:
            self.micro_batch_tokens = size["tokens"]  # other sizes would sum in another order

    # Sharing a GPU with a server

    def offload(self) -> None:
        """Move all training state to CPU memory."""
        if self._refusal != AWAY:
            self._offload()
            self._refusal = AWAY

    @on_all_ranks
    def _offload(self) -> None:
        tensors = itertools.chain.from_iterable(of_model() for of_model in self.tensors)
        self.away = share_gpu.offload(tensors, self.device)

    def onload(self) -> None:
        """Move it back, bit for bit."""
        if self._refusal == AWAY:
            self._refusal = ""
            self._onload()

    @on_all_ranks
    def _onload(self) -> None:
        share_gpu.onload(self.away, self.device)
        self.away = ()


@contextlib.contextmanager
def _deferring(sink: Sink) -> Iterator[Sink]:
    """Give a sink whose first error is raised at the end: the other ranks need rank 0 till then."""
    errors: list[Exception] = []

    def take(bucket: Any) -> None:
        if not errors:
            try:
                sink(bucket)
            except Exception as error:  # noqa: BLE001 - raised below
                errors.append(error)

    yield take
    if errors:
        raise errors[0]
