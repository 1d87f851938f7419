"""The trainer as the loop sees it: one object on rank 0; the other ranks follow and do the same work."""

import math
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError
from torch import Tensor

from hocket import tokenizer as tokenizers
from hocket import transfer
from hocket.algorithm.losses import LossConfig, LossOutput, effective_sample_size, policy_loss
from hocket.config import Config, ModelConfig
from hocket.errors import TrainerError
from hocket.protocol import AdapterConfig, Health, TensorLayout
from hocket.trainer import lora, measure
from hocket.trainer.accumulate import accumulate
from hocket.trainer.batching import TrainBatch, check_fits, pack
from hocket.trainer.critic import Critic
from hocket.trainer.engine import DeepSpeedEngine
from hocket.trainer.frozen import FrozenEngine
from hocket.trainer.policy import PREFIX, Policy, compute_dtype
from hocket.trainer.ranks import Ranks
from hocket.trainer.reference import Reference
from hocket.types import Measured, Rollout, StepStats, TrainSample

Bucket = Sequence[tuple[str, Tensor]]
Sink = Callable[[Bucket], None]
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
        trained_dtype = DeepSpeedEngine.parameter_dtype(config.trainer, dtype=self._dtype, device=device)

        def load(model: ModelConfig, kind: type[Policy] = Policy, dtype: torch.dtype = trained_dtype) -> Any:
            return kind(
                model,
                dtype=dtype,
                device=device,
                temperature=temperature,
                chunk_tokens=config.trainer.logprob_chunk_tokens,
                gradient_checkpointing=config.trainer.gradient_checkpointing,
                entropy_gradient=config.algorithm.entropy_coef > 0,
                seed=config.trainer.seed,
            )

        self._policy: Policy = load(config.model)
        own_steps = config.trainer.steps - (config.critic.warmup_steps if with_critic else 0)
        settings = config.trainer.model_copy(update={"steps": own_steps})
        with ranks.deadline("starting DeepSpeed"):
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

    def measure(self, rollouts: Sequence[Rollout]) -> list[Measured]:
        """Returns what the algorithm has to know of each rollout before the step, in their order; [] where nothing.

        Raises:
            TrainerError: a rollout is too long for a micro-batch.
        """
        if not rollouts or not self._measures:
            return []
        samples = measure.samples_of(rollouts)
        check_fits(samples, self._config.micro_batch_tokens)
        measured: dict[int, Measured] = self._together("measure", samples)
        return [measured[index] for index in range(len(samples))]

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

    def save(self, folder: Path) -> None:
        """Writes the whole training state, which appears under `folder` at once."""
        if folder.exists():
            raise TrainerError(f"the checkpoint {folder} exists already; remove it or save somewhere else")
        self._together("save", folder)

    def load(self, folder: Path) -> None:
        """Restores what `save` wrote, by as many ranks as wrote it."""
        self._engine.check_saved(folder)
        for name, engine in self._kept().items():
            engine.check_saved(folder / name)
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
            result = work(*arguments)
        self._broken = False
        return result

    def _step(self, samples: Sequence[TrainSample]) -> tuple[StepStats, list[str]]:
        start = time.perf_counter()
        batches = self._batches(samples)
        look = self._skipped_in_row > 0  # for gradients that are not finite: costly, so only once it is likely
        waits = self._critic is not None and self._critic.learns_alone
        learning_rate = 0.0 if waits else self._engine.learning_rate
        totals = accumulate(self._engine, self._policy_loss, batches, self._ranks, learn=not waits)
        broken = self._engine.broken_gradients() if look and not waits else []
        grad_norm = 0.0 if waits else self._engine.step()
        critic: dict[str, float] = {}
        if self._critic is not None:
            critic, critic_broken = self._critic.step(batches, look=look)
            broken += [f"critic: {name}" for name in critic_broken]
        if self._reference is not None and grad_norm is not None and not waits:
            self._reference.reset_if_due()
        skipped = grad_norm is None
        self._skipped_in_row = self._skipped_in_row + 1 if skipped or critic.get("skipped") else 0
        loss = totals.pop("loss")
        if "importance_square" in totals:
            totals["ess"] = effective_sample_size(totals)
            del totals["importance_square"]
        stats = StepStats(
            loss=loss,
            grad_norm=math.nan if grad_norm is None else grad_norm,
            learning_rate=learning_rate,
            skipped=skipped,
            metrics=totals,
            critic=critic,
            num_tokens=batches[0].num_tokens_global,
            num_sequences=batches[0].num_sequences_global,
            num_micro_batches=len(batches),
            seconds=time.perf_counter() - start,
        )
        return stats, broken

    def _policy_loss(self, batch: TrainBatch) -> LossOutput:
        logprobs_bt, entropy_bt = self._engine.forward(batch)
        output = self._loss(logprobs_bt, entropy_bt, batch)
        entropy = entropy_bt.detach().sum() / batch.num_tokens_global
        return LossOutput(loss=output.loss, metrics={"entropy": entropy, **output.metrics})

    @torch.no_grad()
    def _measure(self, samples: Sequence[TrainSample]) -> dict[int, Measured]:
        batches = [batch.to(self._ranks.device) for batch in self._batches(samples)]
        columns = {name: [of(batch) for batch in batches] for name, of in self._measures.items()}
        shares = self._ranks.gather(measure.unpack(batches, columns))
        return {index: measured for share in shares for index, measured in share.items()}

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
        model = self._policy.model
        model.save_pretrained(folder, state_dict=tensors)
        model.config.dtype = self._dtype  # of the tensors; the live parameters of ZeRO-0 are float32
        model.config.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
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
        for engine in (self._engine, *self._beside.values()):
            engine.offload()
        self._away = True

    def _onload(self) -> None:
        for engine in (self._engine, *self._beside.values()):
            engine.onload()
        self._away = False

    def _kept(self) -> dict[str, DeepSpeedEngine | FrozenEngine]:
        """Returns the models beside the policy whose weights no other file holds."""
        resets = self._reference is not None and self._reference.reset_every > 0
        return {name: engine for name, engine in self._beside.items() if name == "critic" or resets}

    def _save(self, folder: Path) -> None:
        self._engine.save(folder)
        for name, engine in self._kept().items():
            engine.save(folder / name)

    def _load(self, folder: Path) -> None:
        self._engine.load(folder)
        for name, engine in self._kept().items():
            engine.load(folder / name)
        self._skipped_in_row = 0

    def _close(self) -> None:
        for engine in (self._engine, *self._beside.values()):
            engine.close()
        if self._owns_ranks:
            self._ranks.close()
        self._closed = True
