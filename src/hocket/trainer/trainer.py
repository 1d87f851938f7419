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
from hocket.trainer import attention, batching, choices, flops, guards, memory, packing, share_gpu
from hocket.trainer.all_ranks import AWAY, PerRank, Together, on_all_ranks
from hocket.trainer.batching import PackedRow, TrainBatch
from hocket.trainer.engine import POLICY, DeepSpeedEngine, Setup, in_buckets, whole_shape
from hocket.trainer.flops import Shape
from hocket.trainer.logprobs import CHUNK_TOKENS
from hocket.trainer.objective import Measure, Objective, configured
from hocket.trainer.policy import Policy, compute_dtype
from hocket.trainer.ranks import Ranks
from hocket.trainer.state import BUCKET_BYTES, SavedTensors
from hocket.trainer.step import Learner, Update, accumulate, update
from hocket.types import Columns, TokenSequence, TrainSample

Share = Sequence[PackedRow]
"""The micro-batches of one rank."""
Sink = Callable[[Any], None]
"""Takes one bucket: [(name, tensor)] of weights, {name: tensor} of a checkpoint."""
EXPORT_BYTES = 64 << 20  # that ZeRO-3 gathers at a time for an export
NO_UPDATE = {
    "stopped": "stop_kl ended the step before its update",
    "skipped": "its update was not finite",
    "idle": "only the critic learnt: critic.warmup_steps",
}


