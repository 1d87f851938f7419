"""The products of an adapter, against vLLM's own functions, which copy it for every token."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from hocket.server import lora

TOKENS, INPUTS, RANK, OUTPUTS = 5, 12, 4, 6


@pytest.fixture
def both() -> Iterator[tuple[Any, Any]]:
    """vLLM's module with its own functions, as a dictionary, and with those that replace them."""
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    names = ("bgmv_shrink", "bgmv_expand", "bgmv_expand_slice")
    original = {name: getattr(lora_ops, name) for name in names}
    lora.share_adapter()
    assert all(getattr(punica_cpu, name) is getattr(lora_ops, name) for name in names)
    yield original, lora_ops
    for module in (lora_ops, punica_cpu):
        for name, function in original.items():
            setattr(module, name, function)


@pytest.mark.parametrize("num_adapters", [1, 3])
def test_an_adapter_s_products_are_those_of_vllm(both: tuple[Any, Any], num_adapters: int) -> None:
    original, replaced = both
    torch.manual_seed(0)
    inputs, narrow = torch.randn(TOKENS, INPUTS), torch.randn(TOKENS, RANK)
    a, b = torch.randn(num_adapters, 1, RANK, INPUTS), torch.randn(num_adapters, 1, OUTPUTS, RANK)
    indices = torch.arange(TOKENS) % num_adapters
    calls: list[tuple[str, Any]] = [
        ("bgmv_shrink", lambda output: (inputs, a, output[:, : RANK + 2], indices, 0.5)),
        ("bgmv_expand", lambda output: (narrow, b, output, indices)),
        ("bgmv_expand", lambda output: (narrow, b, output[:, : OUTPUTS - 1], indices, False)),
        ("bgmv_expand_slice", lambda output: (narrow, b, output, indices, 3, OUTPUTS, True)),
        ("bgmv_expand_slice", lambda output: (narrow, b, output, indices, 3, OUTPUTS, False)),
    ]
    for name, arguments in calls:
        expected = torch.ones(TOKENS, 3 + OUTPUTS)
        output = expected.clone()
        original[name](*arguments(expected))
        getattr(replaced, name)(*arguments(output))
        assert torch.equal(output, expected), name
        assert not torch.equal(expected, torch.ones_like(expected))


def test_a_token_without_an_adapter_has_that_of_the_only_slot_as_in_vllm(both: tuple[Any, Any]) -> None:
    original, replaced = both
    inputs, a = torch.ones(2, INPUTS), torch.ones(1, 1, RANK, INPUTS)
    indices = torch.tensor([0, -1])
    expected, output = torch.zeros(2, RANK), torch.zeros(2, RANK)
    original["bgmv_shrink"](inputs, a, expected, indices)
    replaced.bgmv_shrink(inputs, a, output, indices)
    assert output.tolist() == expected.tolist() == [[12.0] * RANK] * 2
