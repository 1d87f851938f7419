"""Which checkpoints there are: when one is due, what is kept, what a kill leaves, and what a run may go on from."""

import json
import os
import signal
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from hocket import config as config_module
from hocket.config import Config
from hocket.errors import ConfigError, TrainerError
from hocket.protocol import manifest
from hocket.trainer import checkpoints
from hocket.trainer.checkpoints import Checkpoints
from hocket.trainer.state import SavedTensors
from support.examples import shown


class CountedSteps:
    """Its state is two buckets of the number of steps that it was told of."""

    steps = 0

    def state(self, sink: Callable[[Mapping[str, Any]], None]) -> dict[str, Any]:
        sink({"a": torch.full((2,), float(self.steps))})
        sink({"b": torch.full((3,), -float(self.steps))})
        return {"updates": self.steps}


class CountedPart:
    def __init__(self) -> None:
        self.value = 0

    def state(self) -> dict[str, int]:
        return {"value": self.value}

    def restore(self, state: Mapping[str, int]) -> None:
        self.value = state["value"]


def make_config(tmp_path: Path, *settings: str) -> Config:
    return config_module.load(None, [f"run.dir={tmp_path}/runs/a", "trainer.steps=10", *settings])


def train(config: Config, last: int = 0, **metrics: list[float]) -> CountedPart:
    """Takes the steps after `last`; the part's value is 10 times the step."""
    trainer, part = CountedSteps(), CountedPart()
    with Checkpoints(config, trainer.state, {"part": part}, newest=last) as kept:
        for step in range(last + 1, config.trainer.steps + 1):
            trainer.steps = step
            kept.copy(step, last=step == config.trainer.steps)
            trainer.steps = 99  # what happens later is no part of the copy
            part.value = 10 * step
            kept.complete(step, {name: values[step - 1] for name, values in metrics.items()})
    return part


def test_the_example_of_the_documentation_writes_those_that_are_due(tmp_path: Path) -> None:
    variables: dict[str, Any] = {
        "Checkpoints": Checkpoints,
        "config": make_config(tmp_path, "checkpoint.every_steps=2", "checkpoint.keep=9"),
        "trainer": Mock(state=CountedSteps().state, step=lambda samples: {}),
        "prompts": CountedPart(),
        "steps": 5,
        "samples": [],
    }
    exec(shown(checkpoints, "with Checkpoints(config"), variables)
    assert names(variables["config"]) == ["step_000002", "step_000004", "step_000005"]


def names(config: Config) -> list[str]:
    return sorted(path.name for path in (config.run_dir / "checkpoints").iterdir())


def found_step(config: Config, say: Callable[[str], object] = print) -> int:
    """Returns the step of the checkpoint that the run goes on from."""
    found = checkpoints.find(config, say)
    assert found is not None
    return found.step


def test_a_checkpoint_leaves_out_metrics_that_were_not_finite(tmp_path: Path) -> None:
    """NaN of a step, and None, as which metrics.jsonl has it."""
    config = make_config(tmp_path, "checkpoint.every_steps=1", "trainer.steps=1")
    with Checkpoints(config, CountedSteps().state, {}, newest=0) as kept:
        kept.copy(1, last=True)
        kept.complete(1, {"a": 0.5, "b": float("nan"), "c": None})
    state = json.loads((config.run_dir / "checkpoints" / "step_000001" / checkpoints.STATE_FILE).read_text())
    assert state["metrics"] == {"a": 0.5}


@pytest.mark.parametrize("background", ["false", "true"])
def test_a_checkpoint_is_the_state_after_its_step(tmp_path: Path, background: str) -> None:
    config = make_config(tmp_path, "checkpoint.every_steps=4", f"checkpoint.async={background}")
    train(config, loss=[float(step) for step in range(1, 10)] + [float("nan")])
    assert names(config) == ["step_000008", "step_000010"]  # 4 is older than the two that are kept
    folder = config.run_dir / "checkpoints" / "step_000008"
    tensors = SavedTensors(folder)
    assert (tensors.read("a").tolist(), tensors.read("b").tolist()) == ([8.0] * 2, [-8.0] * 3)
    saved = checkpoints.read(folder)
    assert (saved.step, saved.metrics, saved.trainer) == (8, {"loss": 8.0}, {"updates": 8})
    part = CountedPart()
    saved.restore({"part": part})
    assert part.value == 80
    assert checkpoints.read(folder.with_name("step_000010")).metrics == {}  # nan is none


