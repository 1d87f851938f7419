"""How many floating-point operations a step needs, and how many the device could do: what the MFU is made of.

Counted is what the model asks for, two operations per multiply-add: no recomputation, no padding, causal attention once
within each sequence, experts that are chosen, the output head over trained tokens only. Norms, activations and the
softmax are left out, as in everybody's MFU (PaLM, 2204.02311, appendix B). Knows nothing of batches or ranks.
"""

import dataclasses
import time
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

PEAKS = (  # words in the device's name, dense 16-bit operations per second with float32 sums, from the data sheets
    (("B200",), 2250e12),
    (("H200",), 989e12),
    (("H100", "PCIe"), 756e12),
    (("H100",), 989e12),
    (("A100",), 312e12),
    (("L40S",), 362e12),
    (("L4",), 121e12),
    (("A10",), 125e12),
    (("4090",), 165e12),
    (("3090",), 71e12),
)
NUM_MEASUREMENTS = 5


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelFlops:
    """Operations of one forward and backward pass, by what they grow with.

    Attributes:
        per_position: matrix products of all layers for one token.
        per_trained_token: the output head for one token.
        attention: of each layer, operations for one token that looks at one token, and the layer's window (None: all).
    """

    per_position: float
    per_trained_token: float
    attention: tuple[tuple[float, int | None], ...]


def model_flops(model: PreTrainedModel) -> ModelFlops:
    """Returns what a causal language model costs; call it before DeepSpeed spreads the weights over the ranks.

    A trained weight takes part in three products (output, gradient of the input, gradient of the weight), one that is
    frozen in two.
    """
    config = model.config.get_text_config()
    head = model.get_output_embeddings()
    per_position = per_trained_token = 0.0
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            continue
        for weight in module.parameters(recurse=False):
            flops = _multiply_adds(module, weight, config.to_dict()) * 2 * (3 if weight.requires_grad else 2)
            if module is head:
                per_trained_token += flops
            else:
                per_position += flops

    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    query_size, value_size = (getattr(config, name, None) or size for name in ("qk_head_dim", "v_head_dim"))
    per_pair = 3 * 2 * config.num_attention_heads * (query_size + value_size)  # scores, and their product with values
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    window = getattr(config, "sliding_window", None)
    return ModelFlops(
        per_position=per_position,
        per_trained_token=per_trained_token,
        attention=tuple((per_pair, window if kind == "sliding_attention" else None) for kind in kinds),
    )


def _multiply_adds(module: nn.Module, weight: Tensor, config: dict[str, object]) -> float:
    """Returns the products that one token takes of one weight."""
    if isinstance(module, nn.Linear):  # a quantised one packs its weight
        return module.in_features * module.out_features if weight is module.weight else 0.0
    if weight.dim() == 3:  # experts, of which each token takes some
        chosen = config.get("num_experts_per_tok")
        return weight.numel() * (chosen / len(weight) if isinstance(chosen, int) else 1.0)
    return float(weight.numel()) if weight.dim() == 2 else 0.0


def step_flops(model: ModelFlops, segment_lengths: Sequence[int], trained_tokens: int) -> float:
    """Returns the operations of one optimiser step over all ranks.

    Args:
        segment_lengths: positions of each sequence: its tokens but one.
        trained_tokens: those of which the log-prob is computed.
    """
    total = model.per_position * sum(segment_lengths) + model.per_trained_token * trained_tokens
    for (per_pair, window), num_layers in Counter(model.attention).items():
        total += num_layers * per_pair * sum(_pairs(length, window) for length in segment_lengths)
    return total


def _pairs(length: int, window: int | None) -> int:
    """Returns how many (token, earlier token or itself) pairs attend to each other."""
    seen = length if window is None else min(length, window)
    return seen * (seen + 1) // 2 + (length - seen) * seen


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Returns the operations per second that the device could do at best: from its data sheet, else measured.

    What is measured is the best of some large matrix products, which is less than what data sheets promise.
    """
    if device.type == "cuda" and dtype != torch.float32:
        known = known_peak(torch.cuda.get_device_name(device))
        if known is not None:
            return known
    size = 4096 if device.type == "cuda" else 512
    left = right = torch.ones(size, size, device=device, dtype=dtype)
    best = float("inf")
    for _ in range(1 + NUM_MEASUREMENTS):  # the first one warms up
        start = time.perf_counter()
        float((left @ right)[0, 0])  # waits for the device
        best = min(best, time.perf_counter() - start)
    return 2.0 * size**3 / best


def known_peak(name: str) -> float | None:
    """Returns the peak of a device of this name; None for one that is not listed, or is a part of one (MIG)."""
    words = set(name.replace("-", " ").split())
    if "MIG" in words:
        return None
    return next((peak for wanted, peak in PEAKS if words.issuperset(wanted)), None)
