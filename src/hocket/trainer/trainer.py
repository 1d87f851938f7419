"""The trainer as the loop sees it: one object on rank 0; the other ranks follow and do the same work."""

import concurrent.futures
import functools
import math
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from hocket import manifest, transfer
from hocket import tokenizer as tokenizers
from hocket.algorithm.losses import LossConfig, LossOutput, effective_sample_size, policy_loss
from hocket.config import AlgorithmConfig, Config, TrainerConfig
from hocket.errors import TrainerError
from hocket.protocol import AdapterConfig, Health, TensorLayout, TensorSpec
from hocket.trainer import flops, guards, lora, memory
from hocket.trainer.batching import TrainBatch, check_fits, num_positions, pack
from hocket.trainer.engine import DeepSpeedEngine, default_zero_stage
from hocket.trainer.policy import Policy, compute_dtype, skeleton
from hocket.trainer.ranks import Ranks
from hocket.types import StepStats, TrainSample

Bucket = Sequence[tuple[str, Tensor]]
Sink = Callable[[Bucket], None]
BatchLoss = Callable[[Tensor, TrainBatch], LossOutput]
"""(logprobs_bt with gradient, batch) → this micro-batch's share of the global loss."""
EXPORT_BYTES = 64 << 20
"""ZeRO-3 gathers parameters for export in groups of this size."""


def grpo_loss(config: AlgorithmConfig) -> BatchLoss:
    """Returns the configured policy loss as a function of a batch."""
    settings = LossConfig(
        clip_low=config.clip_low,
        clip_high=config.clip_high,
        correction=config.correction,
        correction_high=config.correction_high,
    )

    def loss(logprobs_bt: Tensor, batch: TrainBatch) -> LossOutput:
        return policy_loss(
            logprobs_bt,
            batch.rollout_logprobs_bt,
            batch.advantages_bt,
            batch.mask_bt,
            config=settings,
            num_tokens=batch.num_tokens_global,
            num_sequences=batch.num_sequences_global,
        )

    return loss


