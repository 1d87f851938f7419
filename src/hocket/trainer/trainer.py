"""The trainer as the loop sees it: one object on rank 0; the other ranks follow and do the same work."""

import concurrent.futures
import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError
from torch import Tensor

from hocket import manifest, transfer
from hocket import tokenizer as tokenizers
from hocket.algorithm.losses import LossConfig, LossOutput, effective_sample_size, policy_loss
from hocket.config import Config, ModelConfig, TrainerConfig
from hocket.errors import TrainerError
from hocket.manifest import dtype_name
from hocket.protocol import AdapterConfig, Health, TensorLayout, TensorSpec
from hocket.trainer import flops, guards, lora, measure, memory
from hocket.trainer.batching import TrainBatch, check_fits, num_positions, pack
from hocket.trainer.checkpoint import BUCKET_BYTES, POLICY, SavedTensors
from hocket.trainer.critic import Critic
from hocket.trainer.engine import DeepSpeedEngine, default_zero_stage
from hocket.trainer.frozen import FrozenEngine
from hocket.trainer.policy import Policy, compute_dtype, skeleton, unshared, write_model
from hocket.trainer.ranks import Ranks, randomness, restore_randomness
from hocket.trainer.reference import Reference
from hocket.trainer.update import Update, accumulate, update
from hocket.types import Measured, Rollout, StepStats, TrainSample

Bucket = Sequence[tuple[str, Tensor]]
Sink = Callable[[Bucket], None]
StateSink = Callable[[Mapping[str, Tensor]], None]
BatchLoss = Callable[[Tensor, Tensor, TrainBatch], LossOutput]
"""(logprobs_bt with gradient, entropy_bt, batch) → this micro-batch's share of the global loss."""
EXPORT_BYTES = 64 << 20
"""ZeRO-3 gathers parameters for export in groups of this size."""


def configured_loss(config: Config) -> BatchLoss:
    """Returns the configured policy loss as a function of a batch."""
    settings = LossConfig.of(config)

    def loss(logprobs_bt: Tensor, entropy_bt: Tensor, batch: TrainBatch) -> LossOutput:
        return policy_loss(
            logprobs_bt,
            batch.rollout_logprobs_bt,
            batch.advantages_bt,
            batch.mask_bt,
            config=settings,
            num_tokens=batch.num_tokens_global,
            num_sequences=batch.num_sequences_global,
            ref_logprobs_bt=batch.ref_logprobs_bt,
            entropy_bt=entropy_bt,
            sample_bt=batch.sample_bt,
        )

    return loss


