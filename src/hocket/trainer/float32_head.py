"""Compute the logits in float32 (model.float32_head), whatever precision the layers have."""

from typing import Any

import torch
from torch import Tensor, nn

from hocket.errors import TrainerError


def compute_in_float32(head: nn.Module) -> None:
    """Change a linear layer to compute in float32.

    Its weights keep their precision. They are converted within its call, as ZeRO-3's hooks gather
    them there. Raises TrainerError for another module than a linear layer.
    """
    if not isinstance(head, nn.Linear):
        raise TrainerError(
            f"model.float32_head: the output head is a {type(head).__name__}, not a linear layer"
        )

    def forward(hidden: Tensor) -> Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            bias = None if head.bias is None else head.bias.float()
            is_half = hidden.dtype == head.weight.dtype and hidden.dtype != torch.float32
            is_critic = head.out_features == 1  # whose product costs little
            if not is_half or hidden.device.type != "cuda" or is_critic:
                return nn.functional.linear(hidden.float(), head.weight.float(), bias)

            # A product of 16-bit factors needs no copy of the weights in float32.
            flat_nh = hidden.flatten(0, -2)
            logits: Tensor = MixedProduct.apply(flat_nh, head.weight)  # type: ignore[no-untyped-call]
            logits = logits.view(*hidden.shape[:-1], head.out_features)
            return logits if bias is None else logits + bias

    head.forward = forward  # type: ignore[method-assign, assignment]


class MixedProduct(torch.autograd.Function):
    """Computes hidden [n, h] · weight [v, h]ᵀ in float32; factors and gradients have 16 bits."""

    @staticmethod
    def forward(ctx: Any, hidden_nh: Tensor, weight_vh: Tensor) -> Tensor:
        """Compute the product [n, v]."""
        ctx.save_for_backward(hidden_nh, weight_vh)
        return torch.mm(hidden_nh, weight_vh.t(), out_dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, gradient_nv: Tensor) -> tuple[Tensor, Tensor | None]:
        """Compute the gradients of both factors; none of a frozen weight."""
        hidden_nh, weight_vh = ctx.saved_tensors
        half_nv = gradient_nv.to(hidden_nh.dtype)
        hidden_gradient_nh = half_nv @ weight_vh
        weight_gradient_vh = None
        if ctx.needs_input_grad[1]:
            weight_gradient_vh = half_nv.t() @ hidden_nh
        return hidden_gradient_nh, weight_gradient_vh
