from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import pytest
import torch
from tests.trainer.conftest import SIZES
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    MambaConfig,
    MambaForCausalLM,
)
from transformers.models.qwen2 import modeling_qwen2

from hocket.config import ModelConfig
from hocket.errors import TrainerError
from hocket.trainer import attention
from hocket.trainer.attention import Segments, attend
from hocket.trainer.policy import Policy
from support.examples import shown
from support.numbers import rounding
from support.training import CPU, additions, assert_near, gradient_additions

LENGTHS = (40, 33, 3, 1, 40, 2, 70)  # several in a group, alone in one, and padded
SUMS = 8 + 2 * max(LENGTHS)  # a score of 8 products; the softmax and the sum of values over what is seen
Inputs = tuple[Tensor, Tensor, Tensor]


def test_the_example_of_segments_counts_the_positions_of_each_sequence() -> None:
    names: dict[str, Any] = {"Segments": Segments, "torch": torch}
    exec(shown(attention, "segments = Segments("), names)
    assert names["positions_br"].tolist() == [[0, 1, 2, 3, 4, 0, 1, 2]]


@pytest.fixture
def inputs() -> Inputs:
    """Queries of four heads, keys and values of two."""
    query, key, value = (torch.randn(1, h, sum(LENGTHS), d) for h, d in ((4, 8), (2, 8), (2, 8)))
    return query.requires_grad_(), key.requires_grad_(), value.requires_grad_()


