import dataclasses
import gc
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from tests.trainer.conftest import FAMILIES, make_experts, numbered_words
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from hocket import config as config_module
from hocket.config import ModelConfig, TrainerConfig
from hocket.errors import ConfigError, TrainerError
from hocket.trainer import memory
from hocket.trainer.flops import Shape
from hocket.trainer.memory import GIB, estimate, fit_micro_batch
from hocket.trainer.policy import skeleton
from hocket.trainer.ranks import Ranks
from hocket.trainer.trainer import Trainer
from hocket.types import TrainSample
from support import training
from support.training import CPU, bytes_besides, peak_bytes, storages


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Qwen2 of 1.6 M parameters, in which everything is large beside a page."""
    folder = tmp_path_factory.mktemp("models") / "wide"
    numbered_words().save_pretrained(folder)
    sizes = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 640, "num_hidden_layers": 2}
    Qwen2ForCausalLM(Qwen2Config(**sizes, num_attention_heads=4, num_key_value_heads=2)).save_pretrained(folder)
    return str(folder)


def make_trainer(ranks: Ranks, model: str, *settings: str) -> Trainer:
    return Trainer(config_module.load(None, [f"model.path={model}", *settings]), ranks=ranks)


def samples(num_positions: int, largest: int = 65) -> list[TrainSample]:
    """Returns sequences of 65 tokens, all of them sampled, of ids below `largest`, that begin differently."""
    ids = ([(t + first) % largest for t in range(65)] for first in range(num_positions // 64))
    return [training.sample_of(training.sequence(one, 0)) for one in ids]


def test_a_hand_worked_estimate() -> None:
    # The sizes of a Qwen2.5 of 1.5 billion parameters, with an output head of its own.
    sizes = {"vocab_size": 151_936, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28}
    with torch.device("meta"):
        model = Qwen2ForCausalLM(Qwen2Config(**sizes, num_attention_heads=12, num_key_value_heads=2))
    count = sum(p.numel() for p in model.parameters())
    config = TrainerConfig(micro_batch_tokens=8192)
    found = estimate(model, config, dtype=torch.bfloat16, stage=2, num_ranks=4)
    assert found.weights == 2 * count
    assert found.optimizer == 12 * count / 4
    embedding = 151_936 * 1536  # larger than a bucket; its gradient exists in bfloat16 and, to be reduced, in float32
    assert found.gradients == 2 * count + 4 * count / 4 + (2 + 4) * embedding
    layer = 16 * 1536 + 2 * (3 * 1536 + 2 * 256 + 4 * 8960)
    assert found.activations == 8192 * (28 * layer + 16 * 1536)
    assert found.logits == 12 * 512 * 151_936
    assert f"{found}".startswith("about 38.35 GiB per rank: weights 3.31, gradients 6.27, optimizer 4.97, activations")
    less = config.model_copy(update={"gradient_checkpointing": True})
    found = estimate(model, less, dtype=torch.bfloat16, stage=3, num_ranks=4, offloads=True)
    # A quarter of the weights and up to a billion gathered ones; gradients leave the GPU through float32 copies.
    assert (found.weights, found.optimizer) == (2 * count / 4 + 2 * 1e9 * 3 / 4, 0)
    assert found.gradients == (4 + 4) * embedding
    assert found.activations == 8192 * (28 * 2 * 1536 + 16 * 1536 + layer)
    own = less.model_copy(update={"deepspeed": {"zero_optimization": {"stage3_max_live_parameters": 1000}}})
    found = estimate(model, own, dtype=torch.bfloat16, stage=3, num_ranks=4)
    assert found.weights == 2 * count / 4 + 2 * 1000 * 3 / 4
    frozen = estimate(model.requires_grad_(False), config, dtype=torch.bfloat16, stage=2, num_ranks=4)
    assert (frozen.weights, frozen.gradients, frozen.optimizer, frozen.activations) == (2 * count, 0, 0, 0)
    # On a CPU, rows are short, and their log-probs are kept.
    short = estimate(model, config, dtype=torch.float32, stage=0, num_ranks=1, row_tokens=1024)
    assert short.logits == (8 * 512 + 4 * 1024) * 151_936


@pytest.mark.parametrize("family", FAMILIES)
def test_mixtures_are_trained_and_their_estimate_counts_the_experts_that_a_token_takes(
    family: str, ranks: Ranks, tmp_path: Path
) -> None:
    numbered_words().save_pretrained(tmp_path)
    model = make_experts(family)
    model.save_pretrained(tmp_path)
    with make_trainer(ranks, str(tmp_path), "trainer.learning_rate=1e-2") as trainer:
        first, second = (trainer.step(samples(256, 62)) for _ in range(2))
    assert first["train/grad_norm"] > 0
    assert second["train/loss"] < first["train/loss"]
    config = TrainerConfig(micro_batch_tokens=1024)
    found = estimate(model, config, dtype=torch.float32, stage=1, num_ranks=1)
    layer = 24 * 32 + 4 * (3 * 32 + 2 * 16 + 4 * 2 * 64)  # two experts of width 64
    assert found.activations == 1024 * (2 * layer + 24 * 32)
    assert found.weights == 4 * sum(p.numel() for p in model.parameters())


# ZeRO-2 keeps as much as ZeRO-1, but for its gradients, which the estimate by hand has.
@pytest.mark.long
@pytest.mark.parametrize(("stage", "dtype"), [(0, "float32"), (1, "bfloat16"), (3, "bfloat16")])
def test_the_estimate_is_what_a_trainer_holds(
    ranks: Ranks, wide_model: str, stage: int, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As an engine with torch_autocast leaves it: gradients are summed in float32 nevertheless.
    monkeypatch.setattr("deepspeed.runtime.torch_autocast.TORCH_AUTOCAST_INITIALIZED", True)
    before = storages()
    settings = (f"model.dtype={dtype}", f"trainer.zero_stage={stage}", "trainer.micro_batch_tokens=1024")
    with make_trainer(ranks, wide_model, *settings) as trainer:
        trainer.step(samples(64))
        gc.collect()
        used = bytes_besides(before) + peak_bytes(lambda: trainer.step(samples(2048)))
        config = config_module.load(None, list(settings)).trainer
        whole, expected_dtype = skeleton(ModelConfig(path=wide_model)), trainer.setup.dtype
    expected = estimate(whole, config, dtype=expected_dtype, stage=stage, num_ranks=1).total
    assert used == pytest.approx(expected, rel=0.15)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("setting", ["zero_stage=2", "zero_stage=3", "offload_optimizer=true"])
def test_the_estimate_is_what_a_gpu_holds(ranks: Ranks, setting: str, tmp_path: Path) -> None:
    numbered_words().save_pretrained(tmp_path)
    sizes = {"vocab_size": 32_000, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 24}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 4}
    Qwen2Config(**sizes, **heads, architectures=["Qwen2ForCausalLM"]).save_pretrained(tmp_path)
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    settings = ("model.random_init=true", "model.dtype=bfloat16", "trainer.micro_batch_tokens=4096")
    with make_trainer(ranks, str(tmp_path), *settings, f"trainer.{setting}") as trainer:
        for _ in range(2):
            trainer.step(samples(8192, 62))
        used = torch.cuda.max_memory_allocated() - before
        assert used == pytest.approx(trainer.estimate.total, rel=0.15)


def test_a_model_that_cannot_fit_is_refused_before_it_is_loaded(
    ranks: Ranks, tied_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda device: GIB // 10)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *args, **kwargs: pytest.fail("loaded"))
    settings = ("trainer.micro_batch_tokens=10000000", "trainer.zero_stage=0")
    with pytest.raises(ConfigError) as refused:
        make_trainer(ranks, tied_model, *settings)
    # a layer's 24 · 32 + 4 · (3 · 32 + 2 · 16 + 4 · 64) bytes, twice, and 24 · 32 more, for the 32,768 of a CPU's row;
    # the log-probs of all 64 tokens are kept for them, 4 bytes each
    needs = "a step needs about 0.17 GiB per rank: weights 0.00, gradients 0.00, optimizer 0.00, activations 0.16"
    for said in (needs, "there are 0.10", "trainer.gradient_checkpointing=true", "trainer.micro_batch_tokens"):
        assert said in str(refused.value)


def test_frozen_layers_in_four_bits_take_about_half_a_byte_per_weight(tied_model: str) -> None:
    model = skeleton(ModelConfig(path=tied_model, lora={"rank": 4}))  # type: ignore[arg-type]
    options: Any = {"dtype": torch.bfloat16, "stage": 2, "num_ranks": 1}
    plain, small = (estimate(model, TrainerConfig(), quantized=q, **options).weights for q in (False, True))
    # hidden 32, query 32, key 16, inner 64: q, o; k, v; gate, up, down in each of two layers
    assert plain - small == pytest.approx((2 - 0.53) * 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64))


@pytest.mark.long
@pytest.mark.parametrize(("stage", "preset"), [(1, "grpo"), (3, "grpo"), (1, "ppo")])
def test_a_rehearsed_step_of_every_learner_leaves_no_trace(
    ranks: Ranks, tied_model: str, stage: int, preset: str, tmp_path: Path
) -> None:
    zeros = (0.0,) * 65
    work = [dataclasses.replace(sample, columns={"values": zeros, "returns": zeros}) for sample in samples(512, 62)]
    with make_trainer(ranks, tied_model, f"trainer.zero_stage={stage}", f"algorithm.preset={preset}") as trainer:
        assert [learner.name for learner in trainer.learners[1:]] == ["critic"] * (preset == "ppo")
        training.save(trainer, tmp_path / "state")
        losses = [trainer.step(work)["train/loss"] for _ in range(2)]
        training.load(trainer, tmp_path / "state")
        for learner in trainer.learners:
            memory.rehearse(learner, 1024, ranks, longest=50)
        assert [trainer.step(work)["train/loss"] for _ in range(2)] == losses


def test_a_run_that_goes_on_keeps_its_micro_batches_unless_others_may_fit(
    ranks: Ranks, tied_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TrainerConfig, "unmeasured", lambda config: config)  # as on a GPU
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(memory, "fit_micro_batch", lambda *_, **options: 63)
    with make_trainer(ranks, tied_model) as trainer:
        training.save(trainer, tmp_path / "state")
        assert "trainer.micro_batch_tokens=auto is 63: sequences of up to 64 tokens have room" in trainer.description
    monkeypatch.setattr(memory, "fit_micro_batch", lambda *_, **options: 55)  # something else takes more
    for changed, expected in (("steps=7", 63), ("max_grad_norm=2", 55), ("micro_batch_tokens=50", 50)):
        with make_trainer(ranks, tied_model, f"trainer.{changed}") as trainer:
            assert trainer.micro_batch_tokens == min(55, expected)
            training.load(trainer, tmp_path / "state")
            assert trainer.micro_batch_tokens == expected


def test_without_a_gpu_the_size_is_8192_for_every_part_of_a_run(ranks: Ranks, tied_model: str) -> None:
    config = config_module.load(None, [f"model.path={tied_model}"])
    assert config.trainer.micro_batch_tokens == "auto"
    assert config.chosen(on_gpu=False).trainer.micro_batch_tokens == 8192
    with Trainer(config, ranks=ranks) as trainer:
        assert trainer.micro_batch_tokens == 8192


def test_a_row_on_a_cpu_is_long_enough_with_8_mib_in_its_largest_tensor(tied_model: str) -> None:
    shape = Shape.of(skeleton(ModelConfig(path=tied_model)))
    for inner, expected in ((256, 8192), (1408, 1489), (8960, 1024)):  # 2^21 / 1408 = 1489.4
        assert memory.row_tokens(shape._replace(inner=inner), on_gpu=False) == expected
    assert memory.row_tokens(shape, on_gpu=True) == math.inf


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_auto_on_a_gpu_is_a_size_that_fits_and_a_run_that_goes_on_keeps_it(
    ranks: Ranks, wide_model: str, tmp_path: Path
) -> None:
    gc.collect()
    torch.cuda.empty_cache()
    held = [torch.empty(torch.cuda.mem_get_info()[0] - 3 * GIB, dtype=torch.uint8, device="cuda")]
    torch.cuda.reset_peak_memory_stats()
    apart = "launch.gpus_apart=true"  # or there is room for a server
    with make_trainer(ranks, wide_model, apart) as trainer:
        size = trainer.micro_batch_tokens
        trainer.step(samples(3 * size))
        assert torch.cuda.max_memory_reserved() - held[0].nbytes > 1.5 * GIB
        training.save(trainer, tmp_path / "state")
    held.append(torch.empty(GIB, dtype=torch.uint8, device="cuda"))
    with make_trainer(ranks, wide_model, apart) as trainer:
        assert 0.2 * size < trainer.micro_batch_tokens < 0.8 * size
        training.load(trainer, tmp_path / "state")
        assert trainer.micro_batch_tokens == size


class Gpu:
    """Stands for one rank on a GPU with so many free bytes, where a micro-batch takes `peak` of its tokens."""

    device = torch.device("cuda")

    def __init__(self, monkeypatch: pytest.MonkeyPatch, free: int, peak: Callable[[int], int]) -> None:
        self.peaks: list[int] = []
        monkeypatch.setattr(memory, "available_bytes", lambda device: free)
        monkeypatch.setattr(memory, "rehearse", lambda *_: None)
        monkeypatch.setattr(
            memory, "_peak_bytes", lambda learner, tokens, *_: self.peaks.append(peak(tokens)) or peak(tokens)
        )

    def smallest(self, tokens: int) -> int:
        return tokens


@pytest.mark.parametrize(
    ("free", "peak", "expected"),
    [
        (11_112, lambda tokens: 1000 + 20 * tokens, 450),  # 1000 + 20 · 450 = .9 · 11,112; 512 would be too many
        (55_556, lambda tokens: 1000 + 20 * tokens, 2277),  # the next one, 2446, is not worth a try
        (66_667, lambda tokens: max(40_000, 30 * tokens), 2000),  # what is hidden at first: 512, 768, 1152, 1728, 2000
        (10**9, lambda tokens: tokens, memory.LARGEST_MICRO_BATCH),
    ],
)
def test_auto_grows_to_a_size_that_has_room_beside_a_server_and_tries_none_that_has_not(
    free: int, peak: Callable[[int], int], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu: Any = Gpu(monkeypatch, free + 500, peak)
    found = fit_micro_batch([Mock(), Mock()], gpu, leaves=500, longest=64)
    assert found == expected
    assert peak(found) <= 0.9 * free
    assert gpu.peaks[0] > 0.9 * free or max(gpu.peaks) <= 0.9 * free  # where the first size has room, so has each


def test_auto_with_no_room_at_all_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu: Any = Gpu(monkeypatch, 0, lambda tokens: 1000 + 20 * tokens)
    with pytest.raises(TrainerError, match=r"not even one sequence.*gradient_checkpointing"):
        fit_micro_batch([Mock()], gpu, leaves=0, longest=64)


def test_a_start_without_memory_for_the_first_micro_batch_names_settings(
    tied_model: str, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(memory, "check", no_room)
    said = r"out of memory in the start \(could not allocate 2.00 GiB\); set .*checkpoint"
    with pytest.raises(TrainerError, match=said):
        make_trainer(ranks, tied_model)


def test_ranks_of_one_machine_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hocket.common.machine.free_memory", lambda: 12 * GIB)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert memory.available_bytes(CPU) == 3 * GIB
