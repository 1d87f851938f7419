"""Models that are not trained: whole on every rank or, beside ZeRO stage 3, spread over the ranks as well.

Takes a module and gives its outputs; may take over the weights of an engine that trains the same module. Never knows
what the outputs are for.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hocket.config import TrainerConfig
from hocket.trainer import engine, offload
from hocket.trainer.ranks import Ranks


class FrozenEngine:
    """Runs one module without gradients, in the way in which DeepSpeedEngine trains one.

    Args:
        module: parameters in the dtype that DeepSpeedEngine.parameter_dtype names.
        dtype: of the forward pass.
    """

    def __init__(self, module: nn.Module, config: TrainerConfig, *, dtype: torch.dtype, ranks: Ranks) -> None:
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

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """The parameters as they lie on this rank, each tied one under its first name only."""
        return dict(self._module.named_parameters())

    @torch.no_grad()
    def forward(self, *args: Any) -> Any:
        """Calls the module."""
        with torch.autocast(self._ranks.device.type, self._autocast, enabled=self._autocast is not None):
            return (self._engine or self._module)(*args)

    @torch.no_grad()
    def copy_from(self, source: engine.DeepSpeedEngine, max_bytes: int) -> None:
        """Takes over the weights of an engine that trains all of the same module, in this one's dtype.

        All ranks must call it. At ZeRO stage 3 weights are whole for about max_bytes at a time.
        """
        own = self.parameters
        for group in source.by_bytes(max_bytes):
            targets = [own[name] for name, _ in group]
            with engine.gathered([p for _, p in group]), engine.gathered(targets, change=True):
                for target, (_, parameter) in zip(targets, group, strict=True):
                    target.copy_(parameter)

    @torch.no_grad()
    def state(self, max_bytes: int) -> Iterator[dict[str, Tensor]]:
        """Yields copies of the weights in the CPU's memory, in buckets, by their names.

        All ranks must exhaust the iterator; only on rank 0 it yields anything.
        """
        bucket: dict[str, Tensor] = {}
        for name, parameter in self.parameters.items():
            with engine.gathered([parameter]):
                if self._ranks.is_main:
                    bucket[name] = parameter.to("cpu", copy=True)
            if sum(tensor.nbytes for tensor in bucket.values()) >= max_bytes:
                yield bucket
                bucket = {}
        if bucket:
            yield bucket

    def shapes(self) -> dict[str, torch.Size]:
        """Returns names and shapes of everything that `state` yields."""
        return {name: engine.whole_shape(parameter) for name, parameter in self.parameters.items()}

    def counters(self) -> dict[str, Any]:
        """Returns the rest of the state: nothing."""
        return {}

    @torch.no_grad()
    def restore(self, read: Callable[[str], Tensor], counters: Mapping[str, Any]) -> None:
        """Goes back to what `state` gave, on any number of ranks. All ranks must call it; rank 0 alone reads."""
        del counters
        for name, parameter in self.parameters.items():
            with engine.gathered([parameter], change=True):
                if self._ranks.is_main:
                    parameter.copy_(read(name))
                if self._engine is None:
                    self._ranks.broadcast_in_place(parameter.data)

    def offload(self) -> None:
        """Moves the weights to the CPU's memory; until `onload` nothing can run."""
        optimizer = self._engine.optimizer if self._engine is not None else None  # at stage 3 it holds the shards
        tensors = offload.tensors_in(list(self._module.parameters()), list(self._module.buffers()), optimizer)
        self._offloaded = offload.offload(tensors, self._ranks.device)

    def onload(self) -> None:
        """Moves back what `offload` moved."""
        offload.onload(self._offloaded, self._ranks.device)
        self._offloaded = ()

    def close(self) -> None:
        """Lets go of DeepSpeed's state."""
        if self._engine is not None:
            self._engine.destroy()
