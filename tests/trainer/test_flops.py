"""Operations counted by hand and by torch's own counter, which sees the products that really run."""

from typing import Any

import pytest
import torch
from tests.trainer.conftest import FAMILIES, SIZES, make_experts
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3MoeConfig,
)

from hocket.config import LoraConfig, ModelConfig
from hocket.trainer import attention, flops
from hocket.trainer.attention import Segments
from hocket.trainer.flops import ALL, Shape, known_peak, model_flops, peak_flops, step_flops
from hocket.trainer.lora import Adapter
from support.training import CPU


def load(path: str) -> PreTrainedModel:
    # eager attention is plain matrix products, which the counter knows; experts one by one, likewise
    return AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).train()


def test_a_sliding_window_bounds_what_a_token_sees() -> None:
    config = MistralConfig(**SIZES | {"num_hidden_layers": 1}, sliding_window=2)
    with torch.device("meta"):
        model = model_flops(AutoModelForCausalLM.from_config(config))
    per_pair = 3 * 2 * 2 * 4 * 8
    # 5 tokens that see themselves and one before: 1 + 2 + 2 + 2 + 2 pairs.
    assert step_flops(model, [5], 0) == model.per_position * 5 + per_pair * 9


TYPES = ["sliding_attention", "full_attention"]


@pytest.mark.parametrize(
    ("kind", "settings", "windows"),
    [
        (MistralConfig, {}, (5, 5)),
        (MistralConfig, {"sliding_window": None}, (ALL, ALL)),
        (Qwen3MoeConfig, {"use_sliding_window": True}, (5, 5)),
        (Qwen3MoeConfig, {"use_sliding_window": False}, (ALL, ALL)),
        (Qwen2Config, {"use_sliding_window": True, "max_window_layers": 1}, (ALL, 5)),
        (Qwen2Config, {"use_sliding_window": True, "layer_types": TYPES}, (5, ALL)),
        (Qwen2Config, {"use_sliding_window": False, "max_window_layers": 1}, (ALL, ALL)),
        # Settings that the model does not read, though its config keeps them.
        (LlamaConfig, {}, (ALL, ALL)),
        (LlamaConfig, {"layer_types": TYPES}, (ALL, ALL)),
        (MistralConfig, {"layer_types": TYPES}, (5, 5)),
    ],
)
def test_layers_have_the_windows_that_transformers_gives_their_attention(
    kind: type[PreTrainedConfig], settings: dict[str, Any], windows: tuple[int, ...]
) -> None:
    config = kind(**SIZES | {"sliding_window": 5} | settings)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME)
    assert Shape.of(model).windows == windows
    computed: list[int | None] = []
    for name, layer in model.named_modules():
        if name.endswith("self_attn"):
            layer.register_forward_pre_hook(
                lambda _, args, options: computed.append(options["attention_mask"].window), with_kwargs=True
            )
    with torch.no_grad():
        model.base_model(**Segments((9,), CPU).inputs(torch.arange(9)[None]), use_cache=False)
    assert [window or ALL for window in computed] == [*windows]


@pytest.mark.parametrize("model", ["tied_model", "untied_model", "experts_model", "adapter"])
def test_torchs_counter_sees_the_same_operations(model: str, request: pytest.FixtureRequest) -> None:
    length = 24
    path = request.getfixturevalue("tied_model" if model == "adapter" else model)
    policy = load(path)
    if model == "adapter":
        Adapter(ModelConfig(path=path, lora=LoraConfig(rank=4))).prepare(policy, seed=0)
    ids = torch.arange(length)[None]
    with FlopCounterMode(display=False) as counter:
        policy(ids, use_cache=False).logits.sum().backward()
    seen = counter.get_flop_counts()["Global"]
    attention = 3 * 2 * 2 * 2 * 4 * 8 * length**2
    assert seen[torch.ops.aten.bmm] == attention  # the whole square, of which a half is needed
    counted = counter.get_total_flops() - attention * (length - 1) // (2 * length)
    if model == "adapter":  # nothing is trained below queries, keys and values of the first layer: no gradient to there
        counted += 2 * length * (32 * 32 + 2 * 32 * 16 + 3 * 32 * 4)
    assert step_flops(model_flops(policy), [length], length) == counted


def test_a_convolution_is_no_mixture_of_experts() -> None:
    assert flops._products(nn.Conv1d(6, 6, 3, groups=6), 0) == 6 * 6 * 3


@pytest.mark.parametrize("family", FAMILIES)
def test_each_token_is_counted_for_the_experts_it_takes(family: str) -> None:
    with torch.device("meta"):
        model = model_flops(make_experts(family))
    # queries and outputs 32 · 32, keys and values 32 · 16; router 4 · 32; two experts: gate, up, down of 32 · 64
    layer = 2 * 32 * 32 + 2 * 32 * 16 + 4 * 32 + 2 * 3 * 32 * 64
    assert model.per_position == 6 * 2 * layer
    assert model.per_trained_token == 6 * 32 * 64


def test_the_peak_is_the_data_sheets_where_the_device_is_known() -> None:
    assert known_peak("NVIDIA H100 80GB HBM3") == known_peak("NVIDIA H200") == 989e12
    assert known_peak("NVIDIA H100 PCIe") == 756e12
    assert known_peak("NVIDIA GeForce RTX 4090") == 165e12
    assert known_peak("NVIDIA H100 80GB HBM3 MIG 1g.10gb") is None
    assert known_peak("NVIDIA GeForce GTX 1080") is None


@pytest.mark.parametrize("peak", [5e10, 5e12])  # of one core; of very many, which take their time to start
def test_a_measured_peak_does_not_depend_on_how_long_the_threads_take_to_start(
    peak: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert 1e8 < peak_flops.__wrapped__(torch.device("cpu"), torch.float32) < 1e15  # this machine's
    monkeypatch.setattr(flops, "_seconds_of_product", lambda matrix: 2e-5 + 2 * len(matrix) ** 3 / peak)
    assert peak_flops.__wrapped__(torch.device("cpu"), torch.float32) == pytest.approx(peak, rel=0.01)
