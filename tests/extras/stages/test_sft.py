import functools
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from tests.extras.stages import runs as stages
from tests.extras.stages.runs import assert_goes_on, weights_of

from hocket.config import DataConfig
from hocket.data import tokenizer as tokenizers
from hocket.errors import ConfigError, DataError
from hocket.extras.stages import driver, sft
from hocket.extras.stages.driver import in_epochs
from hocket.types import TokenSequence
from support.numbers import rounding
from support.parameters import mostly_long
from support.training import additions, logprobs_of, sequence

ROWS = [((1, 2, 3), (4, 5, 63)), ((6,), (7, 63)), ((2, 2), (8, 9, 10, 63))]


def sequences(rows: Any) -> list[TokenSequence]:
    return [sequence(prompt + response, len(prompt), logprob=0.0) for prompt, response in rows]


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    asked: list[Any] = []

    def load_demonstrations(data: DataConfig, tokenizer: Any, max_length: int) -> list[TokenSequence]:
        asked.append((data.source, tokenizer.eos_token_id, max_length))
        return sequences(ROWS[: data.limit])

    monkeypatch.setattr("hocket.extras.stages.sft.load_demonstrations", load_demonstrations)
    return asked


def run(model: str, tmp_path: Path, *settings: str) -> list[dict[str, Any]]:
    defaults = ("sft.batch_size=3", "trainer.steps=60", "trainer.learning_rate=0.02")
    return stages.run("sft", model, tmp_path, *defaults, *settings)


def test_sft_loss_is_the_mean_cross_entropy_of_the_unmasked_tokens() -> None:
    logprobs = torch.tensor([[-1.0, -2.0, -math.inf]], requires_grad=True)
    batch: Any = SimpleNamespace(mask_bt=torch.tensor([[True, True, False]]), num_tokens_global=4)
    output = sft.sft_loss(logprobs, logprobs, batch)
    output.loss.backward()
    assert output.loss.item() == 0.75
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [[-0.25, -0.25, 0.0]]


def test_every_epoch_has_each_sample_once_in_an_order_of_its_own() -> None:
    samples: Any = range(20)
    first, again = in_epochs(samples, 7), in_epochs(samples, 7)
    epochs = [[next(first) for _ in range(20)] for _ in range(3)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(20))] * 3
    assert epochs[0] != epochs[1] != epochs[2]
    assert epochs[0] == [next(again) for _ in range(20)]
    assert epochs[0] != [next(in_epochs(samples, 8)) for _ in range(20)]


def cross_entropy(path: str | Path, rows: Any = ROWS) -> float:
    """Mean over response tokens, each row by itself, through transformers' own logits."""
    count = sum(len(response) for _, response in rows)
    return -sum(map(sum, logprobs_of(path, sequences(rows)))) / count


