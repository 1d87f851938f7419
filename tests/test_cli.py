"""The command line in a process of its own: help without heavy imports, errors without tracebacks."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import hocket
from hocket.cli import main


@pytest.mark.parametrize("command", sorted({*hocket.COMMANDS} - {"test"}))
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert f"run.py {command}" in out
    assert ("section.key=value" in out) == (command not in ("ledger", "doctor"))


def test_export_takes_two_folders_and_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    from hocket.trainer import lora

    asked: list[object] = []
    monkeypatch.setattr(lora, "merge", lambda *args, base: asked.append((*map(str, args), base)))
    assert main(["export", "runs/a/weights/v000002", "out"]) == 0
    assert main(["export", "runs/a/weights/v000002", "out", "model.path=elsewhere"]) == 0
    assert asked == [("runs/a/weights/v000002", "out", None), ("runs/a/weights/v000002", "out", "elsewhere")]


def test_the_ledger_balances_or_names_who_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "checkpoints" / "step_000003"  # a replay has checkpoints, too, but no draws
    folder.mkdir(parents=True)
    (folder / "COMPLETE").touch()
    for path in (tmp_path, tmp_path / "elsewhere"):
        assert main(["ledger", str(path)]) == 1
        assert capsys.readouterr().err.startswith(f"error: {path} is no run with a ledger")
    draws = [{"step": 1, "draw": i, "epoch": i, "prompt": "a", "state": "trained"} for i in range(2)]
    lines = [{"step": 0, "num_prompts": 2}, *draws]
    (tmp_path / "ledger.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    prompts = {"epoch": 1, "num_prompts": 2, "in_flight": [{"draw": 5, "epoch": 0, "prompt": "b"}], "entries": []}
    saved = {"step": 3, "config": {}, "metrics": {}, "trainer": {}, "parts": {"prompts": prompts}}
    (folder / "state.json").write_text(json.dumps(saved))
    assert main(["ledger", str(tmp_path)]) == 0
    table = ["epoch 0: 2 prompts", "         1  trained", "         1  in flight"]
    assert capsys.readouterr().out.splitlines()[:3] == table
    shutil.rmtree(folder)  # now nothing tells where b is
    (tmp_path / "summary.json").touch()
    assert main(["ledger", str(tmp_path)]) == 1
    assert "epoch 0: 1 prompts are not accounted for: never named\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["config", "nowhere.yaml"], "can't read the config nowhere.yaml"),
        (["config", "a.yaml", "b.yaml"], "one config file at most"),
        (["train", "plugins=[nowhere.py]"], "plugin 'nowhere.py' is not a"),
        (["rollout", "run.dir=HERE"], "holds a run already; choose another run.dir"),
        (["generate", "-p", "a", "-n", "0"], "can't be asked for: Input should be greater than or equal to 1"),
    ],
)
def test_a_mistake_is_one_line_and_status_1(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "metrics.jsonl").touch()
    assert main([arg.replace("HERE", str(tmp_path)) for arg in args]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert "Traceback" not in error


def test_an_interrupt_while_the_process_exits_changes_nothing() -> None:
    code = (
        "import atexit, os, runpy, signal, sys, time\n"
        "atexit.register(lambda: (os.kill(os.getpid(), signal.SIGINT), time.sleep(0.1)))\n"
        "sys.argv = ['hocket', 'config', 'trainer.steps=0']; runpy.run_module('hocket', run_name='__main__')"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env={"PYTHONPATH": "src"}
    )
    assert result.returncode == 1
    assert result.stderr.startswith("error: ")
    assert "Traceback" not in result.stderr
