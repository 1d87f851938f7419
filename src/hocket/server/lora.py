"""Compute an adapter on a CPU by two products for all tokens together (model.lora).

vLLM 0.32's functions for CPUs copy the adapter's matrices for every token, which takes several
times as long as the model itself.
"""

from collections.abc import Callable

from torch import Tensor


def compute_at_once() -> None:
    """Replace vLLM's functions in this process. A worker calls it before it loads its model."""
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    for make in (_shrink, _expand, _expand_slice):
        name = f"bgmv{make.__name__}"
        function = make(getattr(lora_ops, name))
        for module in (lora_ops, punica_cpu):
            setattr(module, name, function)


def _product(inputs: Tensor, weights: Tensor, output: Tensor) -> Tensor | None:
    """Multiply inputs [tokens, i] by the matrix of the only adapter, [1, (1,) o, i].

    Returns [tokens, o], or None where there are several adapters, or a row for all tokens.
    """
    if weights.shape[0] != 1 or inputs.shape[0] != output.shape[0]:
        return None
    matrix_oi = weights.flatten(0, -2).to(output.dtype)
    return inputs.to(output.dtype) @ matrix_oi.t()


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
