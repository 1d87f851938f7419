"""What the tests of stages build and read in common."""

import contextlib
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from hocket import config as config_module
from hocket.config import DataConfig
from hocket.extras.stages import driver
from hocket.extras.stages.preferences import Preference
from hocket.observe.run_folder import RunFolder
from support.training import sequence


def make_pairs(count: int) -> list[Preference]:
    """Returns pairs behind prompts of nine tokens: the chosen ones have low tokens, the rejected ones high ones."""
    rng = random.Random(count)

    def side(prompt: list[int], low: int) -> Any:
        return sequence([*prompt, *(rng.randrange(low, low + 30) for _ in range(rng.randint(1, 6))), 63], 9)

    prompts = [[rng.randrange(62) for _ in range(9)] for _ in range(count)]
    return [
        Preference(chosen=side(prompt, 0), rejected=side(prompt, 30), margin=number / 10)
        for number, prompt in enumerate(prompts)
    ]


def patch_rows(monkeypatch: pytest.MonkeyPatch, pairs: Sequence[Preference]) -> None:
    def load_preferences(data: DataConfig, tokenizer: Any, max_length: int, **more: Any) -> list[Preference]:
        return list(pairs[: data.limit])

    for stage in ("dpo", "rm"):
        monkeypatch.setattr(f"hocket.extras.stages.{stage}.load_preferences", load_preferences)


def make_config(stage: str, model: str, tmp_path: Path, *settings: str) -> config_module.Config:
    defaults = ("model.dtype=float32", f"{stage}.batch_size=6", "trainer.learning_rate=3e-3")
    places = (
        f"run.dir={tmp_path / 'run'}",
        f"model.path={model}",
        "data.source=rows.jsonl",
        "data.chat_template=false",
    )
    return config_module.load(None, [*defaults, *places, *settings])


def run(stage: str, model: str, tmp_path: Path, *settings: str) -> list[dict[str, Any]]:
    """Runs a stage and returns the records of its steps."""
    config = make_config(stage, model, tmp_path, *settings)
    driver.run(config, stage)
    return records_of(config.run_dir)


def records_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def weights_of(run: Path) -> bytes:
    (file,) = (run / "model").glob("*.safetensors")
    return file.read_bytes()


@contextlib.contextmanager
def stopped(monkeypatch: pytest.MonkeyPatch, at: int) -> Iterator[None]:
    """Ends the run in the body behind a step, before its checkpoint."""
    record = RunFolder.finish

    def stop(self: RunFolder, step: int, metrics: Any) -> None:
        record(self, step, metrics)
        if step == at:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        patch.setattr(RunFolder, "finish", stop)
        yield
        raise AssertionError("the run was not stopped")


def assert_goes_on(
    stage: str, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *settings: str, at: int
) -> list[dict[str, Any]]:
    """Asserts that a run which is stopped behind a step and goes on ends as one that is not; returns its records."""
    straight = run(stage, model, tmp_path, *settings, f"run.dir={tmp_path}/straight")
    with stopped(monkeypatch, at):
        run(stage, model, tmp_path, *settings, "checkpoint.resume=true")
    resumed = run(stage, model, tmp_path, *settings, "checkpoint.resume=true")
    assert weights_of(tmp_path / "run") == weights_of(tmp_path / "straight")
    for name in ("step", "train/loss", "eval/loss"):
        assert [record.get(name) for record in resumed] == [record.get(name) for record in straight]
    return resumed
