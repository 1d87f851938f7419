"""The trainer on torch's `meta` device, which behaves like a GPU whose numbers can't be read.

An operand that was left on the CPU raises there, and so does whatever would have the host wait for the device: item,
tolist, bool, boolean masks, nonzero. Nothing is computed, so models may have real sizes. DeepSpeed's engine alone is a
stand-in: forward, backward and AdamW are torch's.
"""

import contextlib
import copy
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.trainer.conftest import numbered_words
from torch import Tensor, nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.overrides import TorchFunctionMode
from transformers import Qwen2Config

from hocket import config as config_module
from hocket.config import ModelConfig
from hocket.config.algorithm import PRESETS
from hocket.protocol import TensorLayout, nccl
from hocket.trainer import attention, memory
from hocket.trainer import engine as engines
from hocket.trainer.policy import skeleton
from hocket.trainer.ranks import Ranks
from hocket.trainer.trainer import Trainer
from hocket.types import TrainSample
from support.parameters import mostly_long
from support.training import measured, sample_of, sequence

META = torch.device("meta")
SIZES = {  # layers as wide as those of Qwen2.5 of half a billion parameters, but fewer
    "vocab_size": 151_936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 2,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
WAITS = {getattr(Tensor, name): name for name in ("item", "tolist", "cpu", "__float__", "__bool__", "__int__")}
INTENDED: dict[str, Callable[[Tensor], Any]] = {  # the only places that wait for the device, and what they find
    "trainer.step.accumulate": lambda totals: [0.5] * len(totals),  # loss and metrics, once per update
    "trainer.engine._step_without_zero": lambda norm: 1.0,  # once per update
    "trainer.batching.unpack": lambda numbers: torch.zeros(numbers.shape),  # columns measured before a step
    "trainer.policy.check_architecture": lambda is_near: True,  # once per run
    "trainer.flops._seconds_of_product": lambda product: 1.0,  # once per run
}


class Waiting(TorchFunctionMode):
    """Answers the waits that are intended, and lets torch refuse all others."""

    def __init__(self) -> None:
        super().__init__()
        self.met: set[str] = set()

    def __torch_function__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in WAITS and args[0].is_meta:
            place = caller()
            assert place in INTENDED, f"{place} waits for the device by {WAITS[function]}"
            self.met.add(place)
            return INTENDED[place](args[0])
        return function(*args, **(kwargs or {}))


def caller() -> str:
    """Returns the module and the function of hocket's that is running."""
    frame: Any = sys._getframe(1)
    while not frame.f_globals["__name__"].startswith("hocket.") or frame.f_code.co_name.startswith("<"):
        frame = frame.f_back
    return f"{frame.f_globals['__name__'].removeprefix('hocket.')}.{frame.f_code.co_name}"


class OnMeta:
    """What `DeepSpeedEngine` uses of DeepSpeed at stage 0."""

    def __init__(self, setup: Any, *, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.module, self.optimizer = model, optimizer

    def __call__(self, *args: Any) -> Any:
        return self.module(*args)

    def set_gradient_accumulation_boundary(self, last: bool) -> None:
        """Nothing is summed over ranks."""

    def backward(self, loss: Tensor, *, scale_wrt_gas: bool) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def was_step_applied(self) -> bool:
        return True

    def destroy(self) -> None:
        """There is nothing to free."""


@pytest.fixture
def model(tmp_path: Path) -> str:
    numbered_words().save_pretrained(tmp_path)
    Qwen2Config(**SIZES, architectures=["Qwen2ForCausalLM"]).save_pretrained(tmp_path)
    return str(tmp_path)


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Waiting]:
    """A trainer's models and optimizer are on the device while this is entered."""
    load, adamw = Trainer.load_model, torch.optim.AdamW.__init__

    def on_meta(trainer: Trainer, model: ModelConfig, kind: Any) -> Any:
        def make(*args: Any, **options: Any) -> Any:
            return kind(*args, **options | {"loads": False})

        with META:
            return load(trainer, model, make)  # type: ignore[arg-type]

    def unfused(self: Any, *args: Any, fused: bool, **options: Any) -> None:
        adamw(self, *args, **options)

    monkeypatch.setattr(Trainer, "load_model", on_meta)
    monkeypatch.setattr(engines, "initialize", OnMeta)
    monkeypatch.setattr(torch.optim.AdamW, "__init__", unfused)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: False)  # it does not know the device
    monkeypatch.setattr(torch, "autocast", lambda *args, **options: contextlib.nullcontext())
    with Waiting() as waiting:
        yield waiting


