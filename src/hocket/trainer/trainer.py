"""The trainer as rank 0 sees it: each call is work that all ranks do together."""

import contextlib
import functools
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from hocket.algorithm.samples import is_measured
from hocket.common.machine import cpu_threads
from hocket.common.tasks import note, run, seed_of
from hocket.config import Config
from hocket.data import tokenizer as tokenizers
from hocket.errors import TrainerError
from hocket.observe.metrics import over_updates
from hocket.protocol import TensorLayout, TensorSpec, manifest, nccl
from hocket.trainer import batching, flops, guards
from hocket.trainer.auxiliary import configured
from hocket.trainer.engine import whole_shape
from hocket.trainer.models import Models, Objective, Sink
from hocket.trainer.policy import Policy
from hocket.trainer.ranks import Ranks
from hocket.trainer.state import SavedTensors
from hocket.types import Columns, TokenSequence, TrainSample

EXPORT_BYTES = 64 << 20  # that ZeRO-3 gathers at a time for an export
AWAY = "it is off the GPU; call onload() first"
BROKEN = "it broke in an earlier call"
CLOSED = "it is closed"
NO_UPDATE = {
    "stopped": "stop_kl ended the step before its update",
    "skipped": "its update was not finite",
    "idle": "only the critic learnt: critic.warmup_steps",
}


