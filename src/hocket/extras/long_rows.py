"""Train on very long rows (trainer.gradient_checkpointing=long): the inputs of layers are kept on
the CPU, and MLPs work in tiles."""

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from hocket.trainer.choices import Recomputation, recomputation
from hocket.trainer.flops import Shape

TILE = 4096  # positions


@recomputation("long")
class LongRows(Recomputation):
    """Keeps the layers' inputs on the CPU; the MLP of each layer computes, and recomputes, TILE
    positions at a time.

    The numbers stay the same.
    """

    gathered_at_once = ("mlp",)  # ranks have different rows, and so different numbers of tiles

    def prepare(self, model: Any) -> None:
        for layer in model.modules():
            mlp = getattr(layer, "mlp", None)
            if isinstance(layer, GradientCheckpointingLayer) and isinstance(mlp, nn.Module):
                mlp.forward = _in_tiles(mlp.forward)

    def forward_pass(self) -> AbstractContextManager[None]:
        return torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available())

    def bytes_per_token(self, shape: Shape, itemsize: int, layer: float) -> float:
        return layer - itemsize * 4 * shape.inner


def _in_tiles(forward: Any) -> Any:
    def tiled(hidden_brh: Tensor) -> Any:
        if hidden_brh.shape[1] <= TILE:
            return forward(hidden_brh)
        tiles = [
            checkpoint(forward, tile, use_reentrant=False)
            for tile in torch.split(hidden_brh, TILE, dim=1)
        ]
        if isinstance(tiles[0], Tensor):
            return torch.cat(tiles, dim=1)
        # Some experts also return their router's scores: [positions, experts].
        hidden, scores = zip(*tiles, strict=True)
        return torch.cat(hidden, dim=1), torch.cat(scores)

    return tiled
