"""The trainer: rank 0 calls its methods, and all ranks run those marked `on_all_ranks`."""

import contextlib
import functools
import itertools
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

from torch import Tensor

from hocket.algorithm.samples import is_measured
from hocket.common.machine import cpu_threads, return_freed_memory
from hocket.common.tasks import seed_of
from hocket.config import Config
from hocket.data import tokenizer as tokenizers
from hocket.errors import ServerError, TrainerError
from hocket.observe.metrics import over_updates
from hocket.protocol import Health, TensorLayout, TensorSpec, manifest, weight_group
from hocket.trainer import batching, flops, guards, offload
from hocket.trainer.logprobs import CHUNK_TOKENS
from hocket.trainer.models import Models, Objective, configured
from hocket.trainer.ranks import Ranks
from hocket.trainer.state import BUCKET_BYTES, POLICY, SavedTensors
from hocket.trainer.step import Update, update
from hocket.types import Columns, TokenSequence, TrainSample

F = TypeVar("F", bound=Callable[..., Any])
Sink = Callable[[Any], None]  # takes one bucket: [(name, tensor)] of weights, {name: tensor} of a checkpoint
NO_UPDATE = {
    "stopped": "stop_kl ended the step before its update",
    "skipped": "its update was not finite",
    "idle": "only the critic learnt: critic.warmup_steps",
}
EXPORT_BYTES = 64 << 20  # that ZeRO-3 gathers at a time for an export


def on_all_ranks(method: F) -> F:
    """Run a method on all ranks when rank 0 calls it: rank r gets item r of a list, rank 0 alone a function."""
    name = method.__name__

    @functools.wraps(method)
    def call(trainer: "Trainer", /, *args: Any) -> Any:
        trainer._check(name)  # before the others start: its error leaves all ranks usable
        trainer._broken = True  # until the work has ended well
        calls = [(name, [_of_rank(value, rank) for value in args]) for rank in range(trainer.ranks.size)]
        trainer.ranks.send(calls)
        return trainer._run(*calls[0])

    return cast(F, call)


def _of_rank(value: Any, rank: int) -> Any:
    if isinstance(value, list):
        return value[rank]
    return None if rank and callable(value) else value


