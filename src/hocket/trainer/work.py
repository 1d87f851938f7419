"""What the ranks do together: one rank's models, and each piece of work that all ranks carry out at the same time.

Takes what rank 0 was given; results are the same on every rank, or rank 0's alone. Never knows how the ranks agree on
what comes next: that is trainer.py.
"""

import concurrent.futures
import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from hocket import manifest
from hocket.algorithm.diagnostics import effective_sample_size
from hocket.algorithm.losses import LossOutput, policy_loss
from hocket.config import Config, ModelConfig
from hocket.manifest import dtype_name
from hocket.protocol import TensorSpec
from hocket.trainer import flops, guards, lora, measure, rehearsal
from hocket.trainer.batching import TrainBatch, num_positions, pack
from hocket.trainer.checkpoint import BUCKET_BYTES, POLICY, SavedTensors
from hocket.trainer.critic import Critic
from hocket.trainer.engine import DeepSpeedEngine
from hocket.trainer.frozen import FrozenEngine
from hocket.trainer.policy import Policy, compute_dtype, unshared, write_model
from hocket.trainer.ranks import Ranks, randomness, restore_randomness
from hocket.trainer.reference import Reference
from hocket.trainer.update import Update, accumulate, update
from hocket.types import Measured, StepStats, TrainSample

Sink = Callable[[Any], None]
"""Takes a bucket: [(name, tensor)] of weights, {name: tensor} of a state."""
BatchLoss = Callable[[Tensor, Tensor, TrainBatch], LossOutput]
"""(logprobs_bt with gradient, entropy_bt, batch) → this micro-batch's share of the global loss."""
EXPORT_BYTES = 64 << 20
"""ZeRO-3 gathers parameters for export in groups of this size."""


def configured_loss(config: Config) -> BatchLoss:
    """Returns the configured policy loss as a function of a batch."""
    settings = config.algorithm.loss(config.rollout.max_tokens)

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


