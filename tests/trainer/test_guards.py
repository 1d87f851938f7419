"""Skipped steps and full memory, in one process: what is named, what is kept, and that the trainer goes on."""

import dataclasses
import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from hocket.algorithm.losses import LossOutput
from hocket.config import TrainerConfig
from hocket.errors import TrainerError
from hocket.observe.metrics import known_metrics
from hocket.trainer import guards
from hocket.trainer.batching import TrainBatch
from hocket.trainer.engine import Setup
from hocket.trainer.objective import BatchLoss
from hocket.trainer.ranks import Ranks
from hocket.trainer.trainer import Trainer
from support import training
from support.training import read_batch, same, weights_of

SAMPLES = [
    training.sample_of(training.sequence(range(first, first + 9)), advantage, id=f"step 1/0/{first}")
    for first, advantage in ((0, 1.0), (10, -1.0), (20, 0.5))
]


def make_trainer(ranks: Ranks, model: str, *settings: str, loss: BatchLoss | None = None) -> Trainer:
    return training.make_trainer(ranks, model, "trainer.micro_batch_tokens=20", *settings, loss=loss)


# test_ranks.py skips a step in float32 at every stage; in bfloat16, ZeRO-1 has a class of its own.
@pytest.mark.parametrize(("stage", "dtype"), [(0, "float32"), (1, "bfloat16"), (2, "float32"), (3, "float32")])
def test_a_fluke_is_made_good_and_a_step_that_stays_not_finite_is_kept_with_its_first_cause(
    ranks: Ranks, tied_model: str, stage: int, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hocket.trainer.guards.MAX_SKIPPED_STEPS", 2)
    factors: Iterator[float] = iter([])
    with make_trainer(ranks, tied_model, f"trainer.zero_stage={stage}", f"model.dtype={dtype}") as trainer:
        norm, outcomes, updated = trainer.policy.model.model.norm, [], []
        norm.register_forward_hook(lambda module, inputs, output: output * next(factors, 1.0))
        training.save(trainer, tmp_path / "state")
        for factor in (1.0, math.nan):  # of the first of several forward passes
            training.load(trainer, tmp_path / "state")
            factors = iter([factor])
            stats = trainer.step(SAMPLES, keep=tmp_path / "skipped" / "step_000001.json")
            outcomes.append((stats["train/loss"], stats["train/grad_norm"]))
            updated.append(weights_of(trainer))
        assert outcomes[0] == outcomes[1]
        assert same(*updated)
        assert not (tmp_path / "skipped").exists()
        factors, before = itertools.repeat(math.nan), weights_of(trainer)
        kept = tmp_path / "skipped" / "step_000002.json"
        assert trainer.step(SAMPLES, keep=kept)["train/skipped"]
        assert same(before, weights_of(trainer))
        with pytest.raises(TrainerError, match=r"2 steps in a row.*step_000003\.json\): the policy's loss\. Lower"):
            trainer.step(SAMPLES, keep=tmp_path / "skipped" / "step_000003.json")
    text = json.loads(kept.read_text())
    assert text["not_finite"].startswith("the policy's loss. Lower trainer.learning_rate")
    assert text["samples"][0]["text"].startswith("t0t1t2")
    assert read_batch(kept) == SAMPLES


def test_numbers_that_came_with_a_sample_and_gradients_are_told_apart(
    ranks: Ranks, tied_model: str, tmp_path: Path
) -> None:
    bad = [SAMPLES[0], dataclasses.replace(SAMPLES[1], advantages=(0.0, 0.0, math.inf, *[1.0] * 6))]
    sent = [dataclasses.replace(one, advantages=(math.nan,) * 9) for one in SAMPLES]  # made of the next one's log-probs
    sequence = dataclasses.replace(SAMPLES[1].sequence, logprobs=(0.0, 0.0, math.nan, *[-1.0] * 6))
    sent[1] = dataclasses.replace(sent[1], sequence=sequence)
    far = zip(SAMPLES, (-1e29, 3e29, -2e29), strict=True)  # rewards of 0, 4e29 and -1e29
    extreme = [dataclasses.replace(sample, advantages=(size,) * 9) for sample, size in far]
    with make_trainer(ranks, tied_model) as trainer:
        trainer.step(bad, keep=tmp_path / "a.json")
        assert trainer.step(extreme, keep=tmp_path / "c.json")["train/skipped"]
        assert trainer.step(sent, keep=tmp_path / "d.json")["train/skipped"]
        trainer.policy.model.model.norm.weight.register_hook(lambda gradient: gradient * math.inf)
        assert math.isfinite(trainer.step(SAMPLES, keep=tmp_path / "b.json")["train/loss"])
    faults = [json.loads((tmp_path / f"{name}.json").read_text())["not_finite"] for name in "abcd"]
    extreme_rewards = "advantages of step 1/0/10. Look for extreme rewards, and at what algorithm.advantage makes of"
    assert faults[0].startswith(extreme_rewards)
    assert faults[2].startswith(extreme_rewards)
    assert faults[3].startswith("rollout_logprobs of step 1/0/10. The server should not have sent such log-probs")
    assert faults[2].endswith("up to 3e+29")
    assert faults[1].startswith("the gradient of the policy's model.model.norm.weight. Lower")
    assert read_batch(tmp_path / "a.json")[1].advantages[2] == math.inf


@pytest.mark.long
@pytest.mark.parametrize("stage", [2, 3])  # ZeRO-1 is ZeRO-2's class
def test_in_float16_an_overflow_lowers_the_scale_and_only_at_the_lowest_it_is_a_fault(
    ranks: Ranks, tied_model: str, stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hocket.trainer.guards.MAX_SKIPPED_STEPS", 2)
    monkeypatch.setattr(Setup, "parameter_dtype", lambda _: torch.float16)
    accelerator = "deepspeed.accelerator.cpu_accelerator.CPU_Accelerator"
    monkeypatch.setattr(f"{accelerator}.is_fp16_supported", lambda _: True)  # torch can, if slowly
    factor = 0.01

    def loss(logprobs_bt: Tensor, entropy_bt: Tensor, batch: TrainBatch) -> LossOutput:
        # A loss that is finite, with a gradient of about `factor` in each log-prob.
        centred_bt = (logprobs_bt - logprobs_bt.detach()).where(batch.mask_bt, 0.0)
        return LossOutput(loss=centred_bt.sum() * factor, metrics={})

    settings = ("model.dtype=float16", f"trainer.zero_stage={stage}")
    keep = tmp_path / "a.json"
    with make_trainer(ranks, tied_model, *settings, loss=loss) as trainer:
        factor = math.nan  # a broken loss, which no scale would mend
        assert trainer.step(SAMPLES)["train/skipped"]
        factor = 0.01
        assert trainer.step(SAMPLES, keep=keep)["train/loss_scale"] == 4096
        training.save(trainer, tmp_path / "state")
        factor = 1e9
        before = weights_of(trainer)
        stats = [trainer.step(SAMPLES, keep=keep) for _ in range(12)]
        assert [step["train/loss_scale"] for step in stats] == [2.0 ** (12 - index) for index in range(12)]
        assert all(step["train/skipped"] for step in stats)  # far more than five in a row, which is no fault here
        assert not keep.exists()
        assert trainer.step(SAMPLES, keep=keep)["train/loss_scale"] == 1
        assert json.loads(keep.read_text())["not_finite"].startswith("the gradient of the policy's model.")
        assert same(before, weights_of(trainer))
        with pytest.raises(TrainerError, match=r"2 steps in a row.*gradient of the policy's model\."):
            trainer.step(SAMPLES, keep=keep)
        training.load(trainer, tmp_path / "state")
        assert trainer.engine.loss_scale == 4096


def test_a_folder_keeps_the_newest_batches(tmp_path: Path) -> None:
    for step in range(1, 12):
        guards.keep_batch(tmp_path / f"step_{step:06d}.json", SAMPLES, "the loss", str)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step_{step:06d}.json" for step in range(4, 12)]


CPU_FULL = "DefaultCPUAllocator: can't allocate memory: you tried to allocate {} bytes. Error code 12"


@pytest.mark.parametrize(("place", "what"), [("backward", "backward pass"), ("step", "update")])
def test_a_full_memory_names_what_it_was_for_and_the_setting(
    ranks: Ranks, tied_model: str, place: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, full = make_trainer(ranks, tied_model), CPU_FULL.format(3072)
    with monkeypatch.context() as patch:
        patch.setattr(trainer.engine._engine, place, Mock(side_effect=RuntimeError(full)))
        advice = r"micro_batch_tokens=10 \(now 20\); or .*checkpointing=true; or .*zero_stage=3"
        with pytest.raises(TrainerError, match=rf"memory in the {what} \(could not allocate 3072 bytes\).*{advice}"):
            trainer.step(SAMPLES)
    with pytest.raises(TrainerError, match="broke in an earlier call"):
        trainer.step(SAMPLES)
    monkeypatch.setattr(trainer.ranks, "destroy", Mock())
    for owns_ranks in (False, True):  # one alone has no others to wait for, and this process may train again
        monkeypatch.setattr(trainer, "owns_ranks", owns_ranks)
        trainer.close()
        assert trainer.ranks.destroy.called == owns_ranks  # type: ignore[attr-defined]


def test_messages_of_a_full_memory_are_understood_and_the_longest_sequence_bounds_the_advice() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(10**16)
    for error in (
        caught.value,
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError(f'at "alloc.cpp": {CPU_FULL}'),  # with both kinds of quotes
        MemoryError(),
    ):
        assert guards.is_out_of_memory(error)
    assert not guards.is_out_of_memory(RuntimeError("The size of tensor a (2) must match the size of tensor b (3)"))

    def message(work: str, longest: int) -> str:
        options: Any = {"micro_batch_tokens": 100, "work": work, "longest": longest, "on_gpu": True}
        return str(guards.out_of_memory(caught.value, TrainerConfig(), **options))

    assert "in the export (could not allocate 40000000000000000 bytes)" in message("export", 0)
    assert "server.gpu_memory_utilization" in message("export", 0)
    assert "micro_batch_tokens=70 (now 100)" in message("step", 70)
    assert "micro_batch_tokens" not in message("step", 100)


def test_a_step_counts_its_tokens_and_operations(ranks: Ranks, tied_model: str) -> None:
    with make_trainer(ranks, tied_model) as trainer:
        metrics = trainer.step(SAMPLES)
        peak = trainer.peak_flops
        trainer.peak_flops = 1.0  # as if measured beside others: it was no peak
        assert trainer.step(SAMPLES)["train/mfu"] == 1
        assert 1 < trainer.peak_flops < 1e15
    seconds = metrics["time/train"]
    assert (metrics["train/tokens"], metrics["train/sequences"]) == (21, 3)
    assert metrics["train/tokens_per_s"] == pytest.approx(21 / seconds)
    assert metrics["train/positions_per_s"] == pytest.approx(24 / seconds)
    # By hand: 9216 multiply-adds in each of 2 layers per position, 2048 per trained token, 64 in each layer per pair.
    flops = 6 * (24 * 2 * 9216 + 21 * 2048 + 3 * 36 * 2 * 64)
    assert metrics["train/mfu"] == pytest.approx(flops / (seconds * peak))
    assert metrics.keys() <= {metric.name for metric in known_metrics()}
