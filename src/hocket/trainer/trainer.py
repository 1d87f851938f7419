"""The trainer: rank 0 calls its methods, and all ranks run those that are marked `on_all_ranks`.

What happens in one optimiser step is in step.py, how samples become micro-batches in batching.py.
"""

import concurrent.futures
import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from hocket import manifest, weight_group
from hocket import tokenizer as tokenizers
from hocket.algorithm.diagnostics import effective_sample_size
from hocket.algorithm.samples import Measured, is_measured
from hocket.config import Config
from hocket.errors import TrainerError
from hocket.observe.metrics import StepStats
from hocket.protocol import AdapterConfig, Health, TensorLayout, TensorSpec
from hocket.trainer import flops, guards, lora
from hocket.trainer.batching import TrainBatch, check_fits, num_positions, pack, unpack
from hocket.trainer.critic import critic_metrics
from hocket.trainer.models import BatchLoss, Models
from hocket.trainer.on_all_ranks import OnAllRanks, in_words, on_all_ranks
from hocket.trainer.policy import unshared, write_model
from hocket.trainer.ranks import Ranks, randomness, restore_randomness
from hocket.trainer.state import BUCKET_BYTES, POLICY, SavedTensors
from hocket.trainer.step import Update, update
from hocket.types import TokenSequence, TrainSample

Sink = Callable[[Any], None]
"""Takes one bucket: [(name, tensor)] of weights, {name: tensor} of a checkpoint."""
EXPORT_BYTES = 64 << 20
"""ZeRO-3 gathers parameters for export in groups of this size."""


def _check_fits(trainer: "Trainer", samples: Sequence[TrainSample]) -> None:
    check_fits(samples, trainer.micro_batch_tokens)


