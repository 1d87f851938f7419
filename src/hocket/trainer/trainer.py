"""The trainer as the loop sees it: one object on rank 0; the other ranks follow and do the same work."""

import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError
from torch import Tensor

from hocket import tokenizer as tokenizers
from hocket import transfer
from hocket.algorithm.losses import LossConfig, LossOutput, effective_sample_size, policy_loss
from hocket.config import AlgorithmConfig, Config
from hocket.errors import TrainerError
from hocket.manifest import dtype_name
from hocket.protocol import AdapterConfig, Health, TensorLayout
from hocket.trainer import lora
from hocket.trainer.batching import TrainBatch, check_fits, pack
from hocket.trainer.checkpoint import BUCKET_BYTES, POLICY, SavedTensors
from hocket.trainer.engine import DeepSpeedEngine
from hocket.trainer.policy import PREFIX, Policy, compute_dtype, write_model
from hocket.trainer.ranks import Ranks, randomness, restore_randomness
from hocket.types import StepStats, TrainSample

Bucket = Sequence[tuple[str, Tensor]]
Sink = Callable[[Bucket], None]
StateSink = Callable[[Mapping[str, Tensor]], None]
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
        self._state_sink: StateSink | None = None
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
        self._policy = Policy(
            config.model,
            dtype=DeepSpeedEngine.parameter_dtype(config.trainer, dtype=self._dtype, device=device),
            device=device,
            temperature=temperature,
            chunk_tokens=config.trainer.logprob_chunk_tokens,
            gradient_checkpointing=config.trainer.gradient_checkpointing,
            seed=config.trainer.seed,
        )
        with self._ranks.deadline("starting DeepSpeed"):
            self._engine = DeepSpeedEngine(self._policy, config.trainer, dtype=self._dtype, ranks=self._ranks)
            self._policy.check_architecture(device)

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

    def step(self, samples: Sequence[TrainSample]) -> StepStats:
        """Takes one optimiser step on all samples. A step that is not finite leaves the weights as they were.

        Raises:
            TrainerError: no sample, a sample too long for a micro-batch, or trainer.max_skipped_steps skipped in a row.
        """
        check_fits(samples, self._config.micro_batch_tokens)
        stats, broken = self._together("step", tuple(samples))
        if self._skipped_in_row >= self._config.max_skipped_steps:
            where = f"; gradients that are not finite: {', '.join(broken[:8])}" if broken else ""
            raise TrainerError(
                f"{self._skipped_in_row} steps in a row were skipped because loss or gradient was not finite"
                f"{where}. Lower trainer.learning_rate, or look for extreme values in what was trained on"
            )
        result: StepStats = stats
        return result

    def logprob_gap(self, samples: Sequence[TrainSample]) -> float:
        """Returns the mean absolute difference of the engine's log-probs and the trainer's, over the sampled tokens."""
        check_fits(samples, self._config.micro_batch_tokens)
        gap: float = self._together("logprob_gap", tuple(samples))
        return gap

    def export(self, folder: Path) -> None:
        """Writes the weights in Hugging Face format: safetensors in the compute dtype, config.json, tokenizer.

        Where an adapter is trained, only that, in PEFT's format.

        Raises:
            OSError, SafetensorError: it can't be written; the trainer goes on.
        """
        failure: Exception | None = self._together("export", folder)
        if failure is not None:
            raise failure

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
            result = work(*arguments)
        self._broken = False
        return result

    def _step(self, samples: Sequence[TrainSample]) -> tuple[StepStats, list[str]]:
        start = time.perf_counter()
        batches = self._batches(samples)
        learning_rate = self._engine.learning_rate
        totals = self._accumulate(batches)
        broken = self._engine.broken_gradients() if self._skipped_in_row else []  # costly, so only once it is likely
        grad_norm = self._engine.step()
        self._skipped_in_row = self._skipped_in_row + 1 if grad_norm is None else 0
        loss = totals.pop("loss")
        if "importance_square" in totals:
            totals["ess"] = effective_sample_size(totals)
            del totals["importance_square"]
        stats = StepStats(
            loss=loss,
            grad_norm=math.nan if grad_norm is None else grad_norm,
            learning_rate=learning_rate,
            skipped=grad_norm is None,
            metrics=totals,
            num_tokens=batches[0].num_tokens_global,
            num_sequences=batches[0].num_sequences_global,
            num_micro_batches=len(batches),
            seconds=time.perf_counter() - start,
        )
        return stats, broken

    def _accumulate(self, batches: Sequence[TrainBatch]) -> dict[str, float]:
        """Runs forward and backward on this rank's micro-batches. Returns loss and metrics, summed over all ranks."""
        shares: list[Tensor] = []
        totals: dict[str, float] = {}
        for index, batch in enumerate(batches):
            batch = batch.to(self._ranks.device)
            logprobs_bt, entropy_bt = self._engine.forward(batch)
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
            micro_batch_tokens=self._config.micro_batch_tokens,
            num_ranks=self._ranks.size,
            pad_id=self.tokenizer.pad_token_id or 0,
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

    def _export(self, folder: Path) -> Exception | None:
        tensors = {
            name.removeprefix(PREFIX): tensor.to("cpu", copy=self._engine.stage == 3)  # else it stays what it is
            for bucket in self._engine.buckets(EXPORT_BYTES)
            for name, tensor in bucket
        }
        try:
            if self.is_main:
                self._write(folder, tensors)
        except (OSError, SafetensorError) as error:  # of rank 0's disk alone
            return error
        return None

    def _write(self, folder: Path, tensors: dict[str, Tensor]) -> None:
        if self.adapter is not None:
            lora.save(folder, self.adapter, tensors)
            return
        write_model(folder, self._policy.model, self.tokenizer, tensors, self._dtype)

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

    def _engines(self) -> dict[str, DeepSpeedEngine]:
        """Returns everything whose weights and optimiser are saved, by the name that its tensors begin with."""
        return {POLICY: self._engine}

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
        self._engine.close()
        if self._owns_ranks:
            self._ranks.close()
        self._closed = True
