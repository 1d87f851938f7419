"""Count the floating-point operations of a step, and the device's peak: the MFU is their quotient.

They are counted as in PaLM (arXiv 2204.02311, appendix B), two per multiply-add. Causal attention
counts within each sequence, a mixture's layer for the chosen experts, and the head for trained
tokens. Recomputation, norms, activation functions and the softmax are left out.
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

ALL = 1 << 40  # the window of a layer without a window
# A measured product takes at least this many seconds: starting threads takes much of a shorter one.
MEASURED_S = 2e-3
# Dense 16-bit operations per second with float32 sums, from the data sheets. The first name in that
# of a device counts, so "H100 PCIe" comes before "H100".
PEAKS = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "4090": 165e12,
}


class Shape(NamedTuple):
    """The sizes of a decoder; in a mixture of experts, those of the experts that a token takes."""

    layers: int  # number of layers
    hidden: int  # width between the layers
    heads: int  # number of query heads
    query: int  # width of all query heads together
    key: int  # width of all key heads together, which is that of all value heads
    # Multiply-adds of attention for a pair of a token and one that it sees: the width of all query
    # heads, for the score, plus that of all their values.
    pair: int
    inner: int  # width of the feed-forward layer
    experts: int  # experts that a token takes in each layer; 0: no mixture
    windows: tuple[int, ...]  # of each layer: tokens that a token sees, itself included

    @property
    def key_share(self) -> float:
        """Memory of a key and a value in a layer, over that of all activations of a position.

        The layer keeps as many numbers as memory.py estimates.
        """
        return 2 * self.key / (3 * self.query + 2 * self.key + 4 * self.inner)

    @classmethod
    def of(cls, model: Any) -> "Shape":
        """Read the sizes from the config of a transformers model."""
        text = copy.copy(model.config.get_text_config())
        # Some layers of Gemma 4 have wider heads; without this, its config refuses to tell one
        # width for all layers.
        text.allow_global_per_layer_attribute_access = True

        def size(name: str, default: int) -> int:
            return getattr(text, name, None) or default  # None and 0 also mean "not set"

        heads = size("num_attention_heads", 1)
        head = size("head_dim", text.hidden_size // heads)
        inner = size("intermediate_size", 4 * text.hidden_size)
        if isinstance(inner, list):  # Gemma 3n has a width for each layer
            inner = max(inner)
        experts = size("num_experts_per_tok", 0)
        if experts:
            inner = experts * size("moe_intermediate_size", inner)

        # A config also keeps settings that its model does not read, as a Llama made from a Mistral
        # has `sliding_window`; those that the model reads are declared by the config's class. A
        # window without layer types is that of all layers (Mistral, Qwen 3 MoE).
        window = size("sliding_window", ALL) if hasattr(type(text), "sliding_window") else ALL
        kinds = text.layer_types if hasattr(type(text), "layer_types") else None
        if kinds is None:
            kinds = ["sliding_attention"] * text.num_hidden_layers
        windows = tuple(window if kind == "sliding_attention" else ALL for kind in kinds)
        return cls(
            layers=text.num_hidden_layers,
            hidden=text.hidden_size,
            heads=heads,
            query=head * heads,
            key=head * size("num_key_value_heads", heads),
            pair=heads * (size("qk_head_dim", head) + size("v_head_dim", head)),
            inner=inner,
            experts=experts,
            windows=windows,
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelFlops:
    """Operations of a forward and backward pass, per token and per pair of tokens."""

    per_position: float  # matrix products of all layers for a token
    per_trained_token: float  # the output head for a token
    per_pair: float  # attention in a layer for a pair of tokens
    windows: tuple[int, ...]  # of each layer: tokens that a token sees, itself included

    @property
    def pairs(self) -> float:
        """Pairs of tokens whose attention costs as much as all matrix products for a token."""
        return self.per_position / (self.per_pair * len(self.windows))


def model_flops(model: PreTrainedModel) -> ModelFlops:
    """Count the operations of a model's language part, without its vision tower.

    The weights must be whole, as on the meta device: ZeRO-3 and quantization change their shapes.
    """
    shape = Shape.of(model)
    head = head_of(model)
    per_position = 0.0
    for name, module in model.named_modules():
        if module is head or isinstance(module, nn.Embedding) or part_of(name) != "language":
            continue
        per_position += _products(module, shape.experts)
    return ModelFlops(
        per_position=per_position,
        per_trained_token=_products(head, shape.experts),
        # 2 per multiply-add; 3 for the forward pass and the gradients of both factors.
        per_pair=3 * 2 * shape.pair,
        windows=shape.windows,
    )


def _products(layer: nn.Module, experts: int) -> float:
    """Count the operations of a module's matrix products for a token, its submodules left out."""
    total = 0.0
    for name, weight in layer.named_parameters(recurse=False):
        if weight.dim() < 2 or name.endswith("bias"):
            continue
        # A mixture has the weights of all experts in a tensor [experts, in, out].
        share = 1.0
        if experts and weight.dim() == 3:
            share = experts / len(weight)
        # A frozen weight has an output and a gradient of its input, but no gradient of its own.
        num_products = 3 if weight.requires_grad else 2
        total += weight.numel() * share * 2 * num_products
    return total


def step_flops(model: ModelFlops, segment_lengths: Sequence[int], trained_tokens: int) -> float:
    """Count the operations of an optimizer step over all ranks."""
    total = model.per_position * sum(segment_lengths) + model.per_trained_token * trained_tokens
    for window, num_layers in Counter(model.windows).items():
        for length in segment_lengths:
            # The first tokens see all before them, the others a whole window.
            ramp = min(length, window)
            pairs = ramp * (ramp + 1) // 2 + (length - ramp) * ramp
            total += num_layers * model.per_pair * pairs
    return total


@functools.cache
def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Find the device's peak in operations per second.

    It is the data sheet's if PEAKS has the device, else the best of some matrix products.
    """
    if device.type == "cuda" and dtype != torch.float32:
        peak = known_peak(torch.cuda.get_device_name(device))
        if peak is not None:
            return peak
    # Measure larger and larger products, until one takes long enough to be measured well.
    size = 256
    best = 0.0
    while best < MEASURED_S and size < 4096:
        size *= 2
        matrix = torch.ones(size, size, device=device, dtype=dtype)
        best = min(_seconds_of_product(matrix) for _ in range(6))  # the first product warms up
    return 2.0 * size**3 / best


def _seconds_of_product(matrix: Tensor) -> float:
    start = time.perf_counter()
    float((matrix @ matrix)[0, 0])  # waits for the device
    return time.perf_counter() - start


def known_peak(name: str) -> float | None:
    """Look up the data sheet's peak of a device; None if PEAKS lacks it, or for a MIG part."""
    for device, peak in PEAKS.items():
        if re.search(rf"\b{device}\b(?!.*MIG)", name):
            return peak
    return None
