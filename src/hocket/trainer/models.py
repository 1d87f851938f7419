"""One rank's models: the policy, and the reference and the critic where the algorithm needs them."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from hocket.algorithm.losses import LossConfig, LossOutput, policy_loss
from hocket.common.tasks import seed_of
from hocket.config import Config, ModelConfig, TrainerConfig
from hocket.data import tokenizer as tokenizers
from hocket.trainer import attention, engine, flops, lora, memory, offload
from hocket.trainer.batching import TrainBatch, unpack
from hocket.trainer.critic import Critic, ValueModel
from hocket.trainer.engine import DeepSpeedEngine, parameter_dtype
from hocket.trainer.policy import Policy, compute_dtype
from hocket.trainer.ranks import Ranks
from hocket.trainer.state import POLICY
from hocket.trainer.step import Learner, always

BatchLoss = Callable[[Tensor, Tensor, TrainBatch], LossOutput]
"""(logprobs_bt with gradient, entropy_bt, batch) → this micro-batch's share of the global loss."""


class Models:
    """Loads the models of a run: what a step trains, what is measured and what a checkpoint holds.

    Args:
        loss: None: the configured policy loss, with the models that it needs beside the policy.
    """

    def __init__(self, config: Config, ranks: Ranks, loss: BatchLoss | None) -> None:
        algorithm, settings = config.algorithm, config.trainer
        if ranks.device.type == "cpu":
            settings = settings.unmeasured()
        own_loss, self._ranks = loss is None, ranks
        models = named_models(config) if own_loss else {POLICY: config.model}
        with_reference, with_critic = own_loss and algorithm.kl != "off", "critic" in models
        for setting, path in {"algorithm.reference": algorithm.reference, "critic.path": config.critic.path}.items():
            if path is not None and config.model.beside(path) in models.values():
                tokenizers.check_same_ids(path, setting, config.model)
        self.dtype = compute_dtype(config.model, ranks.device)
        self.attention = attention.choose_kernel(ranks.device)
        self.estimate = memory.check(models, settings, self.dtype, ranks)

        def load(name: str, kind: type[Policy] = Policy) -> Any:
            return kind(
                models[name],
                dtype=parameter_dtype(settings, self.dtype, ranks),
                temperature=config.rollout.temperature if own_loss else 1.0,
                gradient_checkpointing=settings.gradient_checkpointing,
                kernels=settings.kernels,
                entropy_gradient=algorithm.entropy_coef > 0,
                seed=settings.seed,
                loads=ranks.is_main or engine.zero_stage(settings, self.dtype, ranks) < 3,
            )

        self._loss = loss or configured_loss(algorithm.loss(config.rollout.max_tokens))
        self.columns: dict[str, Callable[[TrainBatch], Tensor]] = {}  # measured before a step: [b, t] of a batch
        options: dict[str, Any] = {"dtype": self.dtype, "ranks": ranks}
        with ranks.deadline("loading the models"):
            self.policy: Policy = load(POLICY)
            self.flops = flops.model_flops(self.policy.model)  # before DeepSpeed spreads the weights over the ranks
            (self.peak_flops,) = ranks.sum([flops.peak_flops(ranks.device, self.dtype)])
            own_steps = settings.steps - (config.critic.warmup_steps if with_critic else 0)
            self.engine = DeepSpeedEngine(self.policy, settings.model_copy(update={"steps": own_steps}), **options)
            self.policy.check_architecture(ranks.device)
            self.engines: dict[str, DeepSpeedEngine | FrozenModel] = {POLICY: self.engine}
            learns = always
            learners: list[Learner] = []
            if own_loss and algorithm.updates > 1 and algorithm.correction != "none":  # without: the engine's own
                self.columns["old_logprobs"] = self.policy_logprobs
            if "reference" in models:
                frozen = FrozenModel(load("reference"), settings, **options)
                self.engines["reference"] = frozen
                self.columns["ref_logprobs"] = frozen.logprobs
            elif with_reference:  # the base model under the adapter
                self.columns["ref_logprobs"] = self._base_logprobs
            if with_critic:
                critic = Critic(load("critic", ValueModel), config.critic, settings, **options)
                self.engines["critic"] = critic.engine
                self.columns["values"] = critic.engine.forward
                learners = [Learner(name="critic", engine=critic.engine, loss=critic.loss, reads=("values", "returns"))]
                learns = critic.is_warm
            policy = Learner(
                name=POLICY, engine=self.engine, loss=self._policy_loss, reads=tuple(self.columns), learns=learns
            )
            self.learners = [policy, *learners]  # what a step trains
            self.fitted_for: int | None = None  # hash of what decides the size with trainer.micro_batch_tokens=auto
            fixed = settings.micro_batch_tokens
            self.micro_batch_tokens = self._fitted(config) if fixed == "auto" else fixed
        self.saved = {name: engine for name, engine in self.engines.items() if isinstance(engine, DeepSpeedEngine)}

    def _fitted(self, config: Config) -> int:
        """Measure the size of micro-batches on a GPU, and set `fitted_for`."""
        leaves = 0 if config.gpus_apart or config.launch.share_gpu else memory.BESIDE
        used = config.model_dump_json(
            include={"model", "algorithm", "critic", "trainer"}, exclude={"trainer": {"steps"}}
        )
        self.fitted_for = seed_of(used, leaves, self._ranks.size, torch.cuda.get_device_name(self._ranks.device))
        longest = tokenizers.context_length(config.model) - 1
        return memory.fit_micro_batch(self.learners, self._ranks, leaves=leaves, longest=longest)

    @torch.no_grad()
    def numbers(
        self, batches: Sequence[TrainBatch], columns: Mapping[str, Callable[[TrainBatch], Tensor]]
    ) -> dict[int, dict[str, tuple[float, ...]]]:
        """Return on rank 0 the columns' numbers per token, by the place of the sample; elsewhere nothing."""
        batches = [batch.to(self._ranks.device) for batch in batches]
        own = unpack(batches, {name: [column(batch) for batch in batches] for name, column in columns.items()})
        return {index: numbers for share in self._ranks.gather(own) for index, numbers in share.items()}

    def policy_logprobs(self, batch: TrainBatch) -> Tensor:
        return cast(Tensor, self.engine.forward(batch)[0])

    def _base_logprobs(self, batch: TrainBatch) -> Tensor:
        with lora.switched_off(self.policy.model):
            return self.policy_logprobs(batch)

    def _policy_loss(self, batch: TrainBatch) -> LossOutput:
        logprobs_bt, entropy_bt = self.engine.forward(batch)
        output = self._loss(logprobs_bt, entropy_bt, batch)
        entropy = entropy_bt.detach().sum() / batch.num_tokens_global
        return LossOutput(loss=output.loss, metrics={"entropy": entropy, **output.metrics})