class Trainer(OnAllRanks):
    """Trains the model on samples. Every rank constructs it; rank 0 calls its methods, the others `follow`.

    Args:
        loss: default: the configured policy loss, with the reference policy and the critic that it needs.
        temperature: logits are divided by it; default: rollout.temperature.
        ranks: shared with others; default: new ones.
    """

    def __init__(
        self,
        config: Config,
        *,
        loss: BatchLoss | None = None,
        temperature: float | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        super().__init__(ranks, timeout_s=config.trainer.collective_timeout_s)
        self._config, self._algorithm = config.trainer, config.algorithm
        self._away, self._skipped_in_row = False, 0
        self._sink: Sink | None = None  # on rank 0: takes the buckets of `stream` and `state`
        self._sink_error: Exception | None = None
        self._saved: SavedTensors | None = None  # on rank 0: what `restore` reads
        try:
            self.tokenizer = tokenizers.load(config.model.path)
            temperature = config.rollout.temperature if temperature is None else temperature
            self.models = models = Models(config, self.ranks, loss=loss, temperature=temperature)
        except BaseException:
            if self._owns_ranks:
                self.ranks.destroy()
            raise
        self.policy, self.engine, self.micro_batch_tokens = models.policy, models.engine, models.micro_batch_tokens

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.ranks.device

    @property
    def num_parameters(self) -> int:
        """Parameters of the model, tied ones counted once."""
        return sum(int(getattr(p, "ds_numel", p.numel())) for p in self.policy.parameters())

    @property
    def memory(self) -> str:
        """The memory estimate of a step and, with trainer.micro_batch_tokens=auto, the size found, as one sentence."""
        found = f"; trainer.micro_batch_tokens=auto is {self.micro_batch_tokens}" if self.models.fitted_for else ""
        return f"a step needs {self.models.estimate}{found}"

    @property
    def adapter(self) -> AdapterConfig | None:
        """The adapter that is trained; None where all weights are."""
        return self.policy.adapter

    def check_same_model(self, health: Health) -> None:
        """Raise TrainerError where the server's vocabulary or tokenizer is not the trainer's."""
        vocab_size = self.policy.vocab_size
        if (health.vocab_size, health.tokenizer_sha256) != (vocab_size, tokenizers.fingerprint(self.tokenizer)):
            raise TrainerError(
                f"the server serves {health.model} (vocabulary {health.vocab_size}), which is not the trainer's model "
                f"or tokenizer (vocabulary {vocab_size}); start both with the same model.path"
            )

    def step(self, samples: Sequence[TrainSample], *, keep: Path | None = None) -> StepStats:
        """Take one optimiser step on all samples; skip it where loss or gradient is not finite.

        Args:
            keep: file for the samples of a skipped step, with what was not finite.

        Raises:
            TrainerError: no sample, a sample too long for a micro-batch, or too many skipped steps in a row.
        """
        stats, fault = self._step(tuple(samples))
        if fault is not None:
            if keep is not None:
                guards.keep_batch(keep, samples, fault, self.tokenizer.decode)
            if self._skipped_in_row >= guards.MAX_SKIPPED_STEPS:
                kept = f" (the samples: {keep})" if keep is not None else ""
                raise TrainerError(
                    f"{self._skipped_in_row} steps in a row were skipped because loss or gradient was not finite; "
                    f"not finite in the last one{kept}: {fault}. {fault.advice}"
                )
        return stats

    @on_all_ranks(refuse=_check_fits)
    def _step(self, samples: Sequence[TrainSample]) -> tuple[StepStats, guards.Fault | None]:
        start = time.perf_counter()
        batches = self._pack(samples)
        loss_scale = self.engine.loss_scale
        learners = self.models.learners()
        learning_rate = self.engine.learning_rate if learners[0].learns() else 0.0
        updates = {learner.name: update(learner, batches, self.ranks) for learner in learners}
        policy = updates[POLICY]
        fault = None
        if any(done.is_faulty for done in updates.values()):
            self._skipped_in_row += 1
            fault = self._fault(samples, batches, updates)
        elif policy.grad_norm is not None:
            self._skipped_in_row = 0
        metrics = dict(policy.totals)
        loss = metrics.pop("loss")
        if loss_scale is not None:
            metrics["loss_scale"] = loss_scale
        if "importance_square" in metrics:
            metrics["ess"] = effective_sample_size(metrics)
            del metrics["importance_square"]
        lengths = [num_positions(sample) for sample in samples]
        num_tokens, seconds = batches[0].num_tokens_global, time.perf_counter() - start
        stats = StepStats(
            loss=loss,
            grad_norm=math.nan if policy.grad_norm is None else policy.grad_norm,
            learning_rate=learning_rate,
            skipped=policy.grad_norm is None,
            metrics=metrics,
            critic=critic_metrics(updates["critic"]) if "critic" in updates else {},
            num_tokens=num_tokens,
            num_positions=sum(lengths),
            num_sequences=batches[0].num_sequences_global,
            num_micro_batches=len(batches),
            mfu=flops.step_flops(self.models.flops, lengths, num_tokens) / (seconds * self.models.peak_flops),
            seconds=seconds,
        )
        return stats, fault

    def _fault(
        self, samples: Sequence[TrainSample], batches: Sequence[TrainBatch], updates: Mapping[str, Update]
    ) -> guards.Fault:
        """Return what was not finite; a model whose update was skipped computes the same numbers again."""
        columns: dict[str, Callable[[TrainBatch], Tensor]] = {}
        if updates[POLICY].is_faulty:
            columns["logprobs"] = lambda batch: self.engine.forward(batch)[0]
        if self.models.critic is not None and updates["critic"].is_faulty:
            columns["values"] = self.models.critic.values
        prefixes = {POLICY: "", "critic": "critic: "}
        return guards.Fault(
            samples,
            computed=self._numbers(batches, columns),
            totals={f"{prefixes[name]}{key}": v for name, done in updates.items() for key, v in done.totals.items()},
            gradients=[f"{prefixes[name]}{key}" for name, done in updates.items() for key in done.bad_gradients],
        )

    def measure(self, sequences: Sequence[TokenSequence]) -> list[Measured]:
        """Return per sequence what the algorithm needs to know before the step; [] where it needs nothing.

        Sequences that the algorithm doesn't use are not computed: their Measured is empty.

        Raises:
            TrainerError: a sequence is too long for a micro-batch.
        """
        if not sequences or not self.models.columns:
            return []
        used = [index for index, sequence in enumerate(sequences) if is_measured(sequence, self._algorithm)]
        measured = [Measured()] * len(sequences)
        if used:
            own = [sequences[index] for index in used]
            numbers = self._measure(tuple(TrainSample(sequence=s, advantages=(0.0,) * len(s.token_ids)) for s in own))
            for place, index in enumerate(used):
                measured[index] = Measured(**numbers[place])
        return measured

    @on_all_ranks(refuse=_check_fits)
    def _measure(self, samples: Sequence[TrainSample]) -> dict[int, dict[str, tuple[float, ...]]]:
        return self._numbers(self._pack(samples), self.models.columns)

    @torch.no_grad()
    def _numbers(
        self, batches: Sequence[TrainBatch], columns: Mapping[str, Callable[[TrainBatch], Tensor]]
    ) -> dict[int, dict[str, tuple[float, ...]]]:
        """Return on rank 0 the columns' numbers per token, by the place of the sample; elsewhere nothing."""
        batches = [batch.to(self.ranks.device) for batch in batches]
        own = unpack(batches, {name: [column(batch) for batch in batches] for name, column in columns.items()})
        return {index: numbers for share in self.ranks.gather(own) for index, numbers in share.items()}

    def _pack(self, samples: Sequence[TrainSample]) -> list[TrainBatch]:
        """Return this rank's micro-batches."""
        return pack(
            samples,
            micro_batch_tokens=self.micro_batch_tokens,
            num_ranks=self.ranks.size,
            cost=lambda length: flops.step_flops(self.models.flops, [length], length),
        )[self.ranks.rank]

    @on_all_ranks(refuse=_check_fits)
    @torch.no_grad()
    def logprob_gap(self, samples: Sequence[TrainSample]) -> float:
        """Return the mean absolute difference of the engine's log-probs and the trainer's, over the sampled tokens."""
        total = 0.0
        for batch in self._pack(samples):
            batch = batch.to(self.ranks.device)
            logprobs_bt, _ = self.engine.forward(batch)
            gap_bt = (logprobs_bt - batch.rollout_logprobs_bt).where(batch.mask_bt, 0.0)
            total += float(gap_bt.double().abs().sum()) / batch.num_tokens_global
        return self.ranks.sum([total])[0]

    def export(self, folder: Path) -> dict[str, TensorSpec]:
        """Write the weights in Hugging Face format (an adapter: PEFT's) in the compute dtype, with the tokenizer.

        Returns:
            The specs of the tensors in memory, with which a reader can check the files.

        Raises:
            OSError, SafetensorError: the disk can't be written; the trainer stays usable.
        """
        written = self._export(folder)
        if isinstance(written, Exception):
            raise written
        return written

    @on_all_ranks()
    def _export(self, folder: Path) -> dict[str, TensorSpec] | Exception:
        named = [
            (name, tensor.to("cpu", copy=self.engine.stage == 3))  # at other stages the tensor outlives its bucket
            for bucket in self.engine.buckets(EXPORT_BYTES)
            for name, tensor in bucket
        ]
        if not self.is_main:
            return {}
        published = unshared(dict(self.policy.as_published(named)))  # DeepSpeed's are parts of one
        with concurrent.futures.ThreadPoolExecutor(1) as checksums:  # of the tensors, while they are written
            specs = checksums.submit(manifest.specs, published.items())
            try:
                if self.adapter is not None:
                    lora.save(folder, self.adapter, published)
                else:
                    write_model(folder, self.policy.model, self.tokenizer, published, self.models.dtype)
            except (OSError, SafetensorError) as error:  # of rank 0's disk alone
                return error
        return specs.result()

    def layout(self, max_bytes: int) -> list[list[TensorLayout]]:
        """Describe the buckets that `stream` will give; rank 0 alone can."""
        return [weight_group.layout(self.policy.as_published(bucket)) for bucket in self.engine.layout(max_bytes)]

    def stream(self, max_bytes: int, sink: Sink) -> None:
        """Give the weights to `sink` in buckets of about max_bytes at most, on the trainer's device.

        An error of the sink is raised here, once the ranks have gathered the rest.
        """
        with self._filling(sink):
            self._stream(max_bytes)

    @on_all_ranks()
    def _stream(self, max_bytes: int) -> None:
        for bucket in self.engine.buckets(max_bytes):
            self._give(self.policy.as_published(bucket))

    def state(self, sink: Sink) -> dict[str, Any]:
        """Give the tensors of a checkpoint to `sink`, bucket by bucket, and return the rest, ready for JSON.

        Tensors are copies in CPU memory, whole and float32, for any number of ranks and any ZeRO stage. An error of the
        sink is raised here, once the ranks have gathered the rest.
        """
        with self._filling(sink):
            return self._state()

    @on_all_ranks()
    def _state(self) -> dict[str, Any]:
        engines = self.models.saved()
        for name, engine in engines.items():
            for bucket in engine.state(BUCKET_BYTES):
                self._give({f"{name}/{key}": tensor for key, tensor in bucket.items()})
        return {
            "engines": {name: engine.counters() for name, engine in engines.items()},
            "skipped_in_row": self._skipped_in_row,
            "micro_batch": {"tokens": self.micro_batch_tokens, "measured_for": self.models.fitted_for},
            "random": self.ranks.gather(randomness(self.ranks.device)),
            "dtype": manifest.dtype_name(self.models.dtype),
            "adapter": None if self.adapter is None else self.adapter.model_dump(),
        }

    def restore(self, saved: SavedTensors, rest: Mapping[str, Any]) -> None:
        """Restore what `state` gave, on any number of ranks and at any ZeRO stage.

        Raises:
            TrainerError: the state is of another model; nothing has changed.
        """
        engines = self.models.saved().items()
        saved.check({f"{name}/{key}": shape for name, engine in engines for key, shape in engine.shapes().items()})
        self._saved = saved  # rank 0 alone reads: open files can't be sent
        self._restore(rest)
        self._saved = None

    @on_all_ranks()
    def _restore(self, rest: Mapping[str, Any]) -> None:
        for name, engine in self.models.saved().items():
            engine.restore(functools.partial(self._read, name), rest["engines"][name])
        self._skipped_in_row = rest["skipped_in_row"]
        if self.models.fitted_for is not None and self.models.fitted_for == rest["micro_batch"]["measured_for"]:
            self.micro_batch_tokens = rest["micro_batch"]["tokens"]  # other sizes would sum in another order
        if self.ranks.rank < len(rest["random"]):
            restore_randomness(rest["random"][self.ranks.rank], self.ranks.device)

    def _read(self, engine: str, key: str) -> Tensor:
        assert self._saved is not None, "rank 0 names the checkpoint before all ranks restore it"
        return self._saved.read(f"{engine}/{key}")

    @contextmanager
    def _filling(self, sink: Sink) -> Iterator[None]:
        """Context in which `_give` fills rank 0's sink; raise the sink's error at its end."""
        self._sink, self._sink_error = sink, None
        yield
        self._sink = None
        if self._sink_error is not None:
            raise self._sink_error

    def _give(self, bucket: Any) -> None:
        if self._sink is not None and self._sink_error is None:
            try:
                self._sink(bucket)
            except Exception as error:  # noqa: BLE001 - raised by `_filling`: the ranks must gather the rest
                self._sink_error = error

    @on_all_ranks()
    def offload(self) -> None:
        """Move all training state to CPU memory, so that others can use the GPU. May be repeated."""
        if not self._away:
            for engine in self.models.engines.values():
                engine.offload()
        self._away = True

    @on_all_ranks()
    def onload(self) -> None:
        """Move the training state back to the GPU, bit for bit. May be repeated."""
        if self._away:
            for engine in self.models.engines.values():
                engine.onload()
        self._away = False

    def release(self) -> None:
        """Release DeepSpeed's state."""
        for engine in self.models.engines.values():
            engine.close()

    def check_usable(self, name: str) -> None:
        """Raise TrainerError where the method can't run now."""
        super().check_usable(name)
        if self._away and name not in ("offload", "onload", "_close"):
            raise TrainerError(f"the trainer can't {in_words(name)}: it is off the GPU; call onload() first")

    def explain(self, error: Exception, name: str, args: tuple[Any, ...]) -> Exception:
        """Return for an out-of-memory error one that names the settings to change."""
        if not guards.is_out_of_memory(error):
            return error
        samples = args[0] if args and isinstance(args[0], tuple) else ()
        return guards.out_of_memory(
            error,
            self._config,
            micro_batch_tokens=self.micro_batch_tokens,
            work=in_words(name),
            longest=max(map(num_positions, samples), default=0),
            vocab_size=self.policy.vocab_size,
            on_gpu=self.device.type == "cuda",
        )
