"""The dry run of each stage: what it says and refuses, before weights are loaded and without a trace."""

from pathlib import Path
from unittest.mock import Mock

import pytest
from tests.extras.stages import runs as stages

from hocket.errors import ConfigError, TrainerError
from hocket.extras.stages import driver
from support.training import sequence


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven pairs, or five demonstrations of six tokens; a trainer, which loads weights, is an error."""
    stages.patch_rows(monkeypatch, stages.make_pairs(7))
    taught = [sequence([1, 2, 3, 4, 5, 63], 3, logprob=0.0)] * 5
    monkeypatch.setattr("hocket.extras.stages.sft.load_demonstrations", lambda data, *_: taught[: data.limit])
    monkeypatch.setattr(driver, "Trainer", Mock(side_effect=AssertionError("a trainer")))


@pytest.mark.parametrize(
    ("stage", "said"),
    [
        ("sft", "5 demonstrations, 2 held out"),
        ("sft", "sft.epochs decides: 2 steps of 3 demonstrations"),  # ceil(5 / 3)
        ("rm", "7 comparisons, 2 held out"),
        ("dpo", "dpo.epochs decides: 3 steps of 3 preferences"),  # ceil(7 / 3)
        ("dpo", "is for GRPO; preferences mostly take 5e-7 to 5e-6"),
    ],
)
@pytest.mark.usefixtures("rows")
def test_a_dry_run_says_what_a_stage_would_train_and_leaves_nothing(
    stage: str, said: str, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = stages.make_config(stage, model, tmp_path, f"{stage}.batch_size=3", f"{stage}.epochs=1")
    plain = values.trainer.model_copy(update={"learning_rate": "auto", "warmup_steps": 1000})
    held_out = values.eval.model_copy(update={"data": values.eval.data.model_copy(update={"source": "held.jsonl"})})
    held_out = held_out.model_copy(update={"num_prompts": 2})
    config = values.model_copy(update={"trainer": plain, "eval": held_out})
    driver.run(config, stage, dry_run=True)
    out = capsys.readouterr().out
    assert said in out
    assert "trainer.warmup_steps=1000 outlasts the " in out
    assert "nothing stands in the way of a run, as far as is seen without the weights\n" in out
    assert [path.name for path in config.run_dir.rglob("*") if path.name not in ("owner.json", "owner.lock")] == []


@pytest.mark.parametrize("stage", ["sft", "rm", "dpo"])
@pytest.mark.usefixtures("rows")
def test_a_dry_run_refuses_rows_that_no_micro_batch_holds_and_memory_that_is_not_there(
    stage: str, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = stages.make_config(stage, model, tmp_path, "trainer.micro_batch_tokens=4")
    with pytest.raises(TrainerError, match=r"fit into trainer\.micro_batch_tokens=4; set it to at least"):
        driver.run(config, stage, dry_run=True)
    monkeypatch.setattr("hocket.trainer.memory.available_bytes", lambda device: 1)
    with pytest.raises(ConfigError, match=r"a step needs about .* there are 0\.00"):
        driver.run(stages.make_config(stage, model, tmp_path), stage, dry_run=True)


@pytest.mark.parametrize("stage", ["sft", "rm", "dpo"])
@pytest.mark.usefixtures("rows")
def test_a_stage_refuses_to_keep_the_best_evaluation_which_it_would_ignore(
    stage: str, model: str, tmp_path: Path
) -> None:
    settings = ("checkpoint.best=eval/greedy", "eval.data.source=held.jsonl")
    config = stages.make_config(stage, model, tmp_path, *settings)
    with pytest.raises(ConfigError, match=rf"checkpoint\.best is for train: {stage} would keep nothing by it"):
        driver.run(config, stage, dry_run=True)
