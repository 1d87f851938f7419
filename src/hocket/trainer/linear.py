"""Linear layers in float32 on x86 processors, computed by oneDNN.

torch gives them to MKL, which runs at half the speed of a processor with AVX-512 that Intel did not make.
"""

import functools
import platform
from typing import Any

import torch
from torch import Tensor, nn

MIN_PRODUCTS = 1 << 27  # of a layer's call; for fewer, a kernel for one more shape costs as much as it saves


def use_onednn(model: nn.Module) -> None:
    """Make the linear layers of a model compute with oneDNN where they run in float32 on an x86 processor."""
    has_onednn: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if has_onednn and platform.machine() in ("x86_64", "AMD64"):
        for module in model.modules():
            if type(module) is nn.Linear:
                module.forward = functools.partial(_forward, module)  # type: ignore[method-assign]


def _forward(layer: nn.Linear, inputs: Tensor) -> Tensor:
    is_large = inputs.numel() * layer.out_features >= MIN_PRODUCTS
    is_float32 = inputs.dtype == layer.weight.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
    if is_large and is_float32 and inputs.device.type == "cpu":
        result: Tensor = _Linear.apply(inputs, layer.weight, layer.bias)  # type: ignore[no-untyped-call]
        return result
    return nn.functional.linear(inputs, layer.weight, layer.bias)


class _Linear(torch.autograd.Function):
    """inputs · weightᵀ + bias, forward and backward."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        return _product(inputs, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        of_inputs, of_weight, of_bias = ctx.needs_input_grad
        inputs_nh, gradient_nk = inputs.flatten(0, -2), gradient.flatten(0, -2)
        return (
            _product(gradient, weight.t()) if of_inputs else None,
            _product(inputs_nh.t(), gradient_nk.t()).t() if of_weight else None,
            gradient_nk.sum(dim=0) if of_bias else None,
        )


def _product(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    result: Tensor = torch.ops.mkldnn._linear_pointwise(left, right, bias, "none", [], "")
    return result