class Work:
    """One rank's models. All ranks call the same method with the same arguments.

    Args:
        loss: what is minimised; None: the configured policy loss, with the models that the algorithm needs beside it.
        temperature: logits are divided by it.

    Attributes:
        policy, engine: the model that is trained, and what trains it.
        beside: other models, by name.
        measures: field of Measured → its numbers for a batch.
        micro_batch_tokens: most positions of a micro-batch.
        skipped_in_row: steps that were not finite, up to now.
        sink, sink_failure: on rank 0, who takes buckets, and what it raised.
        saved: on rank 0, where `restore` reads.
    """

    def __init__(
        self, config: Config, tokenizer: Any, ranks: Ranks, *, loss: BatchLoss | None, temperature: float
    ) -> None:
        self._tokenizer = tokenizer
        self._ranks = ranks
        self._loss = loss or configured_loss(config)
        self._dtype = compute_dtype(config.model, ranks.device)
        self._reference: Reference | None = None
        self._critic: Critic | None = None
        self.beside: dict[str, DeepSpeedEngine | FrozenEngine] = {}
        self.measures: dict[str, Callable[[TrainBatch], Tensor]] = {}
        self.skipped_in_row = 0
        self.sink: Sink | None = None
        self.sink_failure: Exception | None = None
        self.saved: SavedTensors | None = None

        self._needed = f"a step needs {rehearsal.estimate(config, self._dtype, ranks, alone=loss is not None)}"
        parameter_dtype = DeepSpeedEngine.parameter_dtype(config.trainer, dtype=self._dtype, ranks=ranks)

        def load(model: ModelConfig, kind: type[Policy] = Policy) -> Any:
            return kind(
                model,
                dtype=parameter_dtype,
                temperature=temperature,
                chunk_tokens=config.trainer.logprob_chunk_tokens,
                gradient_checkpointing=config.trainer.gradient_checkpointing,
                entropy_gradient=config.algorithm.entropy_coef > 0,
                seed=config.trainer.seed,
            )

        with_critic = config.algorithm.baseline == "critic" and loss is None
        own_steps = config.trainer.steps - (config.critic.warmup_steps if with_critic else 0)
        settings = config.trainer.model_copy(update={"steps": own_steps})
        self.policy: Policy = load(config.model)
        self._flops = flops.model_flops(self.policy.model)
        with ranks.deadline("starting DeepSpeed"):
            (self._peak_flops,) = ranks.sum([flops.peak_flops(ranks.device, self._dtype)])
            self.engine = DeepSpeedEngine(self.policy, settings, dtype=self._dtype, ranks=ranks)
            self.policy.check_architecture(ranks.device)
            if loss is None:
                self._load_beside(config, load)
            tokens = config.trainer.micro_batch_tokens
            self.micro_batch_tokens = self._as_many_as_fit(config) if tokens == "auto" else tokens
        self._measured_for = rehearsal.fingerprint(config, ranks) if tokens == "auto" else None

    @property
    def memory(self) -> str:
        """In words, what a step was estimated to need, and how large the micro-batches are that were found to fit."""
        found = f"; trainer.micro_batch_tokens=auto is {self.micro_batch_tokens}" if self._measured_for else ""
        return self._needed + found

    def _load_beside(self, config: Config, load: Callable[..., Any]) -> None:
        """Loads the models that the algorithm needs beside the policy, and says what they measure."""
        if config.algorithm.kl != "off":
            self._reference = Reference(config, self.policy, self.engine, load, dtype=self._dtype, ranks=self._ranks)
            self.measures["ref_logprobs"] = self._reference.logprobs
            if self._reference.frozen is not None:
                self.beside["reference"] = self._reference.frozen
        if config.algorithm.baseline == "critic":
            self._critic = Critic(config, load, dtype=self._dtype, ranks=self._ranks)
            self.measures["values"] = self._critic.values
            self.beside["critic"] = self._critic.engine
        if config.algorithm.top_entropy < 1:
            self.measures["entropies"] = lambda batch: self.engine.forward(batch)[1]

    def _as_many_as_fit(self, config: Config) -> int:
        trained = [self.engine, *([self._critic.engine] if self._critic is not None else [])]
        to_come = sum(engine.bytes_to_come() for engine in trained)
        return rehearsal.as_many_as_fit(
            self.engine, self._policy_loss, config.trainer, self._ranks, bytes_to_come=to_come
        )

    def step(self, samples: Sequence[TrainSample]) -> tuple[StepStats, guards.Fault | None]:
        """Takes one optimiser step of the policy, and of the critic; returns what is wrong where one was skipped."""
        start = time.perf_counter()
        batches = self._batches(samples)
        learning_rate, loss_scale = self.engine.learning_rate, self.engine.loss_scale
        if self._critic is not None and self._critic.learns_alone:
            learning_rate = 0.0
            totals = accumulate(self.engine, self._policy_loss, batches, self._ranks, learn=False)
            policy = Update(totals=totals, grad_norm=0.0)
        else:
            policy = update(self.engine, self._policy_loss, batches, self._ranks)
            if self._reference is not None and policy.grad_norm is not None:
                self._reference.reset_if_due()
        updates: dict[str, Update] = {"": policy}
        critic: dict[str, float] = {}
        if self._critic is not None:
            updates["critic: "], critic = self._critic.step(batches)
        fault = None
        if any(done.is_faulty for done in updates.values()):
            self.skipped_in_row += 1
            fault = self._fault(samples, batches, updates)
        elif policy.grad_norm is not None:
            self.skipped_in_row = 0
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
        logprobs_bt, entropy_bt = self.engine.forward(batch)
        output = self._loss(logprobs_bt, entropy_bt, batch)
        entropy = entropy_bt.detach().sum() / batch.num_tokens_global
        return LossOutput(loss=output.loss, metrics={"entropy": entropy, **output.metrics})

    def _fault(
        self, samples: Sequence[TrainSample], batches: Sequence[TrainBatch], updates: Mapping[str, Update]
    ) -> guards.Fault:
        """Returns what was not finite; whose update was skipped gives the same numbers as in it."""
        columns: dict[str, Callable[[TrainBatch], Tensor]] = {}
        if updates[""].is_faulty:
            columns["logprobs"] = lambda batch: self.engine.forward(batch)[0]
        if self._critic is not None and updates["critic: "].is_faulty:
            columns["values"] = self._critic.values
        return guards.fault_of(
            samples,
            numbers=self._numbers(batches, columns),
            totals={f"{who}{name}": value for who, done in updates.items() for name, value in done.totals.items()},
            gradients=[f"{who}{name}" for who, done in updates.items() for name in done.gradients],
        )

    def measure(self, samples: Sequence[TrainSample]) -> dict[int, Measured]:
        """Returns on rank 0 what is known of each sample, by its place."""
        measured = self._numbers(self._batches(samples), self.measures)
        return {index: Measured(**numbers) for index, numbers in measured.items()}

    @torch.no_grad()
    def _numbers(
        self, batches: Sequence[TrainBatch], columns: Mapping[str, Callable[[TrainBatch], Tensor]]
    ) -> dict[int, dict[str, tuple[float, ...]]]:
        """Returns on rank 0 the columns' numbers of every token, by the place of its sample; elsewhere nothing."""
        batches = [batch.to(self._ranks.device) for batch in batches]
        own = measure.unpack(batches, {name: [of(batch) for batch in batches] for name, of in columns.items()})
        return {index: numbers for share in self._ranks.gather(own) for index, numbers in share.items()}

    def _batches(self, samples: Sequence[TrainSample]) -> list[TrainBatch]:
        """Returns this rank's micro-batches."""
        return pack(
            samples,
            micro_batch_tokens=self.micro_batch_tokens,
            num_ranks=self._ranks.size,
            cost=lambda length: flops.step_flops(self._flops, [length], length),
        )[self._ranks.rank]

    @torch.no_grad()
    def logprob_gap(self, samples: Sequence[TrainSample]) -> float:
        """Returns the mean |Δ log-prob| to what the samples say, over their trained tokens."""
        total = 0.0
        for batch in self._batches(samples):
            batch = batch.to(self._ranks.device)
            logprobs_bt, _ = self.engine.forward(batch)
            gap_bt = (logprobs_bt - batch.rollout_logprobs_bt).where(batch.mask_bt, 0.0)
            total += float(gap_bt.double().abs().sum()) / batch.num_tokens_global
        return self._ranks.sum([total])[0]

    def export(self, folder: Path) -> dict[str, TensorSpec] | Exception:
        """Writes the weights on rank 0; returns what the files are to hold, or why they could not be written."""
        named = [
            (name, tensor.to("cpu", copy=self.engine.stage == 3))  # else it stays what it is
            for bucket in self.engine.buckets(EXPORT_BYTES)
            for name, tensor in bucket
        ]
        if not self._ranks.is_main:
            return {}
        published = unshared(dict(self.policy.as_published(named)))  # DeepSpeed's are parts of one
        with concurrent.futures.ThreadPoolExecutor(1) as sums:  # of the tensors, while they are written
            specs = sums.submit(manifest.specs, published.items())
            try:
                self._write(folder, published)
            except (OSError, SafetensorError) as error:  # of rank 0's disk alone
                return error
        return specs.result()

    def _write(self, folder: Path, published: dict[str, Tensor]) -> None:
        if self.policy.adapter is not None:
            lora.save(folder, self.policy.adapter, published)
        else:
            write_model(folder, self.policy.model, self._tokenizer, published, self._dtype)

    def stream(self, max_bytes: int) -> None:
        """Gives the weights to rank 0's sink, under the names of published ones."""
        for bucket in self.engine.buckets(max_bytes):
            self._give(self.policy.as_published(bucket))

    def _give(self, bucket: Any) -> None:
        if self.sink is not None and self.sink_failure is None:
            try:
                self.sink(bucket)
            except Exception as error:  # noqa: BLE001 - rank 0 raises it later: the ranks must gather what is left
                self.sink_failure = error

    def beat(self) -> None:
        """Does nothing: ranks that only follow wait for so long for the next work, and no longer."""

    def offload(self) -> None:
        """Moves everything to the CPU's memory."""
        for engine in (self.engine, *self.beside.values()):
            engine.offload()

    def onload(self) -> None:
        """Moves it back."""
        for engine in (self.engine, *self.beside.values()):
            engine.onload()

    def engines(self) -> dict[str, DeepSpeedEngine | FrozenEngine]:
        """Returns the models whose state no other file holds, by the name that their tensors begin with."""
        resets = self._reference is not None and self._reference.reset_every > 0
        beside = {name: engine for name, engine in self.beside.items() if name == "critic" or resets}
        return {POLICY: self.engine, **beside}

    def state(self) -> dict[str, Any]:
        """Gives the state of all engines to rank 0's sink; returns the rest, ready for JSON."""
        for name, engine in self.engines().items():
            for bucket in engine.state(BUCKET_BYTES):
                self._give({f"{name}/{key}": tensor for key, tensor in bucket.items()})
        return {
            "engines": {name: engine.counters() for name, engine in self.engines().items()},
            "skipped_in_row": self.skipped_in_row,
            "micro_batch": {"tokens": self.micro_batch_tokens, "measured_for": self._measured_for},
            "random": self._ranks.gather(randomness(self._ranks.device)),
            "dtype": dtype_name(self._dtype),
            "adapter": None if self.policy.adapter is None else self.policy.adapter.model_dump(),
        }

    def restore(self, rest: Mapping[str, Any]) -> None:
        """Goes back to what `state` gave; rank 0 alone reads."""
        for name, engine in self.engines().items():
            engine.restore(functools.partial(self._read, name), rest["engines"][name])
        self.skipped_in_row = rest["skipped_in_row"]
        if self._measured_for is not None and self._measured_for == rest["micro_batch"]["measured_for"]:
            self.micro_batch_tokens = rest["micro_batch"]["tokens"]  # other ones would sum in another order
        if self._ranks.rank < len(rest["random"]):
            restore_randomness(rest["random"][self._ranks.rank], self._ranks.device)

    def _read(self, engine: str, key: str) -> Tensor:
        assert self.saved is not None, "rank 0 says where the state is before all ranks restore it"
        return self.saved.read(f"{engine}/{key}")

    def close(self) -> None:
        """Lets go of DeepSpeed's state."""
        for engine in (self.engine, *self.beside.values()):
            engine.close()