class Trainer(contextlib.AbstractContextManager["Trainer"]):
    """Trains the model on samples. Every rank constructs it; rank 0 calls its methods, the others `follow`.

    Any thread may call them, one at a time. An error within a method `on_all_ranks` ends all ranks.
    `objective`: the algorithm's by default; `ranks` that are given stay open.
    """

    def __init__(self, config: Config, *, objective: Objective | None = None, ranks: Ranks | None = None) -> None:
        self._owns_ranks = ranks is None
        self._closed = self._broken = False
        threads = cpu_threads(config.model.path, processes=int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        self.ranks = ranks or Ranks(config.sync.collective_timeout_s, threads)
        self.is_main, self.device = self.ranks.is_main, self.ranks.device
        self._config, self._algorithm = config.trainer, config.algorithm
        self._objective = objective or configured(config)
        self._skipped_in_row = 0
        self._longest = 1  # positions of this rank's longest sequence in the work of now
        self.micro_batch_tokens = CHUNK_TOKENS  # of the first rehearsal
        self.untrained: dict[int, str] = {}  # groups that no update of the last step has trained, with the reason
        self._away: offload.Offloaded | None = None
        self._failure: Exception | None = None  # of rank 0's disk, or of its sink
        try:
            with self._naming_memory("start"):
                self.tokenizer = tokenizers.load(config.model.path)
                self.models = Models(config, self.ranks, self._objective)
        except BaseException:
            if self._owns_ranks:
                self.ranks.destroy()
            raise
        self.policy, self.engine = self.models.policy, self.models.engine
        self.micro_batch_tokens = self.models.micro_batch_tokens
        self.adapter = self.policy.weights.adapter

    def __exit__(self, kind: object, cause: BaseException | None, trace: object) -> None:
        try:
            self.close()
        except TrainerError:
            if cause is None:  # else it follows from the cause
                raise

    def follow(self) -> None:
        """Run rank 0's calls until it closes. Raise TrainerError if rank 0 dies."""
        while not self._closed:
            self._run(*self.ranks.receive())

    def close(self) -> None:
        """Release all ranks; after a failure within the common work only if this is one alone."""
        if self.is_main and not (self._closed or self._broken):
            self._close()
        elif self._broken and self._owns_ranks and self.ranks.size == 1:  # this process may train again
            self.ranks.destroy()

    @on_all_ranks
    def _close(self) -> None:
        for engine in self.models.saved.values():
            engine.close()
        if self._owns_ranks:
            self.ranks.close()
        self._closed = True

    def _check(self, name: str) -> None:
        problem = None
        if self._closed or self._broken:
            problem = "it is closed, or broke in an earlier call"
        elif not self.is_main:
            problem = f"this is rank {self.ranks.rank}, and ranks above 0 only follow"
        elif self._away is not None and name not in ("offload", "onload", "_close"):
            problem = "it is off the GPU; call onload() first"
        if problem is not None:
            raise TrainerError(f"the trainer can't {name.strip('_')}: {problem}")

    def _run(self, name: str, args: Sequence[Any]) -> Any:
        self._broken = True
        self._longest = 0
        self.ranks.use_this_thread()
        work = name.strip("_")
        with self.ranks.deadline(f"doing the common {work}"), self._naming_memory(work):
            result = getattr(Trainer, name).__wrapped__(self, *args)
        self._broken = False
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        return result

    @contextlib.contextmanager
    def _naming_memory(self, work: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if not guards.is_out_of_memory(error):
                raise
            raise guards.out_of_memory(
                error,
                self._config,
                micro_batch_tokens=self.micro_batch_tokens,
                work=work,
                longest=self._longest,
                on_gpu=self.device.type == "cuda",
            ) from error

    @contextlib.contextmanager
    def _of_rank_0(self) -> Iterator[None]:
        """Context whose error is raised after the common work, in which the others need rank 0."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - raised by `_run`
            self._failure = error

    def _give(self, buckets: Iterable[Any], sink: Sink | None) -> None:
        for bucket in buckets:
            if sink is not None and self._failure is None:
                with self._of_rank_0():
                    sink(bucket)

    @property
    def num_parameters(self) -> int:
        return sum(int(getattr(p, "ds_numel", p.numel())) for p in self.policy.parameters())

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

    def check_same_model(self, health: Health) -> None:
        """Raise ServerError for a server with another vocabulary or tokenizer."""
        vocab_size = self.policy.vocab_size
        if health.vocab_size != vocab_size:
            differ = f"embeds {health.vocab_size} tokens and the trainer's model {vocab_size}"
        elif health.tokenizer_sha256 != tokenizers.fingerprint(self.tokenizer):
            differ = "has another tokenizer than the trainer's model"
        else:
            return
        advice = "start both with the same model.path"
        raise ServerError(f"the server serves {health.model}, which {differ}; {advice}", code="other_model")

    def step(self, samples: Sequence[TrainSample], *, number: int = 0, keep: Path | None = None) -> dict[str, float]:
        """Take the updates of step `number` of the run and return the means of their metrics.

        An update is an optimiser step on one mini-batch, skipped where it is not finite. Raise TrainerError after too
        many steps without one. `keep`: file for the samples of the last skipped one.
        """
        batching.check_fits(samples, self.micro_batch_tokens)
        start = time.perf_counter()
        learning_rate = self.engine.learning_rate if self.policy_learns else 0.0
        groups = [sample.group for sample in samples]
        outcomes = dict.fromkeys(groups, "stopped")
        updates: list[dict[str, Update]] = []
        metrics: list[dict[str, float]] = []
        faults: list[str] = []
        stop_kl = self._algorithm.stop_kl or math.inf
        seed = seed_of(self._config.seed, "minibatches", number)
        objective = self._objective
        for places in batching.minibatches(groups, epochs=objective.epochs, count=objective.minibatches, seed=seed):
            part = [samples[place] for place in places]
            done, measured = self._update(self._divide(part), tuple(map(batching.num_positions, part)))
            updates.append(done)
            metrics.append(measured)
            for sample in part:
                if outcomes[sample.group] != "updated":
                    outcomes[sample.group] = done[POLICY].outcome
            if any(update.is_faulty for update in done.values()):
                rates = {learner.name: learner.rate for learner in self.models.learners}
                faults.append(guards.first_fault(part, done, rates))
                if keep is not None:
                    guards.keep_batch(keep, part, faults[-1], self.tokenizer.decode)
            if measured.get("train/policy_kl", 0.0) > stop_kl:
                break
        self.untrained = {group: NO_UPDATE[how] for group, how in outcomes.items() if how != "updated"}
        changed = {name for done in updates for name, update in done.items() if update.outcome == "updated"}
        self._end_step(tuple(changed))
        self._count_skipped(updates, faults, keep)
        seconds = time.perf_counter() - start
        measured = over_updates(metrics, seconds, by_batch="old_logprobs" in self.models.columns)
        measured |= {"train/learning_rate": learning_rate, "time/train": seconds}
        if measured["train/mfu"] > 1:  # the peak was measured while others used the cores
            self.models.peak_flops *= measured["train/mfu"]
            measured["train/mfu"] = 1.0
        return measured

    def _count_skipped(self, updates: Sequence[Mapping[str, Update]], faults: list[str], keep: Path | None) -> None:
        if len(faults) < len(updates):
            if any(done[POLICY].outcome != "skipped" for done in updates):
                self._skipped_in_row = 0
            return
        self._skipped_in_row += 1
        if self._skipped_in_row >= guards.MAX_SKIPPED_STEPS:
            kept = f" (the samples: {keep})" if keep is not None else ""
            raise TrainerError(
                f"the optimiser skipped {self._skipped_in_row} steps in a row, as loss or gradient was not finite; "
                f"the first fault of the last one{kept}: {faults[-1]}"
            )

    @on_all_ranks
    def plan(self, steps: int) -> None:
        """Have the learning rate's schedule end after `steps`, not trainer.steps; call it first."""
        self.engine.plan(steps)

    @on_all_ranks
    def _end_step(self, names: Sequence[str]) -> None:
        for name in names:
            self.models.saved[name].end_step()
        if self.device.type == "cpu":
            return_freed_memory()

    @on_all_ranks
    def _update(self, share: Any, lengths: Sequence[int]) -> tuple[dict[str, Update], dict[str, float]]:
        batches = self._built(share)
        loss_scale = self.engine.loss_scale
        done = {learner.name: update(learner, batches, self.ranks) for learner in self.models.learners}
        policy = done[POLICY]
        num_tokens = batches[0].num_tokens_global
        metrics = {
            **policy.totals,
            "grad_norm": policy.grad_norm,
            "skipped": float(policy.outcome == "skipped"),
            "updates": float(policy.outcome != "idle"),
            "tokens": float(num_tokens),
            "sequences": float(batches[0].num_sequences_global),
            "micro_batches": float(len(batches)),
            "positions": float(sum(lengths)),
            "seconds_at_peak": flops.step_flops(self.models.flops, lengths, num_tokens) / self.models.peak_flops,
        }
        if loss_scale is not None:
            metrics["loss_scale"] = loss_scale
        named = {f"train/{name}": value for name, value in metrics.items()}
        for learner in self.models.learners:
            named |= learner.metrics(done[learner.name])
        return done, named

    def measure(self, sequences: Sequence[TokenSequence]) -> list[Columns]:
        """Return what the algorithm needs of each sequence before the step; [] where it needs nothing."""
        if not self.models.columns:
            return []
        found: list[Columns] = [{} for _ in sequences]
        used = [place for place, sequence in enumerate(sequences) if is_measured(sequence, self._algorithm)]
        samples = [
            TrainSample(sequence=sequences[place], advantages=(0.0,) * len(sequences[place].token_ids))
            for place in used
        ]
        if samples:
            for index, columns in self._numbers(self._divide(samples), False).items():
                found[used[index]] = columns
        return found

    def logprobs(self, samples: Sequence[TrainSample]) -> list[tuple[float, ...]]:
        """Return the log-probs of each sample's tokens, 0 where its mask is False."""
        numbers = self._numbers(self._divide(samples), True)
        return [numbers[place]["logprobs"] for place in range(len(samples))]

    def surprise(self, samples: Sequence[TrainSample]) -> list[float]:
        """Return what `Models.surprise` does of these samples, which all have a sampled token."""
        return self._surprise(self._divide(samples))

    @on_all_ranks
    def _surprise(self, share: Any) -> list[float]:
        return self.models.surprise(self._built(share))

    @on_all_ranks
    def _numbers(self, share: Any, of_policy: bool) -> dict[int, dict[str, tuple[float, ...]]]:
        columns = {"logprobs": self.models.logprobs} if of_policy else self.models.columns
        return self.models.numbers(self._built(share), columns)

    def _divide(self, samples: Sequence[TrainSample]) -> list[list[batching.Make]]:
        batching.check_fits(samples, self.micro_batch_tokens)
        return batching.divide(
            samples,
            micro_batch_tokens=self.micro_batch_tokens,
            num_ranks=self.ranks.size,
            cost=lambda length: flops.step_flops(self.models.flops, [length], length),
        )

    def _built(self, share: Sequence[batching.Make]) -> list[batching.TrainBatch]:
        batches = [make(self.device) for make in share]
        self._longest = max(batch.segments.longest for batch in batches)
        return batches

    @on_all_ranks
    def export(self, folder: Path) -> dict[str, TensorSpec]:
        """Write the weights as published; return the specs of the tensors in memory."""
        named = [
            (name, tensor.to("cpu", copy=self.engine.stage == 3))  # at other stages the tensor outlives its bucket
            for bucket in self.engine.buckets(EXPORT_BYTES)
            for name, tensor in bucket
        ]
        specs: dict[str, TensorSpec] = {}
        if self.is_main:
            with self._of_rank_0():
                specs = self.policy.write(folder, named, self.tokenizer, self.models.dtype)
        return specs

    def layout(self, max_bytes: int) -> list[list[TensorLayout]]:
        """Describe the buckets that `stream` will give; rank 0 alone can."""
        return [weight_group.layout(self.policy.as_published(bucket)) for bucket in self.engine.layout(max_bytes)]

    @on_all_ranks
    def stream(self, max_bytes: int, sink: Sink | None) -> None:
        """Give the weights to `sink` in buckets of about max_bytes; its error leaves the trainer usable."""
        self._give((self.policy.as_published(bucket) for bucket in self.engine.buckets(max_bytes)), sink)

    @on_all_ranks
    def state(self, sink: Sink | None) -> dict[str, Any]:
        """Give a checkpoint's tensors, float32 on the CPU, to `sink` in buckets; return the rest for JSON."""
        for name, engine in self.models.saved.items():
            buckets = engine.state(BUCKET_BYTES)
            self._give(({f"{name}/{key}": tensor for key, tensor in bucket.items()} for bucket in buckets), sink)
        return {
            "engines": {name: engine.counters() for name, engine in self.models.saved.items()},
            "skipped_in_row": self._skipped_in_row,
            "micro_batch": {"tokens": self.micro_batch_tokens, "measured_for": self.models.fitted_for},
            "dtype": manifest.dtype_name(self.models.dtype),
        }

    def restore(self, saved: SavedTensors, rest: Mapping[str, Any]) -> None:
        """Restore what `state` gave. Raise TrainerError, before anything changes, where it is of another model."""
        engines = self.models.saved.items()
        saved.check({f"{name}/{key}": shape for name, engine in engines for key, shape in engine.shapes().items()})
        self._restore(saved.read, rest)

    @on_all_ranks
    def _restore(self, read: Callable[..., Tensor] | None, rest: Mapping[str, Any]) -> None:
        for name, engine in self.models.saved.items():
            engine.restore(functools.partial(read, name) if read else None, rest["engines"][name])
        self._skipped_in_row = rest["skipped_in_row"]
        if self.models.fitted_for is not None and self.models.fitted_for == rest["micro_batch"]["measured_for"]:
            self.micro_batch_tokens = rest["micro_batch"]["tokens"]  # other sizes would sum in another order

    @on_all_ranks
    def offload(self) -> None:
        """Move all training state to CPU memory. May be repeated."""
        if self._away is None:
            engines = self.models.engines.values()
            self._away = offload.offload(itertools.chain(*(engine.tensors() for engine in engines)), self.device)

    @on_all_ranks
    def onload(self) -> None:
        """Move it back, bit for bit. May be repeated."""
        if self._away is not None:
            offload.onload(self._away, self.device)
            self._away = None
