"""Compute the logits in float32 (model.float32_head), whatever precision the rest of the model has."""

from typing import Any

import torch
from torch import Tensor, nn

from hocket.errors import TrainerError


def compute_in_float32(head: nn.Module) -> None:
    """Make a linear layer compute in float32, within its call: hooks gather its weights."""
    if not isinstance(head, nn.Linear):
        raise TrainerError(
            f"model.float32_head: the output head is a {type(head).__name__}, not a linear layer"
        )

    def forward(hidden: Tensor) -> Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            bias = None if head.bias is None else head.bias.float()
            is_half = (
                hidden.dtype == head.weight.dtype != torch.float32 and hidden.device.type == "cuda"
            )
            if is_half and head.out_features > 1:  # 1: the critic's, which costs little
                logits: Tensor = MixedProduct.apply(hidden.flatten(0, -2), head.weight)  # type: ignore[no-untyped-call]
                logits = logits.view(*hidden.shape[:-1], head.out_features)
                return logits if bias is None else logits + bias
            return nn.functional.linear(hidden.float(), head.weight.float(), bias)

    head.forward = forward  # type: ignore[method-assign, assignment]


class MixedProduct(torch.autograd.Function):
    """hidden [n, h] · weight [v, h]ᵀ in float32, of factors in 16 bits, as are the gradients."""

    @staticmethod
    def forward(ctx: Any, hidden_nh: Tensor, weight_vh: Tensor) -> Tensor:
        ctx.save_for_backward(hidden_nh, weight_vh)
        return torch.mm(hidden_nh, weight_vh.t(), out_dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, gradient_nv: Tensor) -> tuple[Tensor, Tensor | None]:
        hidden_nh, weight_vh = ctx.saved_tensors
        half_nv = gradient_nv.to(hidden_nh.dtype)
        return half_nv @ weight_vh, half_nv.t() @ hidden_nh if ctx.needs_input_grad[1] else None
