"""One rank's models, and its part of common work."""

import contextlib
import dataclasses
import gc
import itertools
import math
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hocket.algorithm.choices import choose
from hocket.algorithm.losses import LossOutput
from hocket.common.machine import return_freed_memory
from hocket.common.registry import Registry, load_plugins
from hocket.common.tasks import LISTENERS, Span, note, seed_of
from hocket.config import Config, ModelConfig
from hocket.data import tokenizer as tokenizers
from hocket.errors import ConfigError
from hocket.trainer import attention, choices, flops, guards, memory, share_gpu
from hocket.trainer.batching import Make, TrainBatch, chosen_packer, unpack
from hocket.trainer.draws import draw_sums
from hocket.trainer.engine import DeepSpeedEngine, Setup, in_buckets
from hocket.trainer.logprobs import CHUNK_TOKENS
from hocket.trainer.policy import Policy, compute_dtype, skeleton
from hocket.trainer.ranks import Ranks
from hocket.trainer.shape import Shape
from hocket.trainer.state import BUCKET_BYTES, POLICY
from hocket.trainer.step import Learner, Update, accumulate, update
from hocket.types import TokenSequence

BatchLoss = Callable[..., LossOutput]
"""(logprobs_bt with gradient, entropy_bt, batch) → this micro-batch's share of the global loss; of a scalar model:
(values_bt with gradient, batch)."""
Column = Callable[[TrainBatch], Tensor]
"""→ [b, t] numbers of a batch's targets, 0 where its mask is False."""
Ask = Callable[[Sequence[TokenSequence], str | None], Coroutine[Any, Any, Sequence[Sequence[float]]]]
"""(sequences, the servers' token) → a number per token, 0 where it was not sampled."""
Numbers = dict[int, dict[str, tuple[float, ...]]]
Share = Sequence[Make]
"""What builds the micro-batches of one rank."""
Sink = Callable[[Any], None]
"""Takes one bucket: [(name, tensor)] of weights, {name: tensor} of a checkpoint."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Auxiliary:
    """What an objective needs beside the policy: a column of numbers per token, measured before a step."""

    column: str  # its name in `TrainSample.columns`
    load: Callable[["Models"], Column] | None = None  # adds what it loads to `learners` and `tensors`
    ask: Ask | None = None  # in place of `load`: rank 0 asks a server
    model: ModelConfig | None = None  # of its own
    learns: bool = False  # whether a step trains that model
    delay: int = 0  # steps that it learns before the policy does


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """What training minimises."""

    loss: BatchLoss  # of the policy
    kind: type[Policy] = Policy  # of the trained model
    temperature: float = 1.0  # of the distribution whose log-probs the loss gets
    epochs: int = 1
    minibatches: int = 1  # of an epoch
    unit: int = 1  # samples, one after another, that no micro-batch divides
    auxiliaries: Sequence[Auxiliary] = ()

    def models(self, policy: ModelConfig) -> list[tuple[ModelConfig, Any]]:
        """Return every model's config and skeleton, the policy's first."""
        found = [(policy, skeleton(policy, self.kind))]
        for one in self.auxiliaries:
            if one.model is not None:
                whole = skeleton(one.model)
                found.append((one.model, whole if one.learns else whole.requires_grad_(False)))
        return found


COLUMNS: Registry[Callable[[Config], Auxiliary | None]] = Registry(
    "column",
    old_logprobs="hocket.trainer.auxiliary",
    ref_logprobs="hocket.trainer.reference",
    values="hocket.trainer.critic",
)
column = COLUMNS.register
"""Decorator of a function that returns what measures a column, or None where the config needs it not.

Example: a plugin whose advantage grows with the policy's entropy before the step.

    @column("entropies")
    def entropies(config: Config) -> Auxiliary | None:
        if "entropies" not in choose("baseline", config.algorithm.baseline).needs:
            return None
        return Auxiliary(column="entropies", load=lambda models: lambda batch: models.engine.forward(batch)[1])

    @advantage("curious", per="token", needs=("entropies",))
    def curious(rewards_t: Tensor, entropies_t: Tensor, bonus: float = 0.1) -> Tensor:
        return rewards_t.sum() + bonus * entropies_t