class Trainer:
    """Trains the model on samples. Every rank constructs it; rank 0 calls its methods, the others `follow`.

    Each method runs on all ranks at the same time. What rank 0 can refuse alone it refuses before the others start, so
    that an error leaves everyone ready for `close`. An error within the common work ends the run: this process raises
    it, and the others notice that it is gone.

    Args:
        config: the run's config.
        loss: what is minimised; default: the configured policy loss.
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
        self._loss = loss or grpo_loss(config.algorithm)
        self._closed = self._broken = self._away = False
        self._skipped_in_row = 0
        self._sink: Sink | None = None
        self._sink_failure: Exception | None = None

        try:
            self._build(config, config.rollout.temperature if temperature is None else temperature)
        except BaseException:
            if self._owns_ranks:
                self._ranks.destroy()
            raise

    def _build(self, config: Config, temperature: float) -> None:
        device = self._ranks.device
        self._dtype = compute_dtype(config.model, device)
        self.memory = f"a step needs {self._estimate(config)}"
        self._policy = Policy(
            config.model,
            dtype=DeepSpeedEngine.parameter_dtype(config.trainer, dtype=self._dtype, device=device),
            temperature=temperature,
            chunk_tokens=config.trainer.logprob_chunk_tokens,
            gradient_checkpointing=config.trainer.gradient_checkpointing,
            seed=config.trainer.seed,
        )
        self._flops = flops.model_flops(self._policy.model)
        with self._ranks.deadline("starting DeepSpeed"):
            (self._peak_flops,) = self._ranks.sum([flops.peak_flops(device, self._dtype)])
            self._engine = DeepSpeedEngine(self._policy, config.trainer, dtype=self._dtype, ranks=self._ranks)
            self._policy.check_architecture(device)
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
                token_ids=(0,) * (n + 1), mask=(True,) * (n + 1), rollout_logprobs=(0.0,) * (n + 1), advantage=1.0
            )
            for n in lengths
        ]
        [[batch]] = pack(samples, micro_batch_tokens=num_positions, num_ranks=1)
        batch = batch.to(self._ranks.device)
        logprobs_bt, _ = self._engine.forward(batch)
        self._engine.backward(self._loss(logprobs_bt, batch).loss * math.nan, last=True)
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

    def save(self, folder: Path) -> None:
        """Writes the whole training state, which appears under `folder` at once."""
        if folder.exists():
            raise TrainerError(f"the checkpoint {folder} exists already; remove it or save somewhere else")
        self._together("save", folder)

    def load(self, folder: Path) -> None:
        """Restores what `save` wrote, by as many ranks as wrote it."""
        self._engine.check_saved(folder)
        self._together("load", folder)

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
        fault = None
        totals = self._accumulate(batches)
        grad_norm = self._engine.step()
        overflowed = math.isfinite(totals["loss"]) and self._engine.loss_scale != loss_scale
        if grad_norm is None and not overflowed:
            totals, fault, grad_norm = self._once_more(samples, batches)
        if grad_norm is not None:
            self._skipped_in_row = 0
        elif fault is not None:
            self._skipped_in_row += 1
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
            grad_norm=math.nan if grad_norm is None else grad_norm,
            learning_rate=learning_rate,
            skipped=grad_norm is None,
            metrics=totals,
            num_tokens=batches[0].num_tokens_global,
            num_positions=sum(lengths),
            num_sequences=batches[0].num_sequences_global,
            num_micro_batches=len(batches),
            mfu=flops.step_flops(self._flops, lengths, batches[0].num_tokens_global) / (seconds * self._peak_flops),
            seconds=seconds,
        )
        return stats, fault

    def _once_more(
        self, samples: Sequence[TrainSample], batches: Sequence[TrainBatch]
    ) -> tuple[dict[str, float], guards.Fault | None, float | None]:
        """Repeats a step that was not finite, now with a look at what is not; what was a fluke is made good by it."""
        broken_bt: list[Tensor] = []
        totals = self._accumulate(batches, broken_bt)
        broken = self._ranks.sum(guards.broken_samples(samples, batches, broken_bt))
        gradients = self._engine.broken_gradients()  # costly, and gone after the step
        grad_norm = self._engine.step()
        if grad_norm is not None:
            return totals, None, grad_norm
        return totals, guards.fault_of(samples, broken=[*map(bool, broken)], totals=totals, gradients=gradients), None

    def _accumulate(self, batches: Sequence[TrainBatch], broken_bt: list[Tensor] | None = None) -> dict[str, float]:
        """Runs forward and backward on this rank's micro-batches. Returns loss and metrics, summed over all ranks.

        Args:
            broken_bt: takes, of each micro-batch, where the log-prob of a trained token is not finite.
        """
        shares: list[Tensor] = []
        totals: dict[str, float] = {}
        for index, batch in enumerate(batches):
            batch = batch.to(self._ranks.device)
            logprobs_bt, entropy_bt = self._engine.forward(batch)
            if broken_bt is not None:
                broken_bt.append((~logprobs_bt.isfinite() & batch.mask_bt).cpu())
            output = self._loss(logprobs_bt, batch)
            share = {"loss": output.loss.detach(), "entropy": entropy_bt.sum() / batch.num_tokens_global}
            share |= output.metrics
            shares.append(torch.stack([value.double() for value in share.values()]))
            loss = output.loss
            last = index == len(batches) - 1
            if last:
                sums = self._ranks.sum(torch.stack(shares).sum(dim=0).tolist())
                totals = dict(zip(share, sums, strict=True))
                if not math.isfinite(totals["loss"]):
                    loss = loss * math.nan  # a loss of inf can have finite gradients; this way the step is skipped
            self._engine.backward(loss, last=last)
        return totals

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
        # DeepSpeed's tensors are parts of one, and would be cloned or refused as shared ones.
        published = {name: from_dlpack(tensor.contiguous()) for name, tensor in self._policy.as_published(named)}
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
        model = self._policy.model
        model.config.architectures = [type(model).__name__]
        model.config.dtype = self._dtype  # of the tensors; the live parameters of ZeRO-0 are float32
        for part in (model.config, model.generation_config, self.tokenizer):
            part.save_pretrained(folder)
        save_torch_state_dict(dict(published), folder)
        for file in folder.glob("*.safetensors"):  # written for the owner only; the server may be another user
            shutil.copymode(folder / "config.json", file)

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
        self._engine.offload()
        self._away = True

    def _onload(self) -> None:
        self._engine.onload()
        self._away = False

    def _save(self, folder: Path) -> None:
        self._engine.save(folder)

    def _load(self, folder: Path) -> None:
        self._engine.load(folder)
        self._skipped_in_row = 0

    def _close(self) -> None:
        self._engine.close()
        if self._owns_ranks:
            self._ranks.close()
        self._closed = True