class Trainer(contextlib.AbstractContextManager["Trainer"]):
    """Trains the model. Every rank constructs it; rank 0 calls its methods, from one thread at a time; others `follow`.

    An error within the common work ends all ranks. `objective`: default the algorithm's; given `ranks` stay open.
    """

    def __init__(self, config: Config, *, objective: Objective | None = None, ranks: Ranks | None = None) -> None:
        self._owns_ranks = ranks is None
        threads = cpu_threads(config.model.path, processes=int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        self.ranks = ranks or Ranks(config.sync.collective_timeout_s, threads)
        self.device = self.ranks.device
        self._config = config
        self._objective = objective or configured(config)
        # Why nothing can be done now.
        self._refusal = "" if self.ranks.is_main else f"this is rank {self.ranks.rank}, and ranks above 0 only follow"
        self._skipped_in_row = 0
        self.untrained: dict[int, str] = {}  # groups that the last step has not trained, with the reason
        try:
            self.tokenizer = tokenizers.load(config.model.path)
            self.models = Models(config, self.ranks, self._objective)
        except BaseException:
            if self._owns_ranks:
                self.ranks.destroy()
            raise
        self.policy: Policy = self.models.policy
        self.engine = self.models.engine
        self.adapter = self.policy.weights.adapter

    def __exit__(self, kind: object, cause: BaseException | None, trace: object) -> None:
        try:
            self.close()
        except TrainerError:
            if cause is None:  # else it follows from the cause
                raise

    def follow(self) -> None:
        """Do what rank 0 sends until it closes. Raise TrainerError if rank 0 dies."""
        work: Callable[..., Any] | None = None
        while work is not Models.close:
            work, args = self.ranks.receive()
            self.models.run(work, args)
        self._leave()

    def close(self) -> None:
        """Release all ranks; after a failure in common work only a single one."""
        if self._refusal in ("", AWAY):
            self._refusal = ""
            self._together(Models.close)
            self._refusal = CLOSED
            self._leave()
        elif self._refusal == BROKEN and self._owns_ranks and self.ranks.size == 1:  # this process may train again
            self.ranks.destroy()

    def _leave(self) -> None:
        if self._owns_ranks:
            self.ranks.close()

    def _together(self, work: Callable[..., Any], *args: Any, **own: Any) -> Any:
        """Run a method of `Models` on all ranks; `own`: for rank 0 alone."""
        return self._on_each(work, [args] * self.ranks.size, **own)

    def _on_each(self, work: Callable[..., Any], args: Sequence[Sequence[Any]], **own: Any) -> Any:
        """Do so with args[r] on rank r."""
        if self._refusal:  # before the others start: its error leaves all ranks usable
            raise TrainerError(f"the trainer can't {work.__name__}: {self._refusal}")
        self._refusal = BROKEN  # until the work has ended well
        self.ranks.send([(work, theirs) for theirs in args])
        result = self.models.run(work, args[0], **own)
        self._refusal = ""
        return result

    @property
    def num_parameters(self) -> int:
        return sum(whole_shape(parameter).numel() for parameter in self.policy.parameters())

    @property
    def micro_batch_tokens(self) -> int:
        return self.models.micro_batch_tokens

    @property
    def memory(self) -> str:
        line = f"a step needs {self.models.estimate}; attention: {self.models.attention}"
        if self.models.fitted_for is None:
            return line
        tokens = self.micro_batch_tokens
        return f"{line}; trainer.micro_batch_tokens=auto is {tokens}: sequences of up to {tokens + 1} tokens have room"

    @property
    def policy_learns(self) -> bool:
        """Whether the next step may change the policy: not during critic.warmup_steps."""
        return self.models.learners[0].learns()

    def check_fits(self, samples: Sequence[TrainSample]) -> None:
        """Raise TrainerError for one that no micro-batch has room for, or if none has a trained token."""
        batching.check_fits(samples, self.micro_batch_tokens, **self.models.packing)

    def plan(self, steps: int) -> None:
        """Have the learning rate's schedule end after `steps`, not trainer.steps."""
        self._together(Models.plan, steps)

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
            done, measured = self._on_each(Models.update, self._shares(part, bound))
            bound = math.inf  # later ones compare other weights
            metrics.append(measured)
            outcomes |= {one.group: done[0].outcome for one in part if outcomes[one.group] != "updated"}
            if any(update.is_faulty for update in done):
                faults.append(guards.first_fault(part, done))
                if keep is not None:
                    guards.keep_batch(keep, part, faults[-1], self.tokenizer.decode)
            if measured.get("train/policy_kl", 0.0) > stop_kl:
                break
        self.untrained = {group: NO_UPDATE[how] for group, how in outcomes.items() if how != "updated"}
        self._together(Models.end_step)
        seconds = note("time/train", start)
        measured = over_updates(metrics, seconds, by_batch="old_logprobs" in self.models.columns)
        measured |= {"train/learning_rate": learning_rate, "time/train": seconds}
        if len(faults) == len(metrics):
            self._count_skipped(faults[-1], keep)
        elif measured["train/skipped"] < 1:  # else by too high a loss scale
            self._skipped_in_row = 0
        if measured["train/mfu"] > 1:  # the peak was measured while others used the cores
            self.models.peak_flops *= measured["train/mfu"]
            measured["train/mfu"] = 1.0
        return measured

    def pass_step(self) -> None:
        """Count a step of the run without a signal: the learning rate goes by steps."""
        self._together(Models.end_step)

    def _count_skipped(self, fault: str, keep: Path | None) -> None:
        self._skipped_in_row += 1
        if self._skipped_in_row >= guards.MAX_SKIPPED_STEPS:
            raise TrainerError(
                f"the optimiser skipped {self._skipped_in_row} steps in a row, as loss or gradient was not finite; "
                f"the first fault of the last one (the samples: {keep}): {fault}"
            )

    def measure(self, sequences: Sequence[TokenSequence]) -> list[Columns]:
        """Return what the algorithm needs of each sequence before the step; [] for nothing."""
        extras = self._objective.extras
        if not extras:
            return []
        names = tuple(extra.column for extra in extras if extra.load)
        found: list[Columns] = [{} for _ in sequences]
        used = [place for place, sequence in enumerate(sequences) if is_measured(sequence, self._config.algorithm)]
        samples = [
            TrainSample(sequence=sequences[place], advantages=(0.0,) * len(sequences[place].token_ids))
            for place in used
        ]
        if samples:
            for index, columns in self._on_each(Models.numbers, self._shares(samples, names)).items():
                found[used[index]] = columns
            for extra in extras:
                if extra.ask:
                    told = run(extra.ask([sequences[place] for place in used], self._config.token))
                    for place, values in zip(used, told, strict=True):
                        found[place] = {**found[place], extra.column: values}
        return found

    def logprobs(self, samples: Sequence[TrainSample]) -> list[Sequence[float]]:
        """Return the log-probs of each sample's tokens, 0 where its mask is False."""
        return [columns["logprobs"] for columns in self.numbers(samples)]

    def numbers(self, samples: Sequence[TrainSample]) -> list[Columns]:
        """Return "logprobs" and "entropy" of each sample's tokens."""
        found = self._on_each(Models.numbers, self._shares(samples))
        return [found[place] for place in range(len(samples))]

    def evaluate(self, samples: Sequence[TrainSample]) -> dict[str, float]:
        """Return "loss" and metrics of the objective, as `Update.totals`."""
        return dict(self._on_each(Models.evaluate, self._shares(samples)))

    def surprise(self, samples: Sequence[TrainSample]) -> list[float]:
        """Return sums over sampled tokens, which no sample is without, as `Models.surprise`."""
        return list(self._on_each(Models.surprise, self._shares(samples)))

    def _shares(self, samples: Sequence[TrainSample], *more: Any) -> list[tuple[Any, ...]]:
        """Return each rank's share of the samples, and what all get."""
        self.check_fits(samples)
        copies = self._config.trainer.sequence_parallel
        shares = batching.divide(
            samples,
            micro_batch_tokens=self.micro_batch_tokens,
            num_ranks=self.ranks.size // copies,
            row_tokens=self.models.row_tokens,
            cost=functools.cache(lambda length: flops.step_flops(self.models.flops, [length], length)),
            **self.models.packing,
        )
        return [(share, *more) for share in shares for _ in range(copies)]

    def forget(self) -> None:
        """Let go of what has been measured for the last time: models beside the policy that don't learn."""
        self._together(Models.forget)

    def export(self, folder: Path) -> dict[str, TensorSpec]:
        """Write the weights as published; return the specs of the tensors in memory."""
        named: list[tuple[str, Tensor]] = []

        def take(bucket: Sequence[tuple[str, Tensor]]) -> None:
            copies = self.engine.stage == 3  # at other stages a tensor outlives its bucket
            named.extend((name, tensor.to("cpu", copy=copies)) for name, tensor in bucket)

        self._together(Models.stream, EXPORT_BYTES, False, sink=take)
        return self.policy.write(folder, named, self.tokenizer, self.models.setup.dtype)

    def layout(self, max_bytes: int, *, trained: bool = False) -> list[list[TensorLayout]]:
        """Describe the buckets that `stream` will give."""
        buckets = self.engine.layout(max_bytes, trained=trained)
        return [nccl.layout(self.policy.as_published(bucket)) for bucket in buckets]

    def stream(self, max_bytes: int, sink: Sink, *, trained: bool = False) -> None:
        """Give `sink` the weights, or the trained ones, in buckets of about max_bytes.

        Its error leaves the trainer usable.
        """
        with _deferring(lambda bucket: sink(self.policy.as_published(bucket))) as take:
            self._together(Models.stream, max_bytes, trained, sink=take)

    def state(self, sink: Sink) -> dict[str, Any]:
        """Give `sink` a checkpoint's tensors, float32 on the CPU, in buckets; return the rest for JSON."""
        with _deferring(sink) as take:
            engines = self._together(Models.state, sink=take)
        return {
            "engines": engines,
            "skipped_in_row": self._skipped_in_row,
            "micro_batch": {"tokens": self.micro_batch_tokens, "measured_for": self.models.fitted_for},
            "dtype": manifest.dtype_name(self.models.setup.dtype),
        }

    def restore(self, saved: SavedTensors, rest: Mapping[str, Any]) -> None:
        """Restore what `state` gave; raise TrainerError, before anything changes, for another model's."""
        expected: dict[str, tuple[int, ...]] = {}
        for learner in self.models.learners:
            expected |= learner.engine.shapes()
        saved.check(expected)
        self._together(Models.restore, rest, read=saved.read)
        self._skipped_in_row = rest["skipped_in_row"]

    def offload(self) -> None:
        """Move all training state to CPU memory."""
        if self._refusal != AWAY:
            self._together(Models.offload)
            self._refusal = AWAY

    def onload(self) -> None:
        """Move it back, bit for bit."""
        if self._refusal == AWAY:
            self._refusal = ""
            self._together(Models.onload)


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
