"""The reference policy of KL divergences: a frozen model beside the policy, or the policy without its adapter."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from hocket.config import TrainerConfig
from hocket.errors import ConfigError
from hocket.trainer import engine, lora, offload
from hocket.trainer.batching import TrainBatch
from hocket.trainer.engine import DeepSpeedEngine
from hocket.trainer.policy import Policy
from hocket.trainer.ranks import Ranks

COPY_BYTES = 256 << 20
"""ZeRO-3 gathers the policy's weights for a reset in groups of this size."""


@torch.no_grad()
def base_logprobs(policy: Policy, policy_engine: DeepSpeedEngine, batch: TrainBatch) -> Tensor:
    """Return logprobs_bt under the policy without its adapter, 0 where the batch's mask is false."""
    with lora.switched_off(policy.model):
        logprobs_bt: Tensor = policy_engine.forward(batch)[0]
    return logprobs_bt


class FrozenModel:
    """Runs a model without gradients: whole on every rank or, beside ZeRO stage 3, spread over the ranks as well.

    Args:
        module: parameters in the dtype that DeepSpeedEngine.parameter_dtype names.
        dtype: of the forward pass.
    """

    def __init__(self, module: Policy, config: TrainerConfig, *, dtype: torch.dtype, ranks: Ranks) -> None:
        self._module = module.requires_grad_(False).eval()
        self._ranks = ranks
        self._engine: Any = None
        self._offloaded: offload.Offloaded = ()
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
        with torch.autocast(self._ranks.device.type, self._autocast, enabled=self._autocast is not None):
            logprobs_bt: Tensor = (self._engine or self._module)(batch)[0]
        return logprobs_bt

    def check_same_shapes(self, policy: Policy) -> None:
        """Raise ConfigError unless `copy_from` can copy this policy."""
        shapes = {name: engine.whole_shape(parameter) for name, parameter in policy.named_parameters()}
        if shapes != self.shapes():
            raise ConfigError(
                "algorithm.reference_reset_every can't copy the policy into algorithm.reference, which is another "
                "architecture; leave one of the two out"
            )

    @torch.no_grad()
    def copy_from(self, source: DeepSpeedEngine) -> None:
        """Copy the weights of an engine that trains the same architecture, in this model's dtype. All ranks call it."""
        own = dict(self._module.named_parameters())
        for group in source.by_bytes(COPY_BYTES):
            targets = [own[name] for name, _ in group]
            with engine.gathered([p for _, p in group]), engine.gathered(targets, change=True):
                for target, (_, parameter) in zip(targets, group, strict=True):
                    target.copy_(parameter)

    @torch.no_grad()
    def state(self, max_bytes: int) -> Iterator[dict[str, Tensor]]:
        """Yield copies of the weights in CPU memory, in buckets by name; only on rank 0. All ranks must exhaust it."""
        bucket: dict[str, Tensor] = {}
        for name, parameter in self._module.named_parameters():
            with engine.gathered([parameter]):
                if self._ranks.is_main:
                    bucket[name] = parameter.to("cpu", copy=True)
            if sum(tensor.nbytes for tensor in bucket.values()) >= max_bytes:
                yield bucket
                bucket = {}
        if bucket:
            yield bucket

    def shapes(self) -> dict[str, torch.Size]:
        """Return names and shapes of everything that `state` yields."""
        return {name: engine.whole_shape(parameter) for name, parameter in self._module.named_parameters()}

    def counters(self) -> dict[str, Any]:
        """Return the rest of the state: nothing."""
        return {}

    @torch.no_grad()
    def restore(self, read: Callable[[str], Tensor], counters: Mapping[str, Any]) -> None:
        """Restore what `state` gave, on any number of ranks. All ranks call it; only rank 0 reads."""
        del counters
        for name, parameter in self._module.named_parameters():
            with engine.gathered([parameter], change=True):
                if self._ranks.is_main:
                    parameter.copy_(read(name))
                if self._engine is None:
                    self._ranks.broadcast_in_place(parameter.data)

    def offload(self) -> None:
        """Move the weights to CPU memory; nothing can run until `onload`."""
        optimizer = self._engine.optimizer if self._engine is not None else None  # at stage 3 it holds the shards
        tensors = offload.tensors_in(list(self._module.parameters()), list(self._module.buffers()), optimizer)
        self._offloaded = offload.offload(tensors, self._ranks.device)

    def onload(self) -> None:
        """Move back what `offload` moved."""
        offload.onload(self._offloaded, self._ranks.device)
        self._offloaded = ()

    def close(self) -> None:
        """Release DeepSpeed's state."""
        if self._engine is not None:
            self._engine.destroy()