def test_a_due_step_that_was_not_trained_is_made_up_for_and_what_a_killed_writer_left_goes(tmp_path: Path) -> None:
    config = make_config(tmp_path, "checkpoint.every_steps=3", "checkpoint.keep=9")
    half = config.run_dir / "checkpoints" / ".step_000004.partial"
    half.mkdir(parents=True)
    (half / "state_00000.safetensors").write_bytes(b"half")
    with Checkpoints(config, CountedSteps().state, {}) as kept:
        for step in range(1, 11):
            if step not in (3, 6, 7):  # no group had a signal
                kept.copy(step, last=step == 10)
            kept.complete(step, {})
    assert names(config) == ["step_000004", "step_000008", "step_000009", "step_000010"]


def test_there_may_be_none_and_without_resume_a_run_is_not_written_over(tmp_path: Path) -> None:
    train(make_config(tmp_path, "checkpoint.every_steps=0"))
    assert not (tmp_path / "runs").exists()
    assert checkpoints.find(make_config(tmp_path), print) is None
    (tmp_path / "runs/a").mkdir(parents=True)
    metrics = tmp_path / "runs/a/metrics.jsonl"
    metrics.write_text('{"step": 0}\n{"step": 1}\n')
    none_kept = "holds a run of 1 steps already; choose another run.dir; it kept no checkpoint"
    with pytest.raises(ConfigError, match=none_kept):
        checkpoints.find(make_config(tmp_path), print)
    said: list[str] = []
    assert checkpoints.find(make_config(tmp_path, "checkpoint.resume=true"), said.append, dry_run=True) is None
    assert "the run begins again, and what is there is moved to" in said[0]
    assert [*(tmp_path / "runs/a").iterdir()] == [metrics]  # a dry run moves nothing
    metrics.unlink()
    train(make_config(tmp_path))
    with pytest.raises(ConfigError, match=r"holds a run of 10 steps already; .*checkpoint\.resume=true"):
        checkpoints.find(make_config(tmp_path), print)


@pytest.mark.parametrize("resume", ["false", "true"])
def test_a_run_that_fell_over_before_its_first_step_leaves_its_folder_to_the_next(tmp_path: Path, resume: str) -> None:
    config = make_config(tmp_path, f"checkpoint.resume={resume}")
    run, kept = config.run_dir, ("checkpoints/tiny/config.json", "rollouts/my_1.jsonl", "weights/own.bin", "trainer_id")
    left = ("rollouts/eval_000000.jsonl", "rollouts/step_000001.jsonl", "weights/v000001/COMPLETE", "report.html")
    more = ("ledger.jsonl", "metrics.jsonl", "trained/step_000001.jsonl", "skipped/step_000001.json")
    for name in (*kept, *left, *more):
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text('{"step": 0}\n')
    assert checkpoints.find(config, print) is None
    assert {str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()} == {*kept}


def test_in_the_background_training_goes_on_and_one_is_written_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(tmp_path, "checkpoint.every_steps=1", "checkpoint.async=true", "trainer.steps=2")
    gate, begun = threading.Event(), []

    def write(folder: Path, bucket: Mapping[str, Any]) -> None:
        begun.append(folder.name)
        assert gate.wait(60)

    monkeypatch.setattr("hocket.trainer.checkpoints.write_bucket", write)
    with Checkpoints(config, CountedSteps().state, {}) as kept:
        kept.copy(1)
        kept.complete(1, {})  # comes back while the file is being written
        assert names(config) == [".step_000001.partial"]
        second = threading.Thread(target=lambda: kept.copy(2))
        second.start()
        second.join(0.2)
        assert second.is_alive()  # the second copy waits for the first checkpoint
        gate.set()
        second.join(60)
        assert set(begun) == {".step_000001.partial"}
        assert names(config) == [".step_000002.partial", "step_000001"]
        kept.complete(2, {})
    assert names(config) == ["step_000001", "step_000002"]


