"""The sizes of a decoder, the floating-point operations of a step, and the device's peak: what the MFU is made of.

Counted as in PaLM (arXiv 2204.02311, appendix B), two per multiply-add: causal attention within each sequence, the
chosen experts, the head over trained tokens; no recomputation, norms, activations or softmax.
"""

import copy
import dataclasses
import functools
import re
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hocket.trainer.weights import head_of, part_of

ALL = 1 << 40  # a window without a bound
MEASURED_S = 2e-3  # least, of a product: starting threads takes some of a shorter one
PEAKS = {  # device → dense 16-bit operations per second with float32 sums, from the data sheets
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "4090": 165e12,
}


class Shape(NamedTuple):
    """Sizes per token: of a mixture, those of the experts that one takes."""

    layers: int
    hidden: int
    heads: int  # of queries
    query: int  # of all heads
    key: int  # of all heads of keys, and of values
    pair: int  # of all heads of queries, and of values: what a token and one that it sees take
    inner: int  # of the feed-forward layer
    experts: int  # that a token takes in each layer; 0: no mixture
    windows: tuple[int, ...]  # per layer: tokens that one sees, itself included

    @property
    def key_share(self) -> float:
        """Memory of a key and a value, in a layer, as a part of that of a position's activations."""
        return 2 * self.key / (3 * self.query + 2 * self.key + 4 * self.inner)

    @classmethod
    def of(cls, model: Any) -> "Shape":
        text = copy.copy(model.config.get_text_config())
        text.allow_global_per_layer_attribute_access = (
            True  # Gemma 4 has wider heads in some layers
        )

        def size(name: str, default: int) -> int:
            return getattr(text, name, None) or default

        heads = size("num_attention_heads", 1)
        head = size("head_dim", text.hidden_size // heads)
        inner = size("intermediate_size", 4 * text.hidden_size)
        if isinstance(inner, list):  # by layer (Gemma 3n)
            inner = max(inner)
        experts = size("num_experts_per_tok", 0)
        kinds = getattr(text, "layer_types", None) or ["sliding_attention"] * text.num_hidden_layers
        window = size("sliding_window", ALL)
        return cls(
            layers=text.num_hidden_layers,
            hidden=text.hidden_size,
            heads=heads,
            query=head * heads,
            key=head * size("num_key_value_heads", heads),
            pair=heads * (size("qk_head_dim", head) + size("v_head_dim", head)),
            inner=experts * size("moe_intermediate_size", inner) if experts else inner,
            experts=experts,
            windows=tuple(window if kind == "sliding_attention" else ALL for kind in kinds),
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelFlops:
    """Operations of one forward and backward pass."""

    per_position: float  # matrix products of all layers for one token
    per_trained_token: float  # the output head for one token
    per_pair: float  # attention of one layer for a pair of tokens
    windows: tuple[int, ...]  # per layer: tokens that one sees, itself included

    @property
    def pairs(self) -> float:
        """Pairs of tokens whose attention costs as much as all products for one token."""
        return self.per_position / (self.per_pair * len(self.windows))


def model_flops(model: PreTrainedModel) -> ModelFlops:
    """Count them of a language model with whole weights, as on the meta device; not of what sees."""
    shape = Shape.of(model)
    head = head_of(model)
    layers = [
        module
        for name, module in model.named_modules()
        if module is not head
        and not isinstance(module, nn.Embedding)
        and part_of(name) == "language"
    ]
    return ModelFlops(
        per_position=sum(_products(layer, shape.experts) for layer in layers),
        per_trained_token=_products(head, shape.experts),
        per_pair=3 * 2 * shape.pair,  # scores, their product with values
        windows=shape.windows,
    )


def _products(layer: nn.Module, experts: int) -> float:
    """Return the operations of a layer's own weights for one token."""
    total = 0.0
    for name, weight in layer.named_parameters(recurse=False):
        if weight.dim() > 1 and not name.endswith("bias"):
            share = (
                experts / len(weight) if experts and weight.dim() == 3 else 1.0
            )  # of [experts, in, out]
            total += (
                weight.numel() * share * 2 * (3 if weight.requires_grad else 2)
            )  # output, gradients of both
    return total


def step_flops(model: ModelFlops, segment_lengths: Sequence[int], trained_tokens: int) -> float:
    """Return the operations of one optimiser step over all ranks."""
    total = model.per_position * sum(segment_lengths) + model.per_trained_token * trained_tokens
    for window, num_layers in Counter(model.windows).items():
        for length in segment_lengths:
            seen = min(length, window)
            pairs = (
                seen * (seen + 1) // 2 + (length - seen) * seen
            )  # of a token and one that it sees
            total += num_layers * model.per_pair * pairs
    return total


@functools.cache
def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Return operations per second: the data sheet's, else the best of some matrix products."""
    if device.type == "cuda" and dtype != torch.float32:
        known = known_peak(torch.cuda.get_device_name(device))
        if known is not None:
            return known
    size = 256
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
    """Return the data sheet's peak; None for one that is not listed, or a part of one (MIG)."""
    found = (peak for device, peak in PEAKS.items() if re.search(rf"\b{device}\b(?!.*MIG)", name))
    return next(found, None)
