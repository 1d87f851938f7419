"""Floating-point operations of a step, and the device's peak: what the MFU is made of.

Counted as in PaLM (arXiv 2204.02311, appendix B), two per multiply-add: no recomputation, causal attention within each
sequence, the chosen experts, the output head over trained tokens, no norms, activations or softmax.
"""

import dataclasses
import functools
import re
import time
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hocket.trainer.shape import Shape

MEASURED_S = 2e-3  # at least, of a product: starting many threads takes some of a shorter one
PEAKS = {  # device → dense 16-bit operations per second with float32 sums, from the data sheets
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "4090": 165e12,
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelFlops:
    """Operations of one forward and backward pass."""

    per_position: float  # matrix products of all layers for one token
    per_trained_token: float  # the output head for one token
    per_pair: float  # attention of one layer for a pair of tokens
    windows: tuple[int | None, ...]  # per layer: positions that one sees; None: all before it


def model_flops(model: PreTrainedModel) -> ModelFlops:
    """Call it before DeepSpeed spreads the weights over the ranks."""
    config = model.config.get_text_config()
    head = model.get_output_embeddings()
    chosen = getattr(config, "num_experts_per_tok", None)
    per_position = per_trained_token = 0.0
    for module in model.modules():
        for name, weight in () if isinstance(module, nn.Embedding) else module.named_parameters(recurse=False):
            if isinstance(module, nn.Linear):  # a quantised one packs its weight
                size = module.in_features * module.out_features if weight is module.weight else 0
            else:  # of experts, [experts, in, out], each token takes some
                size = weight.numel() if weight.dim() in (2, 3) and not name.endswith("bias") else 0
            share = chosen / len(weight) if chosen and weight.dim() == 3 else 1.0
            flops = size * share * 2 * (3 if weight.requires_grad else 2)  # output, gradients of input and weight
            if module is head:
                per_trained_token += flops
            else:
                per_position += flops
    shape = Shape.of(model)
    size = shape.query // shape.heads
    query_size, value_size = (getattr(config, name, None) or size for name in ("qk_head_dim", "v_head_dim"))
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * shape.layers
    window = getattr(config, "sliding_window", None)
    return ModelFlops(
        per_position=per_position,
        per_trained_token=per_trained_token,
        per_pair=3 * 2 * shape.heads * (query_size + value_size),  # scores, their product with values
        windows=tuple(window if kind == "sliding_attention" else None for kind in kinds),
    )


def step_flops(model: ModelFlops, segment_lengths: Sequence[int], trained_tokens: int) -> float:
    """Return the operations of one optimiser step over all ranks."""
    total = model.per_position * sum(segment_lengths) + model.per_trained_token * trained_tokens
    for window, num_layers in Counter(model.windows).items():
        for length in segment_lengths:
            seen = min(length, window or length)
            pairs = seen * (seen + 1) // 2 + (length - seen) * seen  # of a token and one that it sees
            total += num_layers * model.per_pair * pairs
    return total


@functools.cache
def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Return operations per second: the data sheet's, else the best of some matrix products."""
    if device.type == "cuda" and dtype != torch.float32:
        known = known_peak(torch.cuda.get_device_name(device))
        if known is not None:
            return known
    size = 2048 if device.type == "cuda" else 256
    best = 0.0
    while best < MEASURED_S and size < 4096:
        size *= 2
        matrix = torch.ones(size, size, device=device, dtype=dtype)
        best = min(_seconds_of_product(matrix) for _ in range(6))  # the first one warms up
    return 2.0 * size**3 / best


def _seconds_of_product(matrix: Tensor) -> float:
    start = time.perf_counter()
    float((matrix @ matrix)[0, 0])  # waits for the device
    return time.perf_counter() - start


def known_peak(name: str) -> float | None:
    """Return the data sheet's peak; None for a device that is not listed, or a part of one (MIG)."""
    found = (peak for device, peak in PEAKS.items() if re.search(rf"\b{device}\b(?!.*MIG)", name))
    return next(found, None)