@pytest.mark.parametrize("background", ["false", "true"])
def test_a_full_disk_is_heard_of_by_the_next_step_and_nothing_half_stays(
    tmp_path: Path, background: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(tmp_path, "checkpoint.every_steps=1", f"checkpoint.async={background}")
    train(make_config(tmp_path, "trainer.steps=1"))

    def full(folder: Path, bucket: Mapping[str, Any]) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hocket.trainer.checkpoints.write_bucket", full)
    with pytest.raises(TrainerError, match=r"No space left on device; free space there"):
        train(config, last=1)
    assert names(config) == ["step_000001"]


@pytest.mark.parametrize(("launched", "in_background"), [(False, "false"), (True, "true")])
def test_the_first_ctrl_c_ends_the_run_with_a_checkpoint_of_its_step_and_the_second_ends_it_at_once(
    launched: bool,
    in_background: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    number = signal.SIGUSR1 if launched else signal.SIGINT
    monkeypatch.setattr(checkpoints, "CTRL_C", number)
    state = CountedSteps.state
    config = make_config(tmp_path, f"checkpoint.async={in_background}")

    def press(self: CountedSteps, sink: Callable[[Mapping[str, Any]], None]) -> dict[str, Any]:
        for _ in range(self.steps - 2):
            os.kill(os.getpid(), number)
        return state(self, sink)

    before = signal.signal(number, signal.default_int_handler)
    try:
        config = make_config(tmp_path, "checkpoint.every_steps=3", f"checkpoint.async={in_background}")
        monkeypatch.setattr(CountedSteps, "state", press)
        with pytest.raises(KeyboardInterrupt):
            train(config)
        assert names(config) == ["step_000003"]
        assert checkpoints.read(config.run_dir / "checkpoints/step_000003").parts == {"part": {"value": 30}}
        assert signal.getsignal(number) is signal.default_int_handler
        with pytest.raises(KeyboardInterrupt):
            train(config, last=3)
        assert "step_000006" not in names(config)
        with (
            pytest.raises(KeyboardInterrupt),
            Checkpoints(make_config(tmp_path, "checkpoint.every_steps=0"), state, {}),
        ):
            os.kill(os.getpid(), number)
    finally:
        signal.signal(number, before)
    said = "interrupted: after this step at the latest the run ends, with a checkpoint; Ctrl-C again ends it now"
    assert capfd.readouterr().err.strip().splitlines() == [said, "", said]


def test_the_newest_complete_one_is_gone_on_from_and_changes_are_said(tmp_path: Path) -> None:
    train(make_config(tmp_path, "checkpoint.every_steps=4"))
    newest = tmp_path / "runs/a/checkpoints/step_000010"
    (newest / "COMPLETE").unlink()
    older = newest.with_name("step_000008") / "state.json"  # of a version without one of the settings
    state = json.loads(older.read_text())
    del state["config"]["model"]["max_length"], state["config"]["data"]
    older.write_text(json.dumps(state))
    checksum = manifest.total_checksum(manifest.specs(manifest.tensors(older.parent)), older.read_text())
    (older.parent / "COMPLETE").write_text(checksum)
    said: list[str] = []
    changes = ("trainer.steps=20", "server.urls=http://b:1", "trainer.learning_rate=1e-5")
    config = make_config(tmp_path, "checkpoint.every_steps=4", *changes, "checkpoint.resume=true")
    assert found_step(config, said.append) == 8
    assert said == [
        f"going on from {newest.with_name('step_000008')}; server.urls was [] and is ['http://b:1']; "
        "trainer.learning_rate was 'auto' and is 1e-05; trainer.steps was 10 and is 20"
    ]
    with pytest.raises(ConfigError, match="no complete checkpoint"):
        checkpoints.read(newest)


@pytest.mark.parametrize("file", ["state_00001.safetensors", "state_00000.safetensors", "state.json", "COMPLETE"])
def test_of_damaged_checkpoints_none_is_used_and_the_one_before_is(tmp_path: Path, file: str) -> None:
    train(make_config(tmp_path, "checkpoint.every_steps=4"))
    folders = [tmp_path / "runs/a/checkpoints" / name for name in ("step_000010", "step_000008")]
    said: list[str] = []
    config = make_config(tmp_path, "checkpoint.every_steps=4", "checkpoint.resume=true")
    for folder in folders:
        content = bytearray((folder / file).read_bytes())
        content[-4] ^= 1  # of a tensor the lowest bit of a number
        (folder / file).write_bytes(content)
        if folder == folders[0]:
            assert found_step(config, said.append) == 8
            assert said == [
                f"WARNING: {folder} is no complete checkpoint: something has changed its files, the disk is failing, "
                "or an earlier hocket wrote it. Remove it, or name another one; the one before is taken",
                f"going on from {folders[1]}",
            ]
    with pytest.raises(ConfigError, match="step_000008 is no complete checkpoint: something has changed its files"):
        checkpoints.find(config, said.append)


@pytest.mark.parametrize(("file", "content"), [("COMPLETE", ""), ("state.json", "[" * 100_000)])
def test_a_checkpoint_with_an_emptied_or_foreign_file_is_refused(tmp_path: Path, file: str, content: str) -> None:
    train(make_config(tmp_path, "trainer.steps=1"))
    folder = tmp_path / "runs/a/checkpoints/step_000001"
    assert checkpoints.read(folder).step == 1
    (folder / file).write_text(content)
    with pytest.raises(ConfigError, match="step_000001 is no complete checkpoint"):
        checkpoints.read(folder)


def test_folders_of_a_user_beside_checkpoints_are_none_and_stay(tmp_path: Path) -> None:
    train(make_config(tmp_path, "trainer.steps=2"))
    kept = tmp_path / "runs/a/checkpoints"
    for name in ("step_mine", "step_000001_copy"):
        (kept / name).mkdir()
        (kept / name / "COMPLETE").touch()
    config = make_config(tmp_path, "checkpoint.every_steps=1", "checkpoint.keep=1", "checkpoint.resume=true")
    assert found_step(config) == 2
    train(config, last=2)
    assert names(config) == ["step_000001_copy", "step_000010", "step_mine"]
    with pytest.raises(ConfigError, match="holds a run of 10 steps"):
        checkpoints.find(make_config(tmp_path), print)


def test_what_makes_it_another_run_is_refused_by_name(tmp_path: Path) -> None:
    train(make_config(tmp_path))
    for setting in ("trainer.seed=1", "model.path=elsewhere", "model.lora={}", "curriculum.low=0.1"):
        key = setting.partition("=")[0]  # the last one, an option, was not set before
        with pytest.raises(ConfigError, match=rf"can't go on from .*step_000010: {key} was .* another run"):
            checkpoints.find(make_config(tmp_path, setting, "checkpoint.resume=true"), print)
    with pytest.raises(ConfigError, match=r"it is of train; choose another run.dir; model.path=.*/runs/a names"):
        checkpoints.find(make_config(tmp_path, "checkpoint.resume=true"), print, command="sft")


def test_where_there_is_no_checkpoint_the_run_begins_again_and_nothing_is_lost(tmp_path: Path) -> None:
    config = make_config(tmp_path, "checkpoint.resume=true")
    said: list[str] = []
    assert checkpoints.find(config, said.append) is None
    assert said == []  # there was nothing
    for attempt, name in ((1, "aside"), (2, "aside-2")):
        (config.run_dir / "weights" / "v000001").mkdir(parents=True)
        (config.run_dir / "logs").mkdir(exist_ok=True)
        (config.run_dir / "metrics.jsonl").write_text(json.dumps({"step": attempt}))
        assert checkpoints.find(config, said.append) is None
        assert [path.name for path in config.run_dir.iterdir() if not path.name.startswith("aside")] == ["logs"]
        aside = config.run_dir / name
        assert json.loads((aside / "metrics.jsonl").read_text()) == {"step": attempt}
        assert (aside / "weights" / "v000001").is_dir()
        assert str(aside) in said[-1]


def test_the_best_one_stays_and_each_complete_one_is_passed_on_before_it_may_go(tmp_path: Path) -> None:
    config = make_config(tmp_path, "checkpoint.every_steps=2", "checkpoint.keep=1", "trainer.steps=8")
    passed: list[tuple[str, bool]] = []

    def slow(folder: Path) -> None:
        threading.Event().wait(0.05)
        passed.append((folder.name, (folder / "COMPLETE").exists()))

    trainer = CountedSteps()
    with Checkpoints(config, trainer.state, {}, after=[slow]) as kept:
        for step in range(1, 9):
            kept.copy(step)
            if step == 3:
                kept.copy(step, last=True)  # best evaluations have one at any step
                kept.copy(step, last=True)  # and one alone
                kept.kept = 3
            kept.complete(step, {})
    assert passed == [(f"step_00000{step}", True) for step in (2, 3, 4, 6, 8)]
    assert names(config) == ["step_000003", "step_000008"]


def test_what_a_part_fails_at_with_a_complete_checkpoint_ends_the_run(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        raise RuntimeError(f"no room for {folder.name}")

    config = config_module.load(None, [f"run.dir={tmp_path}/a", "checkpoint.every_steps=1"])
    written = Checkpoints(config, lambda sink: {}, {}, after=[fail])
    written.copy(1)
    written.complete(1, {})
    with pytest.raises(RuntimeError, match="no room for step_000001"):
        written.__exit__(None, None, None)