class FrozenModel:
    """Runs the reference without gradients: whole on every rank or, beside ZeRO-3, spread over the ranks as well."""

    def __init__(self, module: Policy, config: TrainerConfig, *, dtype: torch.dtype, ranks: Ranks) -> None:
        self._module = module.requires_grad_(False).eval()
        self._engine: Any = None
        stage = engine.zero_stage(config, dtype, ranks)
        enabled = stage == 0 and dtype != torch.float32
        self._autocast = functools.partial(torch.autocast, ranks.device.type, dtype, enabled=enabled)
        if stage == 3:
            settings = engine.deepspeed_config(config, stage=stage, dtype=dtype)
            engine.spread(module, settings, ranks)
            self._engine = engine.initialize(ranks, model=module, config=settings).eval()
        else:
            module.to(ranks.device)
        module.check_architecture(ranks.device)

    def logprobs(self, batch: TrainBatch) -> Tensor:
        """Return logprobs_bt of the batch's targets, 0 where its mask is false."""
        with self._autocast():
            return cast(Tensor, (self._engine or self._module)(batch)[0])

    def tensors(self) -> Iterator[Tensor]:
        """Yield all tensors that the model holds on the device."""
        optimizer = self._engine.optimizer if self._engine is not None else None  # at stage 3 it holds the shards
        return offload.tensors_in(list(self._module.parameters()), list(self._module.buffers()), optimizer)

    def close(self) -> None:
        if self._engine is not None:
            self._engine.destroy()


def named_models(config: Config) -> dict[str, ModelConfig]:
    """Return the models that a run holds: the policy, and a reference and a critic where the algorithm needs them."""
    algorithm, models = config.algorithm, {POLICY: config.model}
    if algorithm.kl != "off" and (algorithm.reference is not None or config.model.lora is None):
        models["reference"] = config.model.beside(algorithm.reference)  # else the model under the adapter
    if algorithm.baseline == "critic":
        models["critic"] = config.model.beside(config.critic.path)
    return models


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
