"""The reference policy of KL divergences: a frozen model beside the policy, or the policy without its adapter."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from hocket.config import TrainerConfig
from hocket.trainer import engine, lora, offload
from hocket.trainer.batching import TrainBatch
from hocket.trainer.engine import DeepSpeedEngine
from hocket.trainer.policy import Policy
from hocket.trainer.ranks import Ranks


@torch.no_grad()
def base_logprobs(policy: Policy, policy_engine: DeepSpeedEngine, batch: TrainBatch) -> Tensor:
    """Return logprobs_bt under the policy without its adapter, 0 where the batch's mask is false."""
    with lora.switched_off(policy.model):
        logprobs_bt: Tensor = policy_engine.forward(batch)[0]
    return logprobs_bt


class FrozenModel:
    """Runs a model without gradients: whole on every rank or, beside ZeRO stage 3, spread over the ranks as well."""

    def __init__(self, module: Policy, config: TrainerConfig, *, dtype: torch.dtype, ranks: Ranks) -> None:
        self._module = module.requires_grad_(False).eval()
        self._device = ranks.device
        self._engine: Any = None
        stage = engine.default_zero_stage(config, dtype, ranks)
        self._autocast = dtype if stage == 0 and dtype != torch.float32 else None
        if stage == 3:
            settings = engine.deepspeed_config(config, stage=stage, dtype=dtype)
            self._engine = engine.initialize(ranks, model=module, config=settings).eval()
        else:
            module.to(ranks.device)
        module.check_architecture(ranks.device)

    @torch.no_grad()
    def logprobs(self, batch: TrainBatch) -> Tensor:
        """Return logprobs_bt of the batch's targets, 0 where its mask is false."""
        with torch.autocast(self._device.type, self._autocast, enabled=self._autocast is not None):
            logprobs_bt: Tensor = (self._engine or self._module)(batch)[0]
        return logprobs_bt

    def tensors(self) -> Iterator[Tensor]:
        """Yield all tensors that the model holds on the device."""
        optimizer = self._engine.optimizer if self._engine is not None else None  # at stage 3 it holds the shards
        return offload.tensors_in(list(self._module.parameters()), list(self._module.buffers()), optimizer)

    def close(self) -> None:
        """Release DeepSpeed's state."""
        if self._engine is not None:
            self._engine.destroy()
