"""One rank's models: the policy, and those that the algorithm needs beside it."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hocket.algorithm.choices import choose
from hocket.algorithm.losses import LossConfig, LossOutput, policy_loss
from hocket.common.registry import load_plugins
from hocket.common.tasks import seed_of
from hocket.config import AlgorithmConfig, Config, CriticConfig, ModelConfig
from hocket.data import tokenizer as tokenizers
from hocket.errors import ConfigError
from hocket.trainer import attention, engine, flops, memory
from hocket.trainer.batching import TrainBatch, unpack
from hocket.trainer.critic import critic
from hocket.trainer.engine import DeepSpeedEngine, parameter_dtype
from hocket.trainer.extras import Base, Column, Extra, old_policy
from hocket.trainer.policy import Policy, compute_dtype, skeleton
from hocket.trainer.ranks import Ranks
from hocket.trainer.reference import reference
from hocket.trainer.state import POLICY
from hocket.trainer.step import Learner

BatchLoss = Callable[[Tensor, Tensor, TrainBatch], LossOutput]
"""(logprobs_bt with gradient, entropy_bt, batch) → this micro-batch's share of the global loss."""
Need = Callable[[AlgorithmConfig, CriticConfig, ModelConfig], Extra | None]
EXTRAS: tuple[Need, ...] = (old_policy, reference, critic)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """What training minimises."""

    loss: BatchLoss  # of the policy
    temperature: float = 1.0  # of the distribution whose log-probs the loss gets
    epochs: int = 1
    minibatches: int = 1  # of an epoch
    extras: Sequence[Extra] = ()  # what the loss needs beside the policy

    def models(self, policy: ModelConfig) -> list[tuple[ModelConfig, bool]]:
        """Return every model, each with whether it learns."""
        return [(policy, True), *((extra.model, extra.learns) for extra in self.extras if extra.model is not None)]


def configured(config: Config) -> Objective:
    algorithm = config.algorithm
    made = (make(algorithm, config.critic, config.model) for make in EXTRAS)
    return Objective(
        loss=configured_loss(algorithm.loss(config.rollout.max_tokens)),
        temperature=config.rollout.temperature,
        epochs=algorithm.epochs,
        minibatches=algorithm.minibatches,
        extras=[extra for extra in made if extra is not None],
    )


