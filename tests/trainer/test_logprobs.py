import math
from typing import Any

import pytest
import torch

from hocket.trainer.logprobs import kept_bytes, token_logprobs
from support.training import assert_near, peak_bytes

TEMPERATURE = 0.7
Inputs = tuple[torch.Tensor, torch.nn.Linear, torch.Tensor, torch.Tensor]


def found_by(hidden: Any, head: torch.nn.Module, targets: torch.Tensor, **options: Any) -> tuple[torch.Tensor, ...]:
    """Returns the columns of all positions at temperature 1 in chunks of 7, if nothing else is said."""
    known = {"temperature": 1.0, "chunk_tokens": 7, "trained_n": torch.arange(targets.numel()), "max_tokens": 0}
    known |= options
    return token_logprobs(hidden, head, targets, **{"row_n": known["trained_n"]} | known)


@pytest.fixture
def inputs() -> Inputs:
    hidden = torch.randn(3, 11, 8, requires_grad=True)
    return hidden, torch.nn.Linear(8, 23, bias=False), torch.randint(23, (3, 11)), torch.rand(3, 11) < 0.6


@pytest.mark.parametrize("entropy_gradient", [False, True])
@pytest.mark.parametrize(("chunk_tokens", "masked"), [(1, True), (7, True), (7, False), (1000, True)])
def test_values_and_gradients_equal_those_of_all_logits(
    inputs: Inputs, chunk_tokens: int, masked: bool, entropy_gradient: bool
) -> None:
    hidden, head, targets, mask = inputs
    mask = mask if masked else torch.ones_like(mask)
    weights, others = torch.randn(3, 11), torch.randn(3, 11)
    full = torch.log_softmax(head(hidden) / TEMPERATURE, dim=-1)
    expected = full.gather(-1, targets[..., None]).squeeze(-1).where(mask, 0.0)
    expected_entropy = torch.distributions.Categorical(logits=full).entropy().where(mask, 0.0)
    loss = (expected * weights).sum() + ((expected_entropy * others).sum() if entropy_gradient else 0)
    expected_grads = torch.autograd.grad(loss, [hidden, head.weight])

    options: Any = {"temperature": TEMPERATURE, "chunk_tokens": chunk_tokens, "entropy_gradient": entropy_gradient}
    options["trained_n"] = mask.flatten().nonzero()[:, 0]
    logprobs, entropy, *_ = found_by(hidden, head, targets, **options)
    sums = 8 + 2 * 23  # a logit; the softmax and the entropy
    assert_near(logprobs, expected, sums)
    assert_near(entropy, expected_entropy, sums)
    assert entropy.requires_grad == entropy_gradient
    grads = torch.autograd.grad((logprobs * weights).sum() + (entropy * others).sum(), [hidden, head.weight])
    for gradient, other in zip(grads, expected_grads, strict=True):
        assert_near(gradient, other, 3 * sums + 33)  # positions
    with torch.no_grad():
        assert not found_by(hidden, head, targets, **options)[1].requires_grad


def test_the_entropy_is_that_of_the_softmax_without_impossible_tokens() -> None:
    # p = 1/2, 1/4, 1/4, 0 has the entropy 1.5 log 2.
    logits, targets = torch.tensor([[[0.5, 0.25, 0.25, 0.0]]]).log(), torch.zeros(1, 1, dtype=torch.long)
    with torch.no_grad():
        _, entropy = found_by(logits, torch.nn.Identity(), targets)
    assert_near(entropy.flatten(), [1.5 * math.log(2)], 2 * 4)


def test_nothing_as_large_as_tokens_times_vocabulary_exists_in_forward_or_backward() -> None:
    head = torch.nn.Linear(4, 2000, bias=False)
    peaks = []
    for tokens in (64, 512):
        hidden, targets = torch.randn(1, tokens, 4, requires_grad=True), torch.zeros(1, tokens, dtype=torch.long)

        def work(hidden: torch.Tensor = hidden, targets: torch.Tensor = targets) -> None:
            logprobs, *_ = found_by(hidden, head, targets, temperature=0.7, chunk_tokens=32)
            logprobs.sum().backward()

        peaks.append(peak_bytes(work))
    assert peaks[0] < 14 * 32 * 2000  # three float32 numbers per logit of a chunk, and the head's gradient
    assert peaks[1] < 1.15 * peaks[0]


def test_the_head_is_called_equally_often_whatever_is_masked(inputs: Inputs) -> None:
    hidden, head, targets, mask = inputs
    calls = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    head.register_forward_hook(count)
    for masked in (mask, torch.zeros_like(mask)):
        calls, trained_n = 0, masked.flatten().nonzero()[:, 0]
        logprobs, *_ = found_by(hidden, head, targets, trained_n=trained_n, max_tokens=33)
        assert calls == 5  # ⌈33 / 7⌉
        logprobs.sum().backward()
        assert calls == 10  # and again in the backward pass
    assert logprobs.abs().sum() == 0


def test_log_probs_that_are_kept_are_those_computed_again_bit_for_bit(inputs: Inputs) -> None:
    hidden, head, targets, _ = inputs
    calls: list[Any] = []
    head.register_forward_hook(lambda *call: calls.append(call))
    found = []
    for recomputes, expected in ((True, 10), (False, 5)):  # chunks of 33 positions, forward and backward
        calls.clear()
        logprobs, *_ = found_by(hidden, head, targets, temperature=TEMPERATURE, recomputes=recomputes)
        gradients = torch.autograd.grad(logprobs.square().sum(), [hidden, head.weight])
        assert len(calls) == expected
        found.append((logprobs, *gradients))
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))


def test_a_cpu_keeps_log_probs_up_to_the_size_of_the_weights() -> None:
    assert kept_bytes(134_515_008, on_gpu=False) == 538_060_032  # 2,736 positions of SmolLM2's 49,152 tokens
    assert kept_bytes(134_515_008, on_gpu=True) == kept_bytes(1000, on_gpu=False) == 128 << 20


@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_an_impossible_token_gives_minus_infinity_but_a_finite_entropy_and_gradient(entropy_gradient: bool) -> None:
    # p = 1/4, 3/4, 0: H = 0.5623, and dH/dlogit = −p (log p + H): 0.2060, −0.2060, 0.
    logits = torch.tensor([[[0.25, 0.75, 0.0]]]).log().requires_grad_()
    options: Any = {"entropy_gradient": entropy_gradient}
    logprobs, entropy, *_ = found_by(logits, torch.nn.Identity(), torch.tensor([[2]]), **options)
    assert logprobs.item() == -torch.inf
    assert entropy.item() == pytest.approx(0.5623, abs=1e-4)
    if entropy_gradient:
        (gradient,) = torch.autograd.grad(entropy.sum(), logits)
        assert gradient.flatten().tolist() == pytest.approx([0.2060, -0.2060, 0.0], abs=1e-4)
