"""A head in float32 on a GPU: its numbers are those of float64, but for rounding."""

from unittest.mock import Mock

import pytest
import torch
from torch._subclasses import FakeTensorMode

from hocket.trainer.float32_head import MixedProduct, compute_in_float32
from support.training import assert_near


@pytest.mark.parametrize("bias", [False, True])
def test_a_float32_head_on_a_gpu_multiplies_in_16_bits_and_sums_in_float32(
    bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def product(left: torch.Tensor, right: torch.Tensor, *, out_dtype: torch.dtype) -> torch.Tensor:
        return left.to(out_dtype) @ right.to(out_dtype)  # what CUDA does at once

    monkeypatch.setattr(torch, "mm", mm := Mock(side_effect=product))
    head = torch.nn.Linear(16, 32, bias=bias, dtype=torch.bfloat16)
    compute_in_float32(head)
    with FakeTensorMode(), torch.no_grad():  # a GPU that is not there
        for name, parameter in list(head.named_parameters()):
            setattr(head, name, torch.nn.Parameter(torch.empty(parameter.shape, dtype=torch.bfloat16, device="cuda")))
        logits = head(torch.empty(2, 5, 16, dtype=torch.bfloat16, device="cuda"))
        assert (logits.shape, logits.dtype) == ((2, 5, 32), torch.float32)
    mm.assert_called_once()
    torch.manual_seed(0)
    hidden, weight = (torch.randn(n, 16).bfloat16().requires_grad_() for n in (10, 32))
    compare_with_float64(MixedProduct.apply(hidden, weight), hidden, weight)


def compare_with_float64(found: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor) -> None:
    """Asserts that a product and its gradients are those of float64, but for rounding."""
    expected = hidden.double() @ weight.double().T
    assert_near(found.double(), expected, hidden.shape[1])
    weights = torch.randn(found.shape, device=found.device)
    gradients = torch.autograd.grad((found * weights).sum(), [hidden, weight])
    exact = torch.autograd.grad((expected * weights).sum(), [hidden, weight])
    for one, other in zip(gradients, exact, strict=True):  # rounded to 16 bits, by half of this, before and behind
        assert (one.double() - other.double()).norm() < torch.finfo(torch.bfloat16).eps * other.double().norm()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_float32_head_on_a_gpu_has_the_logits_of_float64_and_gradients_to_rounding() -> None:
    torch.manual_seed(0)
    head = torch.nn.Linear(256, 1000, bias=False, dtype=torch.bfloat16, device="cuda")
    compute_in_float32(head)
    hidden = torch.randn(70, 256, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    compare_with_float64(head(hidden), hidden, head.weight)
