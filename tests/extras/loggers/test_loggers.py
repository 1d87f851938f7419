"""What the tools read of what the loggers wrote: a resumed run as one, hostile text as text."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.observe.test_loggers import HOSTILE, fake, run  # noqa: F401

from hocket.errors import ConfigError
from hocket.observe import loggers
from hocket.observe.loggers import COLUMNS
from support.processes import ROOT, START_S


def needs(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    monkeypatch.setattr(loggers, "CLOSE_S", START_S)  # a busy machine takes minutes to import some of them


def test_tensorboard_reads_a_resumed_run_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs("tensorboard", monkeypatch)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run(tmp_path, "tensorboard", steps=range(4))
    run(tmp_path, "tensorboard", steps=range(2, 5))
    found = EventAccumulator(str(tmp_path / "runs/mine/tensorboard"))
    found.Reload()
    assert [(event.step, event.value) for event in found.Scalars("reward/mean")] == [(i, i / 8) for i in range(5)]
    texts = {name: found.Tensors(name)[-1].tensor_proto.string_val[0].decode() for name in found.Tags()["tensors"]}
    assert texts.keys() == {f"{name}/text_summary" for name in ("config", "rollouts", "eval/rollouts", "summary")}
    assert "<script>" not in texts["config/text_summary"]
    assert "&lt;script&gt;" in texts["config/text_summary"]
    assert "<code>m: so</code>" in texts["rollouts/text_summary"]


def test_wandb_reads_a_resumed_run_as_one_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs("wandb", monkeypatch)
    said: list[str] = []
    chosen = "[{name: wandb, mode: offline, project: tests}]"
    run(tmp_path, chosen, steps=range(4), say=said.append)
    run(tmp_path, chosen, steps=range(2, 5), say=said.append)
    parts = sorted((tmp_path / "runs/mine/wandb").glob("offline-run-*"), key=lambda path: path.stat().st_mtime)
    assert len(parts) == 2
    assert [line.removeprefix("logger wandb: ") for line in said] == [f"wandb sync {part}" for part in parts]
    ids = set()
    for part, steps in zip(parts, (range(4), range(2, 5)), strict=True):
        told = inspect(part)
        ids.add(told["run"]["id"] if isinstance(told.get("run"), dict) else told["run_id"])
        assert told["config"]["data"]["system_prompt"] == HOSTILE
        assert told["summary"]["reward/mean"] == steps[-1] / 8
        assert told["summary"]["run"]["steps"] == steps[-1]
    assert len(ids) == 1
    tables = [json.loads(path.read_text()) for path in parts[0].rglob("*.table.json")]
    assert {tuple(table["columns"]) for table in tables} == {COLUMNS}
    assert {len(table["data"]) for table in tables} == {2}


def inspect(part: Path) -> Any:
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--summary", "--json", str(part)]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=START_S).stdout)


def test_wandb_without_a_key_asks_nothing_and_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs("wandb", monkeypatch)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("WANDB_API_KEY", "WANDB_MODE", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    said: list[str] = []
    run(tmp_path, "wandb", say=said.append)
    assert said[0].startswith(
        "logger wandb can't be used, and the run goes on without it: it knows no key: type `wandb"
    )


def test_trackio_reads_a_resumed_run_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs("trackio", monkeypatch)
    code = """
import sys
from pathlib import Path
from tests.observe import test_loggers
folder = Path(sys.argv[1])
test_loggers.loggers.CLOSE_S = 300
test_loggers.run(folder, "trackio", steps=range(4))
test_loggers.run(folder, "trackio", steps=range(2, 5))
import json, trackio
from trackio.sqlite_storage import SQLiteStorage
(run,) = trackio.Api().runs("hocket")
rows = SQLiteStorage.get_logs("hocket", run.name, run_id=run.id)
print(json.dumps([run.name, run.config, rows], default=str))
"""
    paths = {
        "PYTHONPATH": ":".join(filter(None, [str(ROOT), *sys.path])),
        "TRACKIO_DIR": str(tmp_path / "t"),
    }
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=START_S,
        env={**paths, "HOME": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    name, config, rows = json.loads(done.stdout.splitlines()[-1])
    assert name.startswith("mine-")
    assert config["data"]["system_prompt"] == HOSTILE
    assert {row["step"]: row["reward/mean"] for row in rows if "reward/mean" in row} == {i: i / 8 for i in range(5)}
    (table, *_) = [row["rollouts"] for row in rows if "rollouts" in row]
    assert "m: so" in json.dumps(table)
    assert [row["summary/steps"] for row in rows if "summary/steps" in row] == [3, 4]


def test_mlflow_reads_a_resumed_run_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs("mlflow", monkeypatch)
    from mlflow import MlflowClient
    from mlflow.artifacts import load_dict

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    run(tmp_path, "mlflow", steps=range(4))
    run(tmp_path, "mlflow", steps=range(2, 5))
    client = MlflowClient(f"sqlite:///{tmp_path}/runs/mlflow.db")
    (one,) = client.search_runs([client.get_experiment_by_name("hocket").experiment_id])
    assert (one.info.run_name, one.info.status) == ("mine", "FINISHED")
    assert one.data.params["data.system_prompt"] == HOSTILE
    history = client.get_metric_history(one.info.run_id, "reward/mean")
    assert {point.step: point.value for point in history} == {step: step / 8 for step in range(5)}
    assert one.data.metrics["eval/pass_1"] == 0.5
    assert load_dict(f"{one.info.artifact_uri}/summary.json")["steps"] == 4
    table = load_dict(f"{one.info.artifact_uri}/rollouts/step_000001.json")
    assert table["columns"] == list(COLUMNS)
    assert len(table["data"]) == 2


def test_a_misspelt_logger_is_refused_before_the_run_with_the_known_ones(tmp_path: Path) -> None:
    said = r"no logger 'tensorbord' \(did you mean 'tensorboard'\?\); known: .*mlflow.*trackio, wandb"
    with pytest.raises(ConfigError, match=said):
        run(tmp_path, "tensorbord")


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize("fails", ["begin", "metrics"])
def test_a_run_has_its_report_though_a_logger_has_failed(fails: str, tmp_path: Path) -> None:
    run(tmp_path, f"[{{name: fake, fails: {fails}}}]", steps=range(10))
    assert (tmp_path / "runs/mine/report.html").exists()