class Models(Base):
    """Loads what a step trains and measures."""

    def __init__(self, config: Config, ranks: Ranks, objective: Objective) -> None:
        self.settings = config.trainer.unmeasured() if ranks.device.type == "cpu" else config.trainer
        self.ranks = ranks
        self._config = config
        self._objective = objective
        self._check_plugins()
        self.dtype = compute_dtype(config.model, ranks.device)
        self.attention = attention.choose_kernel(ranks.device)
        self.estimate = memory.check(objective.models(config.model), self.settings, self.dtype, ranks)
        with ranks.deadline("loading the models"):
            self.policy = self.load(config.model, Policy)
            self.flops = flops.model_flops(skeleton(config.model))
            (self.peak_flops,) = ranks.sum([flops.peak_flops(ranks.device, self.dtype)])
            delay = sum(extra.delay for extra in objective.extras)
            own_steps = self.settings.model_copy(update={"steps": self.settings.steps - delay})
            self.engine = DeepSpeedEngine(self.policy, own_steps, dtype=self.dtype, ranks=ranks)
            self.policy.check_architecture(ranks.device)
            self.engines: dict[str, Any] = {}
            self.columns: dict[str, Column] = {}  # measured before a step
            others: list[Learner] = []
            for extra in objective.extras:
                loaded = extra.load(self)
                self.columns[extra.column] = loaded.measure
                if loaded.frozen is not None:
                    self.engines[extra.name] = loaded.frozen
                if loaded.learner is not None:
                    others.append(loaded.learner)
            policy = Learner(
                name=POLICY,
                engine=self.engine,
                loss=self._policy_loss,
                reads=tuple(self.columns),
                learns=lambda: all(other.engine.num_steps >= delay for other in others),
            )
            self.learners = [policy, *others]
            self.fitted_for: int | None = None  # hash of what decides the size with trainer.micro_batch_tokens=auto
            fixed = self.settings.micro_batch_tokens
            self.micro_batch_tokens = self._fitted() if fixed == "auto" else fixed
        self.saved = {learner.name: learner.engine for learner in self.learners}  # in a checkpoint
        self.engines |= self.saved

    def _check_plugins(self) -> None:
        """Raise ConfigError on rank 0 where another rank has imported other files: their gradients would differ."""
        hashes = [plugin.sha256 for plugin in load_plugins(self._config.plugins)]
        if any(others != hashes for others in self.ranks.gather(hashes)):
            raise ConfigError("a file under plugins is not the same for all ranks: copy that of rank 0 to every host")

    def load(self, model: ModelConfig, kind: type[Policy]) -> Any:
        algorithm = self._config.algorithm
        return kind(
            model,
            dtype=parameter_dtype(self.settings, self.dtype, self.ranks),
            temperature=self._objective.temperature,
            gradient_checkpointing=self.settings.gradient_checkpointing,
            kernels=self.settings.kernels,
            entropy_gradient=algorithm.entropy_coef > 0 or "entropy_bt" in choose("clip", algorithm.clip).given,
            seed=self.settings.seed,
            loads=self.ranks.is_main or engine.zero_stage(self.settings, self.dtype, self.ranks) < 3,
        )

    def _fitted(self) -> int:
        config = self._config
        leaves = 0 if config.gpus_apart or config.launch.share_gpu else memory.BESIDE
        used = config.model_dump_json(
            include={"model", "algorithm", "critic", "trainer"}, exclude={"trainer": {"steps"}}
        )
        self.fitted_for = seed_of(used, leaves, self.ranks.size, torch.cuda.get_device_name(self.ranks.device))
        longest = tokenizers.context_length(config.model) - 1
        return memory.fit_micro_batch(self.learners, self.ranks, leaves=leaves, longest=longest)

    @torch.no_grad()
    def numbers(
        self, batches: Sequence[TrainBatch], columns: Mapping[str, Column]
    ) -> dict[int, dict[str, tuple[float, ...]]]:
        """Return on rank 0 the columns' numbers per token, by the sample's place."""
        own: dict[int, dict[str, tuple[float, ...]]] = {}
        for batch in batches:
            own |= unpack(batch, {name: column(batch) for name, column in columns.items()})
        return {index: numbers for share in self.ranks.gather(own) for index, numbers in share.items()}

    @torch.no_grad()
    def surprise(self, batches: Sequence[TrainBatch]) -> list[float]:
        """Return, summed over sampled tokens and ranks: 1, |trainer − engine log-prob|, −log p − H, Var(log p)."""
        sums = torch.zeros(4, dtype=torch.float64, device=self.ranks.device)
        for batch in batches:
            logprobs_bt, entropy_bt, variance_bt = self.engine.forward(batch, True)
            gap_bt = (logprobs_bt - batch.rollout_logprobs_bt).abs()
            columns = (batch.mask_bt, gap_bt, -logprobs_bt - entropy_bt, variance_bt)
            sums += torch.stack([column_bt.sum(dtype=torch.float64) for column_bt in columns])
        return self.ranks.sum(sums.tolist())

    def _policy_loss(self, batch: TrainBatch) -> LossOutput:
        logprobs_bt, entropy_bt = self.engine.forward(batch)
        output = self._objective.loss(logprobs_bt, entropy_bt, batch)
        entropy = entropy_bt.detach().sum() / batch.num_tokens_global
        return LossOutput(loss=output.loss, metrics={"entropy": entropy, **output.metrics})


def configured_loss(settings: LossConfig) -> BatchLoss:
    def loss(logprobs_bt: Tensor, entropy_bt: Tensor, batch: TrainBatch) -> LossOutput:
        return policy_loss(
            logprobs_bt,
            batch.rollout_logprobs_bt,
            batch.advantages_bt,
            batch.mask_bt,
            config=settings,
            num_tokens=batch.num_tokens_global,
            num_sequences=batch.num_sequences_global,
            old_logprobs_bt=batch.columns.get("old_logprobs"),
            ref_logprobs_bt=batch.columns.get("ref_logprobs"),
            entropy_bt=entropy_bt,
            sample_bt=batch.sample_bt,
        )

    return loss