class Trainer:
    """Trains the model on samples. Every rank constructs it; rank 0 calls its methods, the others `follow`.

    Each method runs on all ranks at the same time. What rank 0 can refuse alone it refuses before the others start, so
    that an error leaves everyone ready for `close`. An error within the common work ends the run: this process raises
    it, and the others notice that it is gone.

    Args:
        config: the run's config.
        loss: what is minimised; default: the configured policy loss, with the reference policy and the critic that the
            algorithm asks for.
        temperature: logits are divided by it; default: rollout.temperature.
        ranks: an existing connection to share, left open by `close`; default: a new one.

    Attributes:
        memory: in words, what a step was estimated to need.
    """

    def __init__(
        self,
        config: Config,
        *,
        loss: BatchLoss | None = None,
        temperature: float | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self._config = config.trainer
        self.tokenizer = tokenizers.load(config.model.path)
        self._owns_ranks = ranks is None
        self._ranks = ranks or Ranks(config.trainer.collective_timeout_s)
        self._loss = loss or configured_loss(config)
        self._beside: dict[str, DeepSpeedEngine | FrozenEngine] = {}  # models other than the policy
        self._reference: Reference | None = None
        self._critic: Critic | None = None
        self._measures: dict[str, Callable[[TrainBatch], Tensor]] = {}
        self._closed = self._broken = self._away = False
        self._skipped_in_row = 0
        self._sink: Sink | None = None
        self._state_sink: StateSink | None = None
        self._sink_failure: Exception | None = None

        try:
            self._build(
                config,
                temperature=config.rollout.temperature if temperature is None else temperature,
                alone=loss is not None,
            )
        except BaseException:
            if self._owns_ranks:
                self._ranks.destroy()
            raise

    def _build(self, config: Config, *, temperature: float, alone: bool) -> None:
        """Loads the policy and, unless it is alone, the models that the algorithm needs beside it."""
        device, ranks, algorithm = self._ranks.device, self._ranks, config.algorithm
        with_critic = algorithm.baseline == "critic" and not alone
        self._dtype = compute_dtype(config.model, device)
        self.memory = f"a step needs {self._estimate(config)}"
        trained_dtype = DeepSpeedEngine.parameter_dtype(config.trainer, dtype=self._dtype, device=device)

        def load(model: ModelConfig, kind: type[Policy] = Policy, dtype: torch.dtype = trained_dtype) -> Any:
            return kind(
                model,
                dtype=dtype,
                temperature=temperature,
                chunk_tokens=config.trainer.logprob_chunk_tokens,
                gradient_checkpointing=config.trainer.gradient_checkpointing,
                entropy_gradient=config.algorithm.entropy_coef > 0,
                seed=config.trainer.seed,
            )

        self._policy: Policy = load(config.model)
        self._flops = flops.model_flops(self._policy.model)
        own_steps = config.trainer.steps - (config.critic.warmup_steps if with_critic else 0)
        settings = config.trainer.model_copy(update={"steps": own_steps})
        with ranks.deadline("starting DeepSpeed"):
            (self._peak_flops,) = ranks.sum([flops.peak_flops(device, self._dtype)])
            self._engine = DeepSpeedEngine(self._policy, settings, dtype=self._dtype, ranks=ranks)
            self._policy.check_architecture(device)
            if algorithm.kl != "off" and not alone:
                self._reference = Reference(config, self._policy, self._engine, load, dtype=self._dtype, ranks=ranks)
                self._measures["ref_logprobs"] = self._reference.logprobs
                if self._reference.frozen is not None:
                    self._beside["reference"] = self._reference.frozen
            if with_critic:
                self._critic = Critic(config, load, dtype=self._dtype, ranks=ranks)
                self._measures["values"] = self._critic.values
                self._beside["critic"] = self._critic.engine
            if algorithm.top_entropy < 1 and not alone:
                self._measures["entropies"] = lambda batch: self._engine.forward(batch)[1]
            tokens = config.trainer.micro_batch_tokens
            self._micro_batch_tokens = self._as_many_as_fit() if tokens == "auto" else tokens

    def _estimate(self, config: Config) -> memory.Estimate:
        """Returns what a step needs. Raises ConfigError where the device has clearly less."""
        device = self._ranks.device
        model = memory.Model.of(skeleton(config.model), self._dtype)

        def needed(trainer: TrainerConfig) -> memory.Estimate:
            return memory.estimate(
                model,
                trainer,
                stage=default_zero_stage(trainer, device),
                num_ranks=self._ranks.size,
                offloads=trainer.offload_optimizer and device.type == "cuda",
            )

        return memory.check(needed, config.trainer, memory.available_bytes(device))

    def _as_many_as_fit(self) -> int:
        """Returns the micro-batch size that the memory of every rank has room for, by trying two sizes."""
        device = self._ranks.device
        size = max(512, self._config.logprob_chunk_tokens)
        if device.type == "cuda":
            self._rehearse(size)  # what libraries allocate once is not part of a micro-batch
        small, large = ((n, memory.peak_bytes(functools.partial(self._rehearse, n), device)) for n in (size, 2 * size))
        available = memory.available_bytes(device) - self._engine.bytes_to_come()
        tokens = self._ranks.smallest(memory.largest_micro_batch(small, large, available))
        if tokens < 2:
            raise TrainerError(
                "trainer.micro_batch_tokens=auto: not even one sequence fits into the memory that is left; set "
                "trainer.gradient_checkpointing=true, a smaller trainer.logprob_chunk_tokens, or take more ranks"
            )
        self.memory += f"; trainer.micro_batch_tokens=auto is {tokens}"
        return tokens

    def _rehearse(self, num_positions: int) -> None:
        """Runs forward and backward of made-up sequences; a gradient that is not finite changes nothing."""
        lengths = [32] * (num_positions // 32)
        samples = [
            TrainSample(
                token_ids=(0,) * (n + 1),
                mask=(True,) * (n + 1),
                rollout_logprobs=(0.0,) * (n + 1),
                advantages=(1.0,) * (n + 1),
            )
            for n in lengths
        ]
        [[batch]] = pack(samples, micro_batch_tokens=num_positions, num_ranks=1)
        batch = batch.to(self._ranks.device)
        self._engine.backward(self._policy_loss(batch).loss * math.nan, last=True)
        if self._engine.step() is not None:
            raise TrainerError(
                "the rehearsal of a step has changed the weights; set trainer.micro_batch_tokens to a number"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the only one that may call methods other than `follow`."""
        return self._ranks.is_main

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self._ranks.device

    @property
    def num_ranks(self) -> int:
        """Processes that train together."""
        return self._ranks.size

    @property
    def num_parameters(self) -> int:
        """Parameters of the model, tied ones counted once."""
        return sum(int(getattr(p, "ds_numel", p.numel())) for p in self._policy.parameters())

    @property
    def adapter(self) -> AdapterConfig | None:
        """What the adapter is that is trained, None where all weights are."""
        return self._policy.adapter

    def check_same_model(self, health: Health) -> None:
        """Raises TrainerError where the server's vocabulary or tokenizer is not the trainer's."""
        vocab_size = self._policy.vocab_size
        if (health.vocab_size, health.tokenizer_sha256) != (vocab_size, tokenizers.fingerprint(self.tokenizer)):
            raise TrainerError(
                f"the server serves {health.model} (vocabulary {health.vocab_size}), which is not the trainer's model "
                f"or tokenizer (vocabulary {vocab_size}); start both with the same model.path"
            )

    def step(self, samples: Sequence[TrainSample], *, keep: Path | None = None) -> StepStats:
        """Takes one optimiser step on all samples. A step that is not finite leaves the weights as they were.

        Args:
            keep: a file for the samples, written where such a step is skipped, with what was not finite in it.

        Raises:
            TrainerError: no sample, a sample too long for a micro-batch, or trainer.max_skipped_steps skipped in a row.
        """
        check_fits(samples, self._micro_batch_tokens)
        stats, fault = self._together("step", tuple(samples))
        if fault is not None:
            if keep is not None:
                guards.keep_batch(keep, samples, fault, self.tokenizer.decode)
            if self._skipped_in_row >= self._config.max_skipped_steps:
                kept = f" (the samples: {keep})" if keep is not None else ""
                raise TrainerError(
                    f"{self._skipped_in_row} steps in a row were skipped because loss or gradient was not finite; "
                    f"not finite in the last one{kept}: {fault}. {fault.advice}"
                )
        result: StepStats = stats
        return result

    def measure(self, rollouts: Sequence[Rollout]) -> list[Measured]:
        """Returns what the algorithm has to know of each rollout before the step, in their order; [] where nothing.

        Raises:
            TrainerError: a rollout is too long for a micro-batch.
        """
        if not rollouts or not self._measures:
            return []
        samples = measure.samples_of(rollouts)
        check_fits(samples, self._micro_batch_tokens)
        measured: dict[int, Measured] = self._together("measure", samples)
        return [measured[index] for index in range(len(samples))]

    def logprob_gap(self, samples: Sequence[TrainSample]) -> float:
        """Returns the mean absolute difference of the engine's log-probs and the trainer's, over the sampled tokens."""
        check_fits(samples, self._micro_batch_tokens)
        gap: float = self._together("logprob_gap", tuple(samples))
        return gap

    def export(self, folder: Path) -> dict[str, TensorSpec]:
        """Writes the weights in Hugging Face format: safetensors in the compute dtype, config.json, tokenizer.

        Where an adapter is trained, only that, in PEFT's format.

        Returns:
            What the files are to hold, of the tensors in memory: a reader can prove the files with it.

        Raises:
            OSError, SafetensorError: it can't be written; the trainer goes on.
        """
        written: dict[str, TensorSpec] | Exception = self._together("export", folder)
        if isinstance(written, Exception):
            raise written
        return written

    def layout(self, max_bytes: int) -> list[list[TensorLayout]]:
        """Describes the buckets that `stream` will give; no rank but 0 is needed for it."""
        buckets = self._engine.layout(max_bytes)
        return [transfer.layout(self._policy.as_published(bucket)) for bucket in buckets]

    def stream(self, max_bytes: int, sink: Sink) -> None:
        """Gives the weights to `sink`, bucket after bucket of about max_bytes at most, on the trainer's device.

        May be called in a thread of its own, while no other method runs. What the sink raises is raised here, once the
        ranks are through with gathering.
        """
        self._sink, self._sink_failure = sink, None
        self._together("stream", max_bytes)
        if self._sink_failure is not None:
            raise self._sink_failure

    def offload(self) -> None:
        """Leaves the GPU to others: all training state moves to the CPU's memory. May be repeated."""
        if not self._away:
            self._together("offload")

    def onload(self) -> None:
        """Comes back to the GPU with the very same state. May be repeated."""
        if self._away:
            self._together("onload")

    def state(self, sink: StateSink) -> dict[str, Any]:
        """Gives all that training goes on from to `sink`, bucket after bucket, and returns the rest, ready for JSON.

        Tensors are copies in the CPU's memory, whole and float32, whatever ranks and ZeRO stage there are. What the
        sink raises is raised here, once the ranks are through with gathering.
        """
        self._state_sink, self._sink_failure = sink, None
        rest: dict[str, Any] = self._together("state")
        if self._sink_failure is not None:
            raise self._sink_failure
        return rest

    def restore(self, saved: SavedTensors, rest: Mapping[str, Any]) -> None:
        """Goes back to what `state` gave, to another number of ranks or at another ZeRO stage, too.

        Raises:
            TrainerError: it is the state of another model; nothing has changed.
        """
        saved.check(
            {f"{name}/{key}": shape for name, e in self._engines().items() for key, shape in e.shapes().items()}
        )
        self._saved = saved
        self._together("restore", rest)

    def close(self) -> None:
        """Releases the other ranks and ends communication. After a failure within common work it only lets go."""
        if self._closed or self._broken:
            return
        if self.is_main:
            self._together("close")

    def follow(self) -> None:
        """Does on ranks above 0 what rank 0 does, until rank 0 closes.

        Raises:
            TrainerError: rank 0 has ended without closing, or was silent for trainer.collective_timeout_s.
        """
        while not self._closed:
            with self._ranks.deadline("waiting for work from rank 0"):
                name, arguments = self._ranks.broadcast(("", ()))
            self._run(name, arguments)

    def _together(self, name: str, *arguments: Any) -> Any:
        if self._closed or self._broken:
            raise TrainerError(f"the trainer can't {name}: it is closed, or broke in an earlier call")
        if not self.is_main:
            raise TrainerError(f"rank {self._ranks.rank} called {name}; ranks above 0 only follow")
        if self._away and name not in ("onload", "close"):
            raise TrainerError(f"the trainer can't {name}: it is off the GPU; call onload() first")
        with self._ranks.deadline(f"starting to {name}"):
            self._ranks.broadcast((name, arguments))
        return self._run(name, arguments)

    def _run(self, name: str, arguments: tuple[Any, ...]) -> Any:
        work: Callable[..., Any] = getattr(self, f"_{name}")
        self._broken = True  # until the work has ended well
        with self._ranks.deadline(f"doing the common {name}"):
            try:
                result = work(*arguments)
            except Exception as error:
                if not guards.is_out_of_memory(error):
                    raise
                samples = arguments[0] if arguments and isinstance(arguments[0], tuple) else ()
                raise guards.out_of_memory(
                    error,
                    self._config,
                    micro_batch_tokens=self._micro_batch_tokens,
                    work=name,
                    longest=max(map(num_positions, samples), default=0),
                    vocab_size=self._policy.vocab_size,
                    on_gpu=self.device.type == "cuda",
                ) from error
        self._broken = False
        return result

    def _step(self, samples: Sequence[TrainSample]) -> tuple[StepStats, guards.Fault | None]:
        start = time.perf_counter()
        batches = self._batches(samples)
        learning_rate, loss_scale = self._engine.learning_rate, self._engine.loss_scale
        if self._critic is not None and self._critic.learns_alone:
            learning_rate = 0.0
            totals = accumulate(self._engine, self._policy_loss, batches, self._ranks, learn=False)
            policy = Update(totals=totals, grad_norm=0.0)
        else:
            policy = update(self._engine, self._policy_loss, batches, self._ranks)
            if self._reference is not None and policy.grad_norm is not None:
                self._reference.reset_if_due()
        updates: dict[str, Update] = {"": policy}
        critic: dict[str, float] = {}
        if self._critic is not None:
            updates["critic: "], critic = self._critic.step(batches)
        fault = None
        if any(done.is_faulty for done in updates.values()):
            self._skipped_in_row += 1
            fault = self._fault(samples, batches, updates)
        elif policy.grad_norm is not None:
            self._skipped_in_row = 0
        totals = dict(policy.totals)
        loss = totals.pop("loss")
        if loss_scale is not None:
            totals["loss_scale"] = loss_scale
        if "importance_square" in totals:
            totals["ess"] = effective_sample_size(totals)
            del totals["importance_square"]
        lengths = [num_positions(sample) for sample in samples]
        seconds = time.perf_counter() - start
        stats = StepStats(
            loss=loss,
            grad_norm=math.nan if policy.grad_norm is None else policy.grad_norm,
            learning_rate=learning_rate,
            skipped=policy.grad_norm is None,
            metrics=totals,
            critic=critic,
            num_tokens=batches[0].num_tokens_global,
            num_positions=sum(lengths),
            num_sequences=batches[0].num_sequences_global,
            num_micro_batches=len(batches),
            mfu=flops.step_flops(self._flops, lengths, batches[0].num_tokens_global) / (seconds * self._peak_flops),
            seconds=seconds,
        )
        return stats, fault

    def _policy_loss(self, batch: TrainBatch) -> LossOutput:
        logprobs_bt, entropy_bt = self._engine.forward(batch)
        output = self._loss(logprobs_bt, entropy_bt, batch)
        entropy = entropy_bt.detach().sum() / batch.num_tokens_global
        return LossOutput(loss=output.loss, metrics={"entropy": entropy, **output.metrics})

    def _fault(
        self, samples: Sequence[TrainSample], batches: Sequence[TrainBatch], updates: Mapping[str, Update]
    ) -> guards.Fault:
        """Returns what was not finite in a step that changed nothing, so that log-probs are what they were in it."""
        columns = {"logprobs": lambda batch: self._engine.forward(batch)[0]}
        return guards.fault_of(
            samples,
            logprobs={index: numbers["logprobs"] for index, numbers in self._numbers(batches, columns).items()},
            totals={f"{who}{name}": value for who, done in updates.items() for name, value in done.totals.items()},
            gradients=[f"{who}{name}" for who, done in updates.items() for name in done.gradients],
        )

    def _measure(self, samples: Sequence[TrainSample]) -> dict[int, Measured]:
        measured = self._numbers(self._batches(samples), self._measures)
        return {index: Measured(**numbers) for index, numbers in measured.items()}

    @torch.no_grad()
    def _numbers(
        self, batches: Sequence[TrainBatch], columns: Mapping[str, Callable[[TrainBatch], Tensor]]
    ) -> dict[int, dict[str, tuple[float, ...]]]:
        """Returns the columns' numbers of every token, by the place of its sample; on all ranks those of all ranks."""
        batches = [batch.to(self._ranks.device) for batch in batches]
        own = measure.unpack(batches, {name: [of(batch) for batch in batches] for name, of in columns.items()})
        return {index: numbers for share in self._ranks.gather(own) for index, numbers in share.items()}

    def _batches(self, samples: Sequence[TrainSample]) -> list[TrainBatch]:
        """Returns this rank's micro-batches."""
        return pack(
            samples,
            micro_batch_tokens=self._micro_batch_tokens,
            num_ranks=self._ranks.size,
            cost=lambda length: flops.step_flops(self._flops, [length], length),
        )[self._ranks.rank]

    @torch.no_grad()
    def _logprob_gap(self, samples: Sequence[TrainSample]) -> float:
        total = 0.0
        for batch in self._batches(samples):
            batch = batch.to(self._ranks.device)
            logprobs_bt, _ = self._engine.forward(batch)
            gap_bt = (logprobs_bt - batch.rollout_logprobs_bt).where(batch.mask_bt, 0.0)
            total += float(gap_bt.double().abs().sum()) / batch.num_tokens_global
        return self._ranks.sum([total])[0]

    def _export(self, folder: Path) -> dict[str, TensorSpec] | Exception:
        named = [
            (name, tensor.to("cpu", copy=self._engine.stage == 3))  # else it stays what it is
            for bucket in self._engine.buckets(EXPORT_BYTES)
            for name, tensor in bucket
        ]
        if not self.is_main:
            return {}
        published = unshared(dict(self._policy.as_published(named)))  # DeepSpeed's are parts of one
        with concurrent.futures.ThreadPoolExecutor(1) as sums:  # of the tensors, while they are written
            specs = sums.submit(manifest.specs, published.items())
            try:
                self._write(folder, published)
            except (OSError, SafetensorError) as error:  # of rank 0's disk alone
                return error
        return specs.result()

    def _write(self, folder: Path, published: dict[str, Tensor]) -> None:
        if self.adapter is not None:
            lora.save(folder, self.adapter, published)
            return
        write_model(folder, self._policy.model, self.tokenizer, published, self._dtype)

    def _stream(self, max_bytes: int) -> None:
        if self._ranks.device.type == "cuda":
            torch.cuda.set_device(self._ranks.device)  # which each thread has to say for itself
        for bucket in self._engine.buckets(max_bytes):
            if self._sink is not None and self._sink_failure is None:
                try:
                    self._sink(self._policy.as_published(bucket))
                except Exception as error:  # noqa: BLE001 - raised by `stream`: the ranks must gather what is left
                    self._sink_failure = error

    def _offload(self) -> None:
        for engine in (self._engine, *self._beside.values()):
            engine.offload()
        self._away = True

    def _onload(self) -> None:
        for engine in (self._engine, *self._beside.values()):
            engine.onload()
        self._away = False

    def _engines(self) -> dict[str, DeepSpeedEngine | FrozenEngine]:
        """Returns the models whose state no other file holds, by the name that their tensors begin with."""
        resets = self._reference is not None and self._reference.reset_every > 0
        beside = {name: engine for name, engine in self._beside.items() if name == "critic" or resets}
        return {POLICY: self._engine, **beside}

    def _state(self) -> dict[str, Any]:
        for name, engine in self._engines().items():
            for bucket in engine.state(BUCKET_BYTES):
                if self._state_sink is not None and self._sink_failure is None:
                    try:
                        self._state_sink({f"{name}/{key}": tensor for key, tensor in bucket.items()})
                    except Exception as error:  # noqa: BLE001 - raised by `state`: the ranks must gather what is left
                        self._sink_failure = error
        return {
            "engines": {name: engine.counters() for name, engine in self._engines().items()},
            "skipped_in_row": self._skipped_in_row,
            "random": self._ranks.gather(randomness(self._ranks.device)),
            "dtype": dtype_name(self._dtype),
            "adapter": None if self.adapter is None else self.adapter.model_dump(),
        }

    def _read(self, engine: str, key: str) -> Tensor:
        return self._saved.read(f"{engine}/{key}")

    def _restore(self, rest: Mapping[str, Any]) -> None:
        for name, engine in self._engines().items():
            read = functools.partial(self._read, name)  # asked on rank 0 alone
            engine.restore(read, rest["engines"][name])
        self._skipped_in_row = rest["skipped_in_row"]
        if self._ranks.rank < len(rest["random"]):
            restore_randomness(rest["random"][self._ranks.rank], self._ranks.device)

    def _close(self) -> None:
        for engine in (self._engine, *self._beside.values()):
            engine.close()
        if self._owns_ranks:
            self._ranks.close()
        self._closed = True
