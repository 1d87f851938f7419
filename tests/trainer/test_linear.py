"""Linear layers by oneDNN: the numbers of torch's own, where they are used."""

import copy
import platform

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hocket.trainer import linear

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="oneDNN is used on x86 alone")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of what oneDNN has multiplied."""
    seen: list[tuple[int, ...]] = []
    product = linear._product
    monkeypatch.setattr(linear, "_product", lambda left, *others: seen.append(left.shape) or product(left, *others))
    return seen


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("recomputed", [True, False])
def test_results_and_gradients_are_those_of_a_plain_linear_layer(
    bias: bool, recomputed: bool, calls: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "MIN_PRODUCTS", 2 * 5 * 7 * 3)
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(7, 3, bias=bias), nn.Linear(3, 4, bias=bias))  # the second one is too small
    fast = copy.deepcopy(plain)
    linear.use_onednn(fast)
    inputs = torch.randn(2, 5, 7)
    found = []
    for model in (plain, fast):
        own = inputs.clone().requires_grad_()
        result = checkpoint(model, own, use_reentrant=False) if recomputed else model(own)
        result.square().sum().backward()
        found.append([result.detach(), own.grad, *(parameter.grad for parameter in model.parameters())])
    forward = [(2, 5, 7)] * (1 + recomputed)
    assert calls == [*forward, (2, 5, 3), (7, 10)]
    for expected, actual in zip(*found, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)


def test_a_frozen_layer_computes_no_gradient_of_its_weights(
    calls: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "MIN_PRODUCTS", 1)
    layer = nn.Linear(7, 3).requires_grad_(False)
    linear.use_onednn(layer)
    layer(torch.ones(5, 7, requires_grad=True)).sum().backward()
    assert calls == [(5, 7), (5, 3)]


def test_another_precision_stays_with_torch(calls: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "MIN_PRODUCTS", 1)
    layer = nn.Linear(7, 3)
    linear.use_onednn(layer)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.ones(5, 7)).dtype == torch.bfloat16
    assert layer.double()(torch.ones(5, 7).double()).dtype == torch.float64
    assert calls == []