class Trainer(Together):
    """Trains the model, on one rank or on several together.

    Every rank makes a Trainer. Rank 0 calls its methods, from one thread at a time; the others
    `follow`. all_ranks.py says how.

    Example: one update, and the trained model as files.

        with Trainer(config) as trainer:
            if trainer.ranks.is_main:
                metrics = trainer.step(samples)
                trainer.export(Path("my-model"))
            else:
                trainer.follow()

    Args:
        objective: default: that of the config's algorithm.
        ranks: default: those of this process's launcher. A caller's own stay open at the end.
    """

    def __init__(
        self, config: Config, *, objective: Objective | None = None, ranks: Ranks | None = None
    ) -> None:
        self._config = config
        self._objective = objective or configured(config)
        # The processes of this machine share its cores.
        processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        threads = cpu_threads(config.model.path, processes=processes)
        super().__init__(
            ranks or Ranks(config.sync.collective_timeout_s, threads), owns_ranks=ranks is None
        )
        self.device = self.ranks.device
        self._skipped_in_row = 0
        self.untrained: dict[int, str] = {}  # groups that the last step has not trained: why
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
        self._check_plugins()
        settings = self.setup.config
        choices.check(settings)
        self.attention = attention.choose_kernel(self.device)

        # Refuse what the memory has no room for, before anything is loaded.
        models = self._objective.models(self._config.model)
        self.estimate = memory.check(
            models, settings, self.setup.dtype, self.device, self.ranks.size
        )
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
        packer = packing.chosen_packer(
            settings.share_prefixes, pairs=pairs, key_share=shape.key_share
        )
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
        """Raise ConfigError on rank 0 where another has imported other files.

        Their gradients would not be of the same loss.
        """
        hashes = [plugin.sha256 for plugin in load_plugins(self._config.plugins)]
        if any(others != hashes for others in self.ranks.gather(hashes)):
            raise ConfigError(
                "a file under plugins is not the same for all ranks: "
                "copy that of rank 0 to every host"
            )

    def load_model(self, model: ModelConfig, kind: type[Policy]) -> Any:
        """Load a model onto this rank's CPU or, but for rank 0 at ZeRO-3, the meta device."""
        algorithm = self._config.algorithm
        settings = self.setup.config
        objective_takes = choose("objective", algorithm.objective).arguments
        return kind(
            model,
            dtype=self.setup.parameter_dtype(),
            temperature=self._objective.temperature,
            gradient_checkpointing=settings.gradient_checkpointing,
            kernels=settings.kernels,
            entropy_gradient=algorithm.entropy_coef > 0 or "entropy_bt" in objective_takes,
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
        self.fitted_for = seed_of(
            used, leaves, self.ranks.size, torch.cuda.get_device_name(self.device)
        )
        longest = tokenizers.context_length(config.model) - 1
        return memory.fit_micro_batch(self.learners, self.ranks, leaves=leaves, longest=longest)

    def run_part(self, work: str, args: Sequence[Any], local: Mapping[str, Any]) -> Any:
        self._longest = 0
        return super().run_part(work, args, local)

    @contextlib.contextmanager
    def explaining(self, work: str) -> Iterator[None]:
        """Say of an error for lack of memory which settings need less."""
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
        return sum(whole_shape(parameter).numel() for parameter in self.policy.parameters())

    @property
    def memory(self) -> str:
        line = f"a step needs {self.estimate}; attention: {self.attention}"
        if self.fitted_for is None:
            return line
        tokens = self.micro_batch_tokens
        fits = f"sequences of up to {tokens + 1} tokens have room"
        return f"{line}; trainer.micro_batch_tokens=auto is {tokens}: {fits}"

    @property
    def policy_learns(self) -> bool:
        """Whether the next step may change the policy: not during critic.warmup_steps."""
        return self.learners[0].learns()

    def check_fits(self, samples: Sequence[TrainSample]) -> None:
        """Raise TrainerError for samples without a trained token, or too long for a micro-batch."""
        packing.check_fits(samples, self.micro_batch_tokens, **self._packing)

    def _shares(self, samples: Sequence[TrainSample]) -> PerRank:
        """Divide samples among the ranks: rank r gets the micro-batches of item r."""
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
        # Ranks that compute rows together are neighbours, and get the same ones.
        share_of_rank = []
        for share in shares:
            share_of_rank += [share] * copies
        return PerRank(share_of_rank)

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
        """Take one update for each mini-batch of a step; returns the means of their metrics.

        An update that is not finite is skipped. Too many steps of these raise TrainerError.

        Args:
            number: of the step; the mini-batches depend on it.
            keep: file that the samples of a skipped update are written to.
            max_gap: between log-probs of trainer and servers; with sync.on_mismatch=stop a larger
                one raises SyncError before any update.
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
        parts = batching.minibatches(
            groups, epochs=objective.epochs, count=objective.minibatches, seed=seed
        )
        for places in parts:
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
        self.untrained = {}
        for group, outcome in outcomes.items():
            if outcome != "updated":
                self.untrained[group] = NO_UPDATE[outcome]
        self.end_step()

        # The metrics of the step.
        seconds = note("time/train", start)
        measured = over_updates(metrics, seconds, by_batch="old_logprobs" in self.columns)
        measured |= {"train/learning_rate": learning_rate, "time/train": seconds}
        if len(faults) == len(metrics):
            self._count_skipped(faults[-1], keep)
        elif measured["train/skipped"] < 1:  # else by too high a loss scale
            self._skipped_in_row = 0
        if measured["train/mfu"] > 1:  # the peak was measured while other processes used the cores
            self.peak_flops *= measured["train/mfu"]
            measured["train/mfu"] = 1.0
        return measured

    @on_all_ranks
    def _update(self, share: Share, max_gap: float) -> tuple[list[Update], dict[str, float]]:
        """Update the policy and the other learners; returns also the metrics by name."""
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
        named = {}
        for name, value in metrics.items():
            named[name if "/" in name else f"train/{name}"] = value
        for learnt in done:
            named |= learnt.learner.metrics(learnt)
        return done, named

    def _policy_loss(self, batch: TrainBatch) -> LossOutput:
        columns = self.engine.forward(batch)
        output = self._objective.loss(*columns[:2], batch)
        if len(columns) == 1:  # of a scalar model
            return output
        metrics = {"entropy": columns[1].detach().sum() / batch.num_tokens_global}
        metrics |= self._sums(batch, columns)
        metrics |= output.metrics
        return LossOutput(loss=output.loss, metrics=metrics)

    def _sums(self, batch: TrainBatch, columns: Sequence[Tensor]) -> dict[str, Tensor]:
        statistics = self._objective.statistics
        return statistics.sums(batch, *columns) if statistics else {}

    def _work_of(self, batches: Sequence[TrainBatch]) -> list[float]:
        """Count what this rank's micro-batches are.

        Returns the positions of their sequences, those that are computed, and the operations of
        the layers for these.
        """
        positions = 0
        ends: list[int] = []
        starts: list[int] = []
        for batch in batches:
            if batch.places:  # no blank
                positions += sum(batch.lengths)
                ends += batch.segments.ends
                starts += batch.segments.starts
        operations = flops.step_flops(self.flops, ends, 0) - flops.step_flops(self.flops, starts, 0)
        return [positions, sum(ends) - sum(starts), operations]

    @on_all_ranks
    def plan(self, steps: int) -> None:
        """Have the learning rate's schedule end after `steps`, not trainer.steps."""
        self.engine.plan(steps)

    @on_all_ranks
    def end_step(self) -> None:
        """Count a step of the run, with a signal or without: the learning rate goes by steps."""
        # The policy first: whether it learns depends on the steps of the others.
        for learner in self.learners:
            learner.engine.num_steps += learner.learns()
        if self.device.type == "cpu":
            return_freed_memory()
        if self._config.observe.trace is not None:
            self._send_spans()

    def _send_spans(self) -> None:
        """Send rank 0 what the other ranks did, by the clock of their machines."""
        unix = time.time() - time.perf_counter()
        spans = [
            span._replace(start=span.start + unix, end=span.end + unix) for span in self._spans
        ]
        self._spans.clear()
        for spans_of_rank in self.ranks.gather(spans):
            for span in spans_of_rank:
                note(span.name, span.start - unix, span.end - unix, span.who)

    def _count_skipped(self, fault: str, keep: Path | None) -> None:
        self._skipped_in_row += 1
        if self._skipped_in_row >= guards.MAX_SKIPPED_STEPS:
            raise TrainerError(
                f"the optimiser skipped {self._skipped_in_row} steps in a row, as loss or gradient "
                f"was not finite; the first fault of the last one (the samples: {keep}): {fault}"
            )

    # Measuring without a step

    def measure(self, sequences: Sequence[TokenSequence]) -> list[Columns]:
        """Measure the columns of each sequence that the algorithm needs before the step.

        Returns one mapping for each sequence, or [] where the algorithm needs none.
        """
        auxiliaries = self._objective.auxiliaries
        if not auxiliaries:
            return []
        columns: list[Columns] = [{} for _ in sequences]
        used = []
        for place, sequence in enumerate(sequences):
            if is_measured(sequence, self._config.algorithm):
                used.append(place)
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
                    asked_for = [sequences[place] for place in used]
                    answers = run(auxiliary.ask(asked_for, self._config.token))
                    for place, values in zip(used, answers, strict=True):
                        columns[place] = dict(columns[place]) | {auxiliary.column: values}
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
        """Compute the columns of samples by their places; on rank 0 those of all ranks.

        `names`: of the columns; None: the policy's log-probs and entropy.
        """
        numbers: dict[int, Columns] = {}
        for batch in self._built(share):
            if names is None:
                measured = self.engine.forward(batch)
                columns = dict(zip(("logprobs", "entropy"), measured, strict=False))
            else:
                columns = {name: self.columns[name](batch) for name in names}
            numbers |= batching.unpack(batch, columns)
        if self.ranks.part.number:  # of the ranks that compute a row together, the first sends all
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
        """Compare the log-probs of the trainer with those of the server's engine.

        Every sample has a sampled token. Returns the mean |difference| over all sampled tokens,
        and the sums of the objective's `statistics`.
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
            sums = {"tokens": batch.mask_bt.double().sum(), "gap": gap_bt.sum()}
            sums |= self._sums(batch, columns)
            names = list(sums)
            rows.append(torch.stack(list(sums.values())))
        totals = self.ranks.total(torch.stack(rows).sum(dim=0).tolist())
        return dict(zip(names, totals, strict=True))

    @on_all_ranks
    def forget(self) -> None:
        """Let go of auxiliary models that don't learn, once they won't measure any more."""
        for auxiliary in self._objective.auxiliaries:
            self.columns.pop(auxiliary.column, None)  # a server's was never there
        del self.tensors[len(self.learners) :]
        gc.collect()  # hooks of ZeRO-3 hold a model in a cycle

    # Weights

    def export(self, folder: Path) -> dict[str, TensorSpec]:
        """Write the weights as published; returns the specs of the tensors in memory."""
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
        """Give `sink` a checkpoint's tensors, float32 on the CPU, in buckets; returns the rest."""
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
        """Restore what `state` gave.

        Raises TrainerError, before anything changes, for the state of another model.
        """
        expected: dict[str, tuple[int, ...]] = {}
        for learner in self.learners:
            expected |= learner.engine.shapes()
        saved.check(expected)
        self._restore(rest, read=saved.read)
        self._skipped_in_row = rest["skipped_in_row"]

    @on_all_ranks
    def _restore(
        self, rest: Mapping[str, Any], *, read: Callable[[str], Tensor] | None = None
    ) -> None:
        for learner in self.learners:
            learner.engine.restore(read, rest["engines"][learner.name])
        size = rest["micro_batch"]
        if self.fitted_for is not None and self.fitted_for == size["measured_for"]:
            self.micro_batch_tokens = size["tokens"]  # other sizes would sum in another order

    # Sharing a GPU with a server

    def offload(self) -> None:
        """Move all training state to CPU memory."""
        if self.refusal != AWAY:
            self._offload()
            self.refusal = AWAY

    @on_all_ranks
    def _offload(self) -> None:
        tensors = itertools.chain.from_iterable(of_model() for of_model in self.tensors)
        self.away = share_gpu.offload(tensors, self.device)

    def onload(self) -> None:
        """Move it back, bit for bit."""
        if self.refusal == AWAY:
            self.refusal = ""
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
