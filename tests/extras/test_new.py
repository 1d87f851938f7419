"""The command new: a project that is whole, of its own, and never written over another."""

import subprocess
import sys
from pathlib import Path

import pytest

from hocket import config
from hocket.commands.cli import main
from hocket.extras.new import FILES


def test_a_project_has_all_files_and_names_only_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["new", "mine"]) == 0
    project = tmp_path / "mine"
    assert {path.name for path in project.iterdir()} == FILES.keys()
    assert [name for name in FILES if "own_everything" in (project / name).read_text()] == []
    printed = capsys.readouterr().out
    assert [name for name in FILES if f"  {name} " not in printed] == []
    monkeypatch.chdir(project)
    loaded = config.load("config.yaml")
    assert (loaded.run.dir, loaded.plugins) == ("runs/mine", ("reward.py",))
    subprocess.run([sys.executable, "test_reward.py"], check=True, timeout=60, env={"PYTHONPATH": ":".join(sys.path)})


def test_a_folder_with_something_in_it_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").mkdir()
    assert main(["new", f"{tmp_path}/mine"]) == 0  # empty
    assert main(["new", f"{tmp_path}/mine"]) == 1
    assert "is there and not empty: name a new folder" in capsys.readouterr().err