def make_trainer(ranks: Ranks, model: str, *settings: str) -> Trainer:
    there = copy.copy(ranks)
    there.device = META
    defaults = (f"model.path={model}", "model.dtype=float32", "trainer.micro_batch_tokens=2048")
    return Trainer(config_module.load(None, [*defaults, *settings]), ranks=there)


def samples(count: int, length: int) -> list[TrainSample]:
    """Returns sequences, all but their first 64 tokens sampled, which they share, in groups of two."""
    ids = [[1] * 64 + [2 + place] * (length - 64) for place in range(count)]
    return [sample_of(sequence(one, 64), group=place // 2) for place, one in enumerate(ids)]


def train(trainer: Trainer, given: list[TrainSample]) -> None:
    """Measures, trains, and publishes as a run does."""
    trainer.step(measured(trainer, given, **{"returns": 1.0} if "values" in trainer.columns else {}))
    published: list[TensorLayout] = []
    trainer.stream(1 << 30, lambda bucket: published.extend(nccl.layout(bucket)))
    assert published


@pytest.mark.parametrize("preset", mostly_long(PRESETS, "grpo"))
def test_a_preset_waits_for_the_device_where_that_is_intended_alone(
    ranks: Ranks, model: str, waiting: Waiting, preset: str
) -> None:
    kl = () if preset == "ppo" else ("algorithm.kl=k3", "algorithm.kl_in=loss", "algorithm.kl_coef=0.1")
    with make_trainer(ranks, model, f"algorithm.preset={preset}", *kl) as trainer:
        train(trainer, samples(2, 129))
    assert waiting.met >= {"trainer.step.accumulate", "trainer.engine._step_without_zero"}


@pytest.mark.long
@pytest.mark.parametrize("kind", ["kernel", "groups"])
@pytest.mark.parametrize("settings", ["model.lora={}", "trainer.gradient_checkpointing=true"])
def test_adapters_and_recomputed_activations_do_so_too(
    ranks: Ranks, model: str, waiting: Waiting, settings: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "has_kernel", lambda query, *args: query.is_meta and kind == "kernel")
    extra = ("algorithm.entropy_coef=0.01", "algorithm.kl=k3", "algorithm.kl_in=loss", "algorithm.kl_coef=0.1")
    with make_trainer(ranks, model, settings, *extra) as trainer:
        train(trainer, samples(2, 129))
    assert waiting.met >= set(INTENDED) - {"trainer.flops._seconds_of_product"}  # once per process


@pytest.mark.long
def test_the_size_of_micro_batches_is_found_without_a_wait_of_its_own(
    ranks: Ranks, model: str, waiting: Waiting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(INTENDED, "trainer.engine._step_without_zero", lambda norm: math.nan)  # of a rehearsed step
    with make_trainer(ranks, model, "algorithm.preset=ppo") as trainer:
        for learner in trainer.learners:
            memory.rehearse(learner, 2048, trainer.ranks, longest=1024)


@pytest.mark.long
@pytest.mark.parametrize("recomputes", [False, True])
def test_the_peak_of_a_step_is_the_plans_estimate(
    ranks: Ranks, model: str, waiting: Waiting, recomputes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "has_kernel", lambda query, *args: query.is_meta)
    with make_trainer(ranks, model, f"trainer.gradient_checkpointing={recomputes}") as trainer:
        trainer.step(samples(4, 513))  # which allocates the optimizer's moments
        tracker = MemTracker()
        tracker.track_external(trainer.policy, trainer.engine._adamw)
        with tracker:
            trainer.step(samples(4, 513))
        config = trainer.setup.config
    peak = tracker.get_tracker_snapshot("peak")[META]["Total"]
    whole = skeleton(ModelConfig(path=model))
    expected = memory.estimate(whole, config, dtype=torch.float32, stage=0, num_ranks=1)
    assert peak == pytest.approx(expected.total, rel=0.15)