def test_sft_learns_the_responses_and_leaves_a_model(
    model: str, rows: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = cross_entropy(model)
    records = run(model, tmp_path, "rollout.temperature=0.5")  # a sampling temperature, not the model's
    assert rows == [("rows.jsonl", 63, 64)]
    assert [record["step"] for record in records] == list(range(1, 61))
    assert records[0]["train/loss"] == pytest.approx(before, rel=rounding(additions(model) + 9))  # a mean of 9 tokens
    assert records[0]["train/tokens"] == 9
    after = cross_entropy(tmp_path / "run" / "model")
    assert after < 0.1 < before
    assert after <= records[-1]["train/loss"]  # one step further
    said = capsys.readouterr().out
    assert "step 60/60" in said
    assert ", all of them: lower sft.batch_size for more updates" in said
    assert "outlasts" not in said
    tokenizer, (prompt, response) = tokenizers.load(model), ROWS[0]
    assert repr(f"{tokenizer.decode(prompt)}[[{tokenizer.decode(response)}]]") in said


def test_the_held_out_loss_is_measured_before_on_schedule_and_at_the_end_and_moves_nothing(
    model: str, rows: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ("eval.data.source=held.jsonl", "eval.every_steps=2", "trainer.steps=5")
    records = run(model, tmp_path, *settings, "eval.num_prompts=2")
    assert [source for source, *_ in rows] == ["rows.jsonl", "held.jsonl"]
    measured = {record["step"]: record["eval/loss"] for record in records if "eval/loss" in record}
    assert [*measured] == [0, 2, 4, 5]
    near = functools.partial(pytest.approx, rel=rounding(additions(model) + 5))  # a mean of 5 tokens
    assert measured[0] == near(cross_entropy(model, ROWS[:2]))
    assert measured[5] == near(cross_entropy(tmp_path / "run" / "model", ROWS[:2]))
    said = capsys.readouterr().out
    assert f"step 0/5  held-out loss {measured[0]:.4f}, of 2 demonstrations" in said
    assert f"loss {records[4]['train/loss']:.4f}  held-out loss {measured[4]:.4f}" in said
    run(model, tmp_path, *settings, "eval.num_prompts=0", f"run.dir={tmp_path}/unmeasured")
    assert weights_of(tmp_path / "run") == weights_of(tmp_path / "unmeasured")


def test_epochs_take_each_sample_as_often_and_end_the_schedule_with_the_last(
    model: str, rows: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = run(model, tmp_path, "sft.epochs=3", "sft.batch_size=2", "trainer.schedule=linear")
    said = capsys.readouterr().out
    assert "sft.epochs decides: 5 steps of 2 demonstrations" in said
    assert "lower sft.batch_size" not in said
    assert [record["train/sequences"] for record in records] == [2, 2, 2, 2, 1]
    assert [record["train/learning_rate"] for record in records] == pytest.approx([0.02, 0.016, 0.012, 0.008, 0.004])


@pytest.mark.parametrize("length", mostly_long(["trainer.steps=5", "sft.epochs=3"], "sft.epochs=3"))
def test_a_run_that_was_stopped_ends_with_the_weights_of_one_that_was_not(
    model: str, rows: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: str
) -> None:
    settings = (length, "sft.batch_size=2", "checkpoint.every_steps=3", "trainer.schedule=linear")
    records = assert_goes_on("sft", model, tmp_path, monkeypatch, *settings, at=4)
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5]


def test_checkpoints_are_copied_to_another_folder(model: str, rows: list[Any], tmp_path: Path) -> None:
    settings = ("trainer.steps=3", "checkpoint.every_steps=2", f"checkpoint.copy_to={tmp_path}/away")
    run(model, tmp_path, *settings)
    for step in ("step_000002", "step_000003"):
        here = tmp_path / "run" / "checkpoints" / step
        away = tmp_path / "away" / "run" / step
        assert {path.name: path.read_bytes() for path in away.iterdir()} == {
            path.name: path.read_bytes() for path in here.iterdir()
        }


def test_a_run_does_not_go_on_with_other_demonstrations(
    model: str, rows: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ("trainer.steps=3", "checkpoint.every_steps=2", "checkpoint.resume=true")
    run(model, tmp_path, *settings)
    run(model, tmp_path, *settings, "trainer.steps=4")  # with the same it does
    assert "steps are done" not in capsys.readouterr().out
    run(model, tmp_path, *settings, "trainer.steps=4")
    assert "all 4 steps are done; for more of them raise trainer.steps\nwrote" in capsys.readouterr().out
    cut = [*ROWS[:2], ((2, 2, 8), (9, 10, 63))]
    for changed in (cut, ROWS[:2]):
        monkeypatch.setattr("hocket.extras.stages.sft.load_demonstrations", lambda *_, now=changed: sequences(now))
        with pytest.raises(DataError, match="can't resume: the demonstrations were"):
            run(model, tmp_path, *settings, "trainer.steps=5")


def test_the_output_replaces_a_model_but_nothing_else(model: str, rows: list[Any], tmp_path: Path) -> None:
    output = tmp_path / "run" / "model"
    output.mkdir(parents=True)
    (output / "thesis.txt").touch()
    with pytest.raises(ConfigError, match="is not a model"):
        run(model, tmp_path, "trainer.steps=2")
    assert (output / "thesis.txt").exists()
    (output / "thesis.txt").rename(output / "config.json")
    run(model, tmp_path, "trainer.steps=2")
    assert math.isfinite(cross_entropy(output))


@pytest.mark.usefixtures("rows")
@pytest.mark.parametrize("has_gpu", [False, True])
def test_a_stage_uses_freed_memory_again_on_cpus_alone(
    has_gpu: bool, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: has_gpu)
    keep = Mock()
    monkeypatch.setattr("hocket.common.machine.keep_freed_memory", keep)
    monkeypatch.setattr(driver, "_load", lambda *_, **__: ([], []))
    monkeypatch.setattr(driver, "_train", lambda *_: None)
    driver.run(stages.make_config("sft", model, tmp_path), "sft")
    assert keep.call_count == (not has_gpu)
