"""Very long rows (trainer.gradient_checkpointing=long): what layers keep waits on the CPU, MLPs work in tiles."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

TILE = 4096  # positions


def use_tiles(model: Any) -> None:
    """Have the MLP of each layer compute, and recompute, TILE positions at a time; numbers stay the same."""
    for layer in model.modules():
        mlp = getattr(layer, "mlp", None)
        if isinstance(layer, GradientCheckpointingLayer) and isinstance(mlp, nn.Module):
            mlp.forward = _in_tiles(mlp.forward)


def _in_tiles(forward: Any) -> Any:
    def tiled(hidden_brh: Tensor) -> Any:
        if hidden_brh.shape[1] <= TILE:
            return forward(hidden_brh)
        tiles = [checkpoint(forward, tile, use_reentrant=False) for tile in torch.split(hidden_brh, TILE, dim=1)]
        if isinstance(tiles[0], Tensor):
            return torch.cat(tiles, dim=1)
        hidden, scores = zip(*tiles, strict=True)  # of some experts, with their router's of [positions, experts]
        return torch.cat(hidden, dim=1), torch.cat(scores)

    return tiled


def kept_on_cpu() -> torch.autograd.graph.save_on_cpu:
    """Context in which what the backward pass needs is copied to the CPU."""
    return torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available())
