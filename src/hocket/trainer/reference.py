"""The reference policy of a KL penalty: a frozen model, or the one under a trained adapter."""

from collections.abc import Iterator

import torch
from torch import Tensor

from hocket.config import AlgorithmConfig, CriticConfig, ModelConfig
from hocket.data import tokenizer as tokenizers
from hocket.trainer import engine, offload
from hocket.trainer.batching import TrainBatch
from hocket.trainer.models import Column, Extra, Models
from hocket.trainer.policy import Policy


def reference(algorithm: AlgorithmConfig, critic: CriticConfig, model: ModelConfig) -> Extra | None:
    if algorithm.kl == "off":
        return None
    if algorithm.reference is None and model.weights == "adapter":
        return Extra(column="ref_logprobs", load=_under_adapter)
    return frozen(algorithm.reference, "algorithm.reference", model)


def frozen(path: str | None, setting: str, model: ModelConfig) -> Extra:
    """Return the log-probs of the whole model at `path`, or that the run starts from."""
    if path is not None:
        tokenizers.check_same_ids(path, setting, model)
    own = model.beside(path)

    def load(models: Models) -> Column:
        frozen = FrozenModel(models.load(own, Policy), models.setup)
        models.tensors.append(frozen.tensors)
        return frozen.logprobs

    return Extra(column="ref_logprobs", model=own, load=load)


def _under_adapter(models: Models) -> Column:
    def logprobs(batch: TrainBatch) -> Tensor:
        with models.policy.weights.base(models.policy.model):
            return models.policy_logprobs(batch)

    return logprobs


class FrozenModel:
    """Runs without gradients: whole on every rank or, beside ZeRO-3, spread over the ranks."""

    def __init__(self, module: Policy, setup: engine.Setup) -> None:
        self._module = module.requires_grad_(False).eval()
        self._setup = setup
        device = setup.ranks.device
        if setup.stage == 3:
            engine.spread(module, setup)
            engine.initialize(setup, model=module)  # its hooks gather the weights
        else:
            module.to(device)
        module.check_architecture(device)

    def logprobs(self, batch: TrainBatch) -> Tensor:
        casts = self._setup.stage == 0 and self._setup.dtype != torch.float32
        with torch.autocast(self._setup.ranks.device.type, self._setup.dtype, enabled=casts):
            logprobs_bt: Tensor = self._module(batch)[0]
        return logprobs_bt

    def tensors(self) -> Iterator[Tensor]:
        return offload.tensors_in(list(self._module.parameters()), list(self._module.buffers()))
