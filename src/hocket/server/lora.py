"""Compute an adapter on a CPU without a copy of it for every token (model.lora).

vLLM 0.32's functions for CPUs copy the adapter's matrices for each token, which takes several
times as long as the model itself. A token's numbers stay the same, bit for bit, and depend on no
other token of the batch, as those of one matrix product for all tokens would.
"""

from collections.abc import Callable

import torch
from torch import Tensor


def share_adapter() -> None:
    """Replace vLLM's functions in this process. A worker calls it before it loads its model."""
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    for make in (_shrink, _expand, _expand_slice):
        name = f"bgmv{make.__name__}"
        function = make(getattr(lora_ops, name))
        for module in (lora_ops, punica_cpu):
            setattr(module, name, function)


def _product(inputs: Tensor, weights: Tensor, output: Tensor) -> Tensor | None:
    """Multiply inputs [b, i] of b tokens by the matrix of the only adapter, [1, (1,) o, i].

    Returns [b, o], or None where there are several adapters, or one row for all tokens.
    """
    if weights.shape[0] != 1 or inputs.shape[0] != output.shape[0]:
        return None
    matrix_oi = weights.flatten(0, -2).to(output.dtype)
    matrices_boi = matrix_oi.expand(len(inputs), -1, -1)  # without a copy
    return torch.einsum("bi, boi -> bo", inputs.to(output.dtype), matrices_boi)


def _shrink(original: Callable[..., None]) -> Callable[..., None]:
    def shrink(
        inputs: Tensor, weights: Tensor, output: Tensor, indices: Tensor, scaling: float = 1.0
    ) -> None:
        product = _product(inputs, weights, output)
        if product is None:
            original(inputs, weights, output, indices, scaling)
        else:
            output[:, : product.shape[1]] = scaling * product

    return shrink


def _expand(original: Callable[..., None]) -> Callable[..., None]:
    def expand(
        inputs: Tensor, weights: Tensor, output: Tensor, indices: Tensor, add_inputs: bool = True
    ) -> None:
        product = _product(inputs, weights, output)
        if product is None:
            original(inputs, weights, output, indices, add_inputs)
            return
        # Adapter and model may be padded to different sizes.
        size = min(product.shape[1], output.shape[1])
        _store(output[:, :size], product[:, :size], add_inputs)

    return expand


def _expand_slice(original: Callable[..., None]) -> Callable[..., None]:
    def expand_slice(
        inputs: Tensor,
        weights: Tensor,
        output: Tensor,
        indices: Tensor,
        offset: int,
        size: int,
        add_inputs: bool = True,
    ) -> None:
        product = _product(inputs, weights, output)
        if product is None:
            original(inputs, weights, output, indices, offset, size, add_inputs)
        else:
            _store(output[:, offset : offset + size], product, add_inputs)

    return expand_slice


def _store(part: Tensor, product: Tensor, adds: bool) -> None:
    if adds:
        part += product
    else:
        part.copy_(product)