def by_hand(query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int], window: int) -> Tensor:
    """Softmax over what each position sees, segment by segment and head by head, in float64: [1, row, heads, d]."""
    segments, start = [], 0
    for length in lengths:
        q, k, v = (tensor[0, :, start : start + length].double() for tensor in (query, key, value))
        index = torch.arange(length, device=query.device)
        seen = (index[None] <= index[:, None]) & (index[None] > index[:, None] - window)
        heads = []
        for head in range(len(q)):
            scores = 0.3 * q[head] @ k[head // 2].T
            heads.append(scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v[head // 2])
        segments.append(torch.stack(heads, dim=1))
        start += length
    return torch.cat(segments)[None]


@pytest.mark.parametrize("window", [None, 1, 5, 40, 1000])
def test_each_segment_attends_to_itself_alone_up_to_the_position(inputs: Inputs, window: int | None) -> None:
    expected = by_hand(*inputs, LENGTHS, window or 1000)
    weights = torch.randn(expected.shape)
    gradients = torch.autograd.grad((expected * weights).sum(), inputs)
    segments = Segments(LENGTHS, CPU)
    result, _ = attend(nn.Module(), *inputs, None, scaling=0.3, segments=segments, sliding_window=window)
    assert_near(result.double(), expected, SUMS)
    found = torch.autograd.grad((result * weights).sum(), inputs)
    # Those of a key: of two heads' queries. A window of one position leaves queries and keys none: all are compared as
    # one, by the size of the largest.
    both = (torch.cat([one.flatten() for one in gradient]) for gradient in (found, gradients))
    assert_near(*both, 3 * SUMS + 2 * max(LENGTHS))


@pytest.mark.parametrize("window", [None, 5])
def test_the_kernel_for_gpus_is_asked_for_the_same(
    inputs: Inputs, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kernel(query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Tensor:
        """What torch documents: packed [row, heads, d], offsets, and a window (left, right) where -1 is no limit."""
        starts, same, longest, same_longest = args
        assert starts is same
        assert longest == same_longest == 70
        assert (options["enable_gqa"], options["scale"]) == (True, 0.3)
        left, right = options["window_size"]
        assert right == 0
        whole = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
        return by_hand(*whole, starts.diff().tolist(), 1000 if left == -1 else left + 1)[0].float()

    monkeypatch.setattr(attention, "has_kernel", lambda query, key, value: True)
    monkeypatch.setattr(attention, "varlen_attn", kernel)
    segments = Segments(LENGTHS, CPU)
    result, _ = attend(nn.Module(), *inputs, None, scaling=0.3, segments=segments, sliding_window=window)
    assert_near(result.double(), by_hand(*inputs, LENGTHS, window or 1000), 1)  # but rounded to float32
    assert "groups" not in vars(segments)  # they would be copied to the GPU for nothing


@pytest.mark.parametrize(
    ("dtype", "sizes", "takes"),
    [
        (torch.bfloat16, (128, 128), True),
        (torch.float16, (256, 256), True),
        (torch.float32, (128, 128), False),
        (torch.bfloat16, (320, 320), False),
        (torch.bfloat16, (100, 100), False),
        (torch.bfloat16, (192, 128), False),  # multi-head latent attention
    ],
)
def test_flash_attention_is_asked_for_what_it_takes_only(
    dtype: torch.dtype, sizes: tuple[int, int], takes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with FakeTensorMode():  # on a GPU that is not there
        query, key, value = (torch.empty(32, 4, d, dtype=dtype, device="cuda") for d in (sizes[0], *sizes))
    assert attention.has_kernel(query, key, value) == takes


@pytest.mark.parametrize(
    ("capability", "error", "says"),
    [
        ((9, 0), None, "FlashAttention 3"),
        ((9, 0), ImportError("no x"), "FlashAttention 2 (3, of the package flash-attn-3, can't be used: no x)"),
        ((10, 0), None, "FlashAttention 2"),
        ((8, 9), None, "FlashAttention 2"),
    ],
)
def test_flash_attention_3_is_switched_on_for_a_hopper_gpu_that_has_its_package(
    capability: tuple[int, int], error: Exception | None, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    switch = Mock(side_effect=error)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(attention, "activate_flash_attention_impl", switch)
    monkeypatch.setattr(attention, "_try_kernel", lambda device: None)
    assert attention.choose_kernel(torch.device("cuda")) == says
    assert switch.call_args_list == ([call("FA3")] if capability == (9, 0) else [])
    assert attention.choose_kernel(CPU) == "torch's for CPUs"


@pytest.fixture(params=[2, 3])
def flash_attention(request: pytest.FixtureRequest) -> Iterator[int]:
    """Version of FlashAttention that a GPU runs."""
    torch.nn.attention.restore_flash_attention_impl(_raise_warn=False)
    if request.param == 3 and attention.choose_kernel(torch.device("cuda")) != "FlashAttention 3":
        pytest.skip("needs a Hopper GPU and the package flash-attn-3")
    yield request.param
    torch.nn.attention.restore_flash_attention_impl(_raise_warn=False)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("window", [None, 64])
@pytest.mark.parametrize(("dtype", "size"), [(torch.bfloat16, 64), (torch.float16, 128), (torch.float32, 64)])
def test_attention_on_a_gpu_is_that_of_float64_without_memory_for_all_pairs(
    dtype: torch.dtype, size: int, window: int | None, flash_attention: int
) -> None:
    lengths, device = [1, 7, 513, 2048], torch.device("cuda")
    torch.manual_seed(0)
    options: Any = {"device": device, "dtype": dtype, "requires_grad": True}
    inputs = [torch.randn(1, heads, sum(lengths), size, **options) for heads in (4, 2, 2)]
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    expected = by_hand(*exact, lengths, window or 10_000)
    weights = torch.randn(expected.shape, device=device)
    expected_gradients = torch.autograd.grad((expected * weights).sum(), exact)
    segments = Segments(tuple(lengths), device)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result, _ = attend(nn.Module(), *inputs, None, scaling=0.3, segments=segments, sliding_window=window)
    gradients = torch.autograd.grad((result * weights).sum(), inputs)
    if window is None:  # a band of float32 exists for the kernels that take it as a mask
        assert torch.cuda.max_memory_allocated() - before < 4 * 2048 * 2048 * 4  # the scores of all heads
    for found, wanted in zip((result, *gradients), (expected, *expected_gradients), strict=True):
        # Sums are those of float32; queries' weights and gradients are rounded to the dtype before, results behind.
        apart = rounding(3 * (size + 2 * max(lengths))) + 2 * torch.finfo(dtype).eps
        assert (found.double() - wanted).norm() < apart * wanted.norm()


def save(model: nn.Module, folder: Path) -> Policy:
    model.save_pretrained(folder)  # type: ignore[operator]
    return Policy(ModelConfig(path=str(folder)), dtype=torch.float32, temperature=1.0)


def test_attention_sinks_take_their_part_with_a_window_and_without(tmp_path: Path) -> None:
    torch.manual_seed(0)
    many = {"num_local_experts": 2, "num_experts_per_tok": 1, "head_dim": 8, "sliding_window": 5}
    model = GptOssForCausalLM(GptOssConfig(**SIZES | {"initializer_range": 0.3}, **many))
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks.copy_(torch.tensor([-3.0, 0.0, 1.0, 2.0]))
    policy = save(model, tmp_path)
    policy.check_architecture(CPU)
    own = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    ids = torch.randint(64, (1, 50))
    packed = policy._hidden(ids, Segments((38, 12), CPU))
    expected = torch.cat([own.base_model(ids[:, part]).last_hidden_state for part in (slice(0, 38), slice(38, 50))], 1)
    assert_near(packed, expected, additions(str(tmp_path)))
    weights = torch.randn(expected.shape)  # the sum of squares would be the last norm's, whatever the sinks
    (packed * weights).sum().backward()
    (expected * weights).sum().backward()
    for layer, theirs in zip(policy.model.model.layers, own.model.layers, strict=True):
        assert theirs.self_attn.sinks.grad.abs().min() > 0
        sums = gradient_additions(str(tmp_path)) + expected.numel()
        assert_near(layer.self_attn.sinks.grad, theirs.self_attn.sinks.grad, sums)


def test_an_architecture_with_more_in_its_attention_is_refused(
    tied_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = save(Gemma2ForCausalLM(Gemma2Config(**SIZES, head_dim=8)), tmp_path)
    with pytest.raises(TrainerError, match="uses softcap in its attention"):
        policy.check_architecture(CPU)
    policy = Policy(ModelConfig(path=tied_model), dtype=torch.float32, temperature=1.0)
    policy.check_architecture(CPU)
    original = modeling_qwen2.eager_attention_forward

    def biased(module: nn.Module, query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Any:
        return original(module, query, key + torch.linspace(-1, 1, key.shape[2])[:, None], *args, **kwargs)

    monkeypatch.setattr(modeling_qwen2, "eager_attention_forward", biased)
    with pytest.raises(TrainerError, match="more in its attention"):
        policy.check_architecture(CPU)


@pytest.mark.parametrize(
    ("kind", "config"),  # with layers whose state flows from one sequence of a row to the next
    [
        (MambaForCausalLM, MambaConfig(state_size=8, vocab_size=64, num_hidden_layers=2)),
        (Lfm2ForCausalLM, Lfm2Config(**SIZES, layer_types=["conv", "full_attention"])),
    ],
)
def test_an_architecture_with_a_state_is_refused(kind: Any, config: Any, tmp_path: Path) -> None:
    policy = save(kind(config), tmp_path)
    with pytest.raises(
        TrainerError, match=r"carries a state from token to token, .* is a convolution; it can't be trained"
    ):
        policy.check_architecture(CPU)


def test_without_segments_the_row_is_one(inputs: Inputs) -> None:
    result, _ = attend(nn.Module(), *inputs, None, scaling=0.3)
    assert_near(result.double(), by_hand(*inputs, [sum(LENGTHS)], 1000), 8 + 2 * sum(LENGTHS))
    with pytest.raises(TrainerError, match="a mask of its own"):
        attend(nn.Module(), *inputs, torch.zeros(1, 1, 1, 1), scaling=0.3)


def test_on_a_cpu_16_bit_attention_is_that_of_float32_with_its_result_and_gradients_rounded(inputs: Inputs) -> None:
    """The third of three positions with equal keys sees the mean of 1, 1 and 2: 4/3, to 8 bits 171/128."""
    query = torch.zeros(1, 1, 3, 8, dtype=torch.bfloat16)
    value = query + torch.tensor([1, 1, 2], dtype=torch.bfloat16)[:, None]
    result, _ = attend(nn.Module(), query, query, value, None, scaling=1.0)
    assert result.dtype == torch.bfloat16
    assert result[0, 2].unique().tolist() == [171 / 128]

    short = [one.detach().bfloat16().requires_grad_() for one in inputs]
    long = [one.detach().float().requires_grad_() for one in short]
    segments = Segments(LENGTHS, CPU)
    rounded, _ = attend(nn.Module(), *short, None, scaling=0.3, segments=segments)
    with torch.autocast("cpu", torch.bfloat16):
        cast, _ = attend(nn.Module(), *long, None, scaling=0.3, segments=segments)
    assert torch.equal(cast, rounded)
    exact, _ = attend(nn.Module(), *long, None, scaling=0.3, segments=segments)
    assert torch.equal(rounded, exact.bfloat16())
    weights = torch.randn(exact.shape).bfloat16()
    found = torch.autograd.grad((rounded.float() * weights.float()).sum(), short)
    expected = torch.autograd.grad((exact * weights.float()).sum(), long)
    for gradient, exact_gradient in zip(found, expected, strict=True):
        assert torch.equal(gradient, exact_gradient.bfloat16())
