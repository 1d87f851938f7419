"""The reference policy of a KL penalty: a frozen model, or the one under a trained adapter."""

import functools
from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor

from hocket.config import AlgorithmConfig, CriticConfig, ModelConfig, TrainerConfig
from hocket.data import tokenizer as tokenizers
from hocket.trainer import engine, offload
from hocket.trainer.batching import TrainBatch
from hocket.trainer.extras import Base, Extra, Loaded
from hocket.trainer.policy import Policy
from hocket.trainer.ranks import Ranks


def reference(algorithm: AlgorithmConfig, critic: CriticConfig, model: ModelConfig) -> Extra | None:
    path = algorithm.reference
    if algorithm.kl == "off":
        return None
    if path is not None:
        tokenizers.check_same_ids(path, "algorithm.reference", model)
    elif model.weights == "adapter":
        return Extra(column="ref_logprobs", load=_under_adapter)
    own = model.beside(path)
    return Extra(name="reference", model=own, column="ref_logprobs", load=functools.partial(_load, own))


def _under_adapter(base: Base) -> Loaded:
    def logprobs(batch: TrainBatch) -> Tensor:
        with base.policy.weights.base(base.policy.model):
            return base.logprobs(batch)

    return Loaded(measure=logprobs)


def _load(model: ModelConfig, base: Base) -> Loaded:
    module = base.load(model, Policy)
    frozen = FrozenModel(module, base.settings, dtype=base.dtype, ranks=base.ranks)
    return Loaded(measure=frozen.logprobs, frozen=frozen)


class FrozenModel:
    """Runs without gradients: whole on every rank or, beside ZeRO-3, spread over the ranks."""

    def __init__(self, module: Policy, config: TrainerConfig, *, dtype: torch.dtype, ranks: Ranks) -> None:
        self._module = module.requires_grad_(False).eval()
        stage = engine.zero_stage(config, dtype, ranks)
        enabled = stage == 0 and dtype != torch.float32
        self._autocast = functools.partial(torch.autocast, ranks.device.type, dtype, enabled=enabled)
        if stage == 3:
            settings = engine.deepspeed_config(config, stage=stage, dtype=dtype)
            engine.spread(module, settings, ranks)
            engine.initialize(ranks, model=module, config=settings)  # its hooks gather the weights
        else:
            module.to(ranks.device)
        module.check_architecture(ranks.device)

    def logprobs(self, batch: TrainBatch) -> Tensor:
        with self._autocast():
            return cast(Tensor, self._module(batch)[0])

    def tensors(self) -> Iterator[Tensor]:
        return offload.tensors_in(list(self._module.parameters()), list(self._module.buffers()))