"""


class Models:
    """Loads what a step trains and measures; `Trainer` has all ranks run its methods."""

    def __init__(self, config: Config, ranks: Ranks, objective: Objective) -> None:
        settings = config.trainer.unmeasured() if ranks.device.type == "cpu" else config.trainer
        self.ranks = ranks
        self.setup = Setup(config=settings, dtype=compute_dtype(config.model, ranks.device), ranks=ranks)
        self._config = config
        self._objective = objective
        self.micro_batch_tokens = CHUNK_TOKENS  # of the first rehearsal
        self.fitted_for: int | None = None  # hash of what micro_batch_tokens=auto depends on
        self._longest = 1  # positions of this rank's longest sequence in the work of now
        self.away: share_gpu.Offloaded = ()
        self._spans: list[Span] = []  # that rank 0 has not heard of
        if config.observe.trace is not None and not ranks.is_main:
            LISTENERS.append(self._spans.append)
        with ranks.deadline("loading the models"), self._naming_memory("start"):
            self._load()

    def _load(self) -> None:
        self._check_plugins()
        objective = self._objective
        settings = self.setup.config
        device = self.ranks.device
        model = self._config.model
        choices.check(settings)
        self.attention = attention.choose_kernel(device)
        models = objective.models(model)
        self.estimate = memory.check(models, settings, self.setup.dtype, device, self.ranks.size)
        self.flops = flops.model_flops(models[0][1])
        self.ranks.part = attention.WHOLE
        if settings.sequence_parallel > 1:
            self.ranks.part = choices.chosen_row_division()(settings.sequence_parallel, self.ranks)
        self.policy = self.load(model, objective.kind)
        shape = Shape.of(self.policy.model)
        self.row_tokens = memory.row_tokens(shape, on_gpu=device.type != "cpu")
        pairs = math.inf if device.type == "cuda" else self.flops.pairs
        packer = chosen_packer(settings.share_prefixes, pairs=pairs, key_share=shape.key_share)
        self.packing: dict[str, Any] = {"unit": objective.unit, "packer": packer}
        (self.peak_flops,) = self.ranks.sum([flops.peak_flops(device, self.setup.dtype)])
        delay = max((one.delay for one in objective.auxiliaries), default=0)
        self.engine = DeepSpeedEngine(self.policy, self.setup, name=POLICY)
        self.engine.plan(settings.steps - delay)
        self.policy.check_architecture(device)
        policy = Learner(
            name=POLICY,
            engine=self.engine,
            loss=self._policy_loss,
            reads=[one.column for one in objective.auxiliaries],
            learns=lambda: all(other.engine.num_steps >= delay for other in self.learners[1:]),
        )
        self.learners = [policy]
        self.tensors: list[Callable[[], Iterator[Tensor]]] = [self.engine.tensors]  # of each model
        self.columns: dict[str, Column] = {"logprobs": lambda batch: self.engine.forward(batch)[0]}
        self.columns |= {one.column: one.load(self) for one in objective.auxiliaries if one.load}
        fixed = settings.micro_batch_tokens
        self.micro_batch_tokens = self._fitted() if fixed == "auto" else fixed

    def _check_plugins(self) -> None:
        """Raise ConfigError on rank 0 where another has imported other files: gradients would differ."""
        hashes = [plugin.sha256 for plugin in load_plugins(self._config.plugins)]
        if any(others != hashes for others in self.ranks.gather(hashes)):
            raise ConfigError("a file under plugins is not the same for all ranks: copy that of rank 0 to every host")

    def load(self, model: ModelConfig, kind: type[Policy]) -> Any:
        """Load a model onto this rank's CPU or, but for rank 0 at ZeRO-3, the meta device."""
        algorithm = self._config.algorithm
        settings = self.setup.config
        return kind(
            model,
            dtype=self.setup.parameter_dtype(),
            temperature=self._objective.temperature,
            gradient_checkpointing=settings.gradient_checkpointing,
            kernels=settings.kernels,
            entropy_gradient=algorithm.entropy_coef > 0 or "entropy_bt" in choose("clip", algorithm.clip).given,
            seed=settings.seed,
            loads=self.ranks.is_main or self.setup.stage < 3,
        )

    def _policy_loss(self, batch: TrainBatch) -> LossOutput:
        columns = self.engine.forward(batch)
        output = self._objective.loss(*columns[:2], batch)
        if len(columns) == 1:  # of a scalar model
            return output
        entropy = columns[1].detach().sum() / batch.num_tokens_global
        drawn = draw_sums(batch, *columns)
        return LossOutput(loss=output.loss, metrics={"entropy": entropy, **drawn, **output.metrics})

    def _fitted(self) -> int:
        config = self._config
        leaves = 0 if config.gpus_apart or config.launch.share_gpu else memory.BESIDE
        used = config.model_dump_json(
            include={"model", "algorithm", "critic", "trainer"}, exclude={"trainer": {"steps"}}
        )
        self.fitted_for = seed_of(used, leaves, self.ranks.size, torch.cuda.get_device_name(self.ranks.device))
        longest = tokenizers.context_length(config.model) - 1
        return memory.fit_micro_batch(self.learners, self.ranks, leaves=leaves, longest=longest)

    def run(self, work: Callable[..., Any], args: Sequence[Any], **own: Any) -> Any:
        """Run a method of this class as this rank's part of common work."""
        self._longest = 0
        self.ranks.use_this_thread()
        name = work.__name__
        start = time.perf_counter()
        with self.ranks.deadline(f"doing the common {name}"), self._naming_memory(name):
            done = work(self, *args, **own)
        note(name, start, who=f"trainer, rank {self.ranks.rank}")
        return done

    @contextlib.contextmanager
    def _naming_memory(self, work: str) -> Iterator[None]:
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
                on_gpu=self.ranks.device.type == "cuda",
            ) from error

    def _built(self, share: Share) -> list[TrainBatch]:
        batches = [make(self.ranks.device, self.ranks.part) for make in share]
        self._longest = max(batch.segments.longest for batch in batches)
        return batches

    def plan(self, steps: int) -> None:
        self.engine.plan(steps)

    def update(self, share: Share, max_gap: float) -> tuple[list[Update], dict[str, float]]:
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

    def evaluate(self, share: Share) -> dict[str, float]:
        """Return the policy's loss and metrics, without a step."""
        idle = dataclasses.replace(self.learners[0], learns=lambda: False)
        return accumulate(idle, self._built(share), self.ranks, math.inf)

    def _work_of(self, batches: Sequence[TrainBatch]) -> list[float]:
        """Return the positions of this rank's sequences, those computed, and the layers' operations for these."""
        rows = [batch.segments for batch in batches if batch.places]
        ends = [end for row in rows for end in row.ends]
        starts = [start for row in rows for start in row.starts]
        positions = sum(sum(batch.lengths) for batch in batches if batch.places)
        operations = flops.step_flops(self.flops, ends, 0) - flops.step_flops(self.flops, starts, 0)
        return [positions, sum(ends) - sum(starts), operations]

    def forget(self) -> None:
        for one in self._objective.auxiliaries:
            self.columns.pop(one.column, None)  # a server's was never there
        del self.tensors[len(self.learners) :]
        gc.collect()  # hooks of ZeRO-3 hold a model in a cycle

    def end_step(self) -> None:
        for learner in self.learners:  # the policy first: whether it learns depends on the steps of the others
            learner.engine.num_steps += learner.learns()
        if self.ranks.device.type == "cpu":
            return_freed_memory()
        if self._config.observe.trace is not None:
            self._tell_spans()

    def _tell_spans(self) -> None:
        """Have rank 0 hear what the other ranks did, by the clock of their machines."""
        unix = time.time() - time.perf_counter()
        own = [span._replace(start=span.start + unix, end=span.end + unix) for span in self._spans]
        self._spans.clear()
        for span in itertools.chain(*self.ranks.gather(own)):
            note(span.name, span.start - unix, span.end - unix, span.who)

    @torch.no_grad()
    def numbers(self, share: Share, names: Sequence[str] | None = None) -> Numbers:
        """Return on rank 0 columns per token, by the sample's place; default: the policy's log-probs and entropy."""
        own: Numbers = {}
        for batch in self._built(share):
            if names is None:
                columns = dict(zip(("logprobs", "entropy"), self.engine.forward(batch), strict=False))
            else:
                columns = {name: self.columns[name](batch) for name in names}
            own |= unpack(batch, columns)
        own = {} if self.ranks.part.number else own  # others of the same rows would send the same
        return dict(itertools.chain.from_iterable(numbers.items() for numbers in self.ranks.gather(own)))

    @torch.no_grad()
    def surprise(self, share: Share) -> list[float]:
        """Return, summed over sampled tokens: 1, |trainer − engine log-prob|, and what `draw_sums` does."""
        sums: list[Tensor] = []
        for batch in self._built(share):
            columns = self.engine.forward(batch)
            gap_bt = (columns[0] - batch.rollout_logprobs_bt).abs().double()
            drawn = draw_sums(batch, *columns).values()
            sums.append(torch.stack([batch.mask_bt.double().sum(), gap_bt.sum(), *drawn]))
        return self.ranks.total(torch.stack(sums).sum(dim=0).tolist())

    def stream(self, max_bytes: int, trained: bool, sink: Any = None) -> None:
        for bucket in self.engine.buckets(max_bytes, trained=trained):
            sink(bucket)

    def state(self, sink: Any = None) -> dict[str, Any]:
        """Give the tensors of all learners to the sink; return their counters."""
        for learner in self.learners:
            for bucket in in_buckets(learner.engine.state(), BUCKET_BYTES):  # on rank 0 alone
                sink(dict(bucket))
        return {learner.name: learner.engine.counters() for learner in self.learners}

    def restore(self, rest: Mapping[str, Any], read: Callable[[str], Tensor] | None = None) -> None:
        for learner in self.learners:
            learner.engine.restore(read, rest["engines"][learner.name])
        size = rest["micro_batch"]
        if self.fitted_for is not None and self.fitted_for == size["measured_for"]:
            self.micro_batch_tokens = size["tokens"]  # other sizes would sum in another order

    def offload(self) -> None:
        tensors = itertools.chain.from_iterable(of_model() for of_model in self.tensors)
        self.away = share_gpu.offload(tensors, self.ranks.device)

    def onload(self) -> None:
        share_gpu.onload(self.away, self.ranks.device)
        self.away = ()

    def close(self) -> None:
        for learner in self.learners:
            learner.engine.close()
