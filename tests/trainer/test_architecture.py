"""Architectures that are refused by name, and the numbers of those that are trained."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from tests.trainer.conftest import SIZES
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.llama import modeling_llama

import architectures
from hocket.config import ModelConfig
from hocket.errors import TrainerError
from hocket.trainer import architecture, attention
from hocket.trainer.attention import Reach, Segments, attend
from hocket.trainer.logprobs import Logits
from hocket.trainer.policy import Policy, skeleton
from support.training import CPU, assert_near


@pytest.fixture(autouse=True)
def untried(monkeypatch: pytest.MonkeyPatch) -> None:
    """No architecture is known from before."""
    monkeypatch.setattr(architecture, "_tried", {})


QUICK = ("qwen2_moe", "cohere2", "bloom")


@pytest.mark.parametrize("family", QUICK[:2])  # the last one can't be trained
def test_log_probs_and_gradients_are_those_of_transformers_however_they_are_computed(
    family: str, tmp_path: Path
) -> None:
    result = architectures.try_family(family, str(tmp_path), divided=False)
    assert {"packing", "sharing"} <= result.apart.keys()
    assert all(value <= 1 for value in result.apart.values()), result.apart


def llama(**more: Any) -> LlamaConfig:
    return LlamaConfig(**SIZES, **more)


Forward = Callable[..., Any]


def with_noise(original: Forward) -> Forward:
    def forward(self: Any, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        result = original(self, hidden, *args, **kwargs)
        return result + torch.randn_like(result) * 0.01 if self.training else result

    return forward


def with_the_future(original: Forward) -> Forward:
    def forward(self: Any, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        return original(self, hidden, *args, **kwargs) + 0.1 * hidden.mean(dim=1, keepdim=True)

    return forward


def with_places(original: Forward) -> Forward:
    def forward(self: Any, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        return original(self, hidden * (1 + 0.01 * torch.arange(hidden.shape[1])[:, None]), *args, **kwargs)

    return forward


def with_other_gradients(original: Forward) -> Forward:
    def forward(self: Any, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        result = original(self, hidden, *args, **kwargs)
        return result.detach() if hidden.shape[1] > 30 else result

    return forward


@pytest.mark.parametrize(
    ("part", "change", "says"),
    [
        ("LlamaDecoderLayer", with_noise, "computes something random while it trains"),
        ("LlamaMLP", with_the_future, "lets a token see later ones, or other sequences of its row"),
        ("LlamaMLP", with_places, "takes a token's place in the row, in place of that in its sequence"),
        ("LlamaMLP", with_other_gradients, "has other gradients in a row of several sequences than alone"),
    ],
)
def test_what_a_layer_does_wrong_is_named(
    part: str, change: Callable[[Forward], Forward], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = getattr(modeling_llama, part)
    architecture.try_small(llama())
    monkeypatch.setattr(architecture, "_tried", {})
    monkeypatch.setattr(kind, "forward", change(kind.forward))
    with pytest.raises(TrainerError, match=f"^Llama {says}.*docs/reference/models.md names the families that can"):
        architecture.try_small(llama())


def test_logits_that_are_changed_by_no_factor_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    original = modeling_llama.LlamaForCausalLM.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        result.logits = result.logits + 0.1 * result.logits.square()
        return result

    monkeypatch.setattr(modeling_llama.LlamaForCausalLM, "forward", forward)
    with pytest.raises(TrainerError, match="Llama does more to its logits, after the output head"):
        architecture.try_small(llama())


def test_a_factor_of_the_logits_and_a_cap_are_part_of_log_probs() -> None:
    output = torch.tensor([-60.0, 0.0, 15.0])
    assert Logits().of(output) is output
    assert Logits(factor=0.5).of(output).tolist() == [-30, 0, 7.5]
    # 30 · tanh(-2), tanh(.5)
    assert Logits(cap=30.0).of(output).tolist() == pytest.approx([-28.9208, 0, 13.8635], abs=1e-4)


def test_it_is_refused_before_weights_are_read(tmp_path: Path) -> None:
    config = architectures.make_config("falcon")
    config.save_pretrained(tmp_path)  # and no weights
    says = "Falcon computes attention with code of its own, not through transformers' AttentionInterface"
    with pytest.raises(TrainerError, match=says):
        skeleton(ModelConfig(path=str(tmp_path)))


@pytest.mark.parametrize("reach", [Reach(window=5), Reach(chunk=7), Reach(window=5, chunk=7), Reach(), Reach(99, 99)])
def test_a_layer_reaches_as_far_back_as_its_mask_says_and_not_its_setting(reach: Reach) -> None:
    lengths = (19, 4)
    query, key, value = (torch.randn(1, 2, sum(lengths), 8) for _ in range(3))
    segments = Segments(lengths, CPU)
    found, _ = attend(torch.nn.Module(), query, key, value, reach, scaling=0.3, segments=segments, sliding_window=2)
    for first, last in ((0, 19), (19, 23)):
        places = torch.arange(last - first)
        seen = places[None] <= places[:, None]
        if reach.window:
            seen &= places[None] > places[:, None] - reach.window
        if reach.chunk:
            seen &= places[None] // reach.chunk == places[:, None] // reach.chunk
        q, k, v = (tensor[0, :, first:last].double() for tensor in (query, key, value))
        scores = (0.3 * q @ k.transpose(1, 2)).masked_fill(~seen, -torch.inf)
        assert_near(found[0, first:last].double(), (scores.softmax(-1) @ v).transpose(0, 1), 8 + 2 * 19)


def test_a_chunk_has_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "has_kernel", lambda *args: True)
    query = torch.randn(1, 2, 9, 8)
    result, _ = attend(torch.nn.Module(), query, query, query, Reach(chunk=4), scaling=0.3)
    assert result.shape == (1, 9, 2, 8)


def test_dropout_jitter_and_dropped_layers_are_off(tmp_path: Path) -> None:
    """A Mixtral with jitter and an OPT that drops layers give the numbers of evaluation, and recompute activations."""
    for family in ("mixtral", "opt"):
        config = architectures.make_config(family)
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / family)
        policy = Policy(
            ModelConfig(path=str(tmp_path / family)), dtype=torch.float32, temperature=1.0, gradient_checkpointing=True
        )
        layer = next(part for part in policy.model.modules() if isinstance(part, GradientCheckpointingLayer))
        layer._gradient_checkpointing_func = Mock(wraps=layer._gradient_checkpointing_func)
        ids = torch.randint(60, (1, 20))
        first, second = (policy._hidden(ids, Segments((20,), CPU)) for _ in range(2))
        assert layer._gradient_checkpointing_func.call_count == 2
        assert torch.equal(first, second)
        assert torch.equal(first, policy.eval()._hidden(ids, Segments((20,), CPU)))
