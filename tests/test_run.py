"""The door itself, in a process of its own, as people start it."""

import argparse
import importlib
import importlib.util
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

from hocket.commands import cli
from hocket.common import environment

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def door(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    spec = importlib.util.spec_from_file_location("door", ROOT / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(*args: str, cwd: Path = ROOT, python: tuple[str, ...] = ("-S", "-E")) -> subprocess.CompletedProcess[str]:
    """Starts run.py; -S leaves every third-party package out of reach."""
    return subprocess.run(
        [sys.executable, *python, str(ROOT / "run.py"), *args], capture_output=True, text=True, timeout=120, cwd=cwd
    )


def commands_of_the_parser() -> set[str]:
    (commands,) = (action for action in cli._parser([])._actions if isinstance(action, argparse._SubParsersAction))
    return set(commands.choices)


@pytest.mark.parametrize("args", [[], ["--help"], ["-h"]])
def test_help_lists_every_command_without_any_package(args: list[str], tmp_path: Path) -> None:
    answer = run(*args, cwd=tmp_path)
    assert answer.returncode == 0
    listed = {line.split()[0] for line in answer.stdout.splitlines() if line.startswith("  ") and line.strip()}
    assert listed == {"install", "test", *commands_of_the_parser()}


@pytest.mark.parametrize("args", [["quikstart"], ["--steps"], ["--local_rank=0"]])
def test_what_is_no_command_is_refused_and_installs_nothing(args: list[str], tmp_path: Path) -> None:
    answer = run(*args, cwd=tmp_path)
    assert answer.returncode == 2
    assert ("did you mean 'quickstart'?" in answer.stderr) == (args == ["quikstart"])


def test_an_old_python_is_refused_with_the_reason(
    door: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 10, 9))
    assert door.main(["serve"]) == 1
    assert "vLLM needs Python 3.11 or newer" in capsys.readouterr().err


def test_children_find_the_source_and_the_environments_programs(
    door: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "prefix", "/env")
    monkeypatch.setattr(sys, "base_prefix", "/usr")
    os.environ["PYTHONPATH"] = f"/mine{os.pathsep}{ROOT / 'src'}"
    os.environ["PATH"] = "/usr/bin"
    os.environ["TOKENIZERS_PARALLELISM"] = "true"  # a user's own value wins
    for _ in range(2):
        door._find_source()
        environment.prepare()
    assert os.environ["PYTHONPATH"] == f"{ROOT / 'src'}{os.pathsep}/mine"
    assert os.environ["TOKENIZERS_PARALLELISM"] == "true"
    assert os.environ["PATH"] == f"/env/bin{os.pathsep}/usr/bin"


def test_the_test_command_runs_the_suite_with_its_arguments(door: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[list[str]] = []
    monkeypatch.setattr("hocket.common.environment.ensure", lambda command, **how: None)
    monkeypatch.setattr("suite.main", lambda argv: given.append(argv) or 3)
    assert door.main(["test", "--rest", "-k", "resume"]) == 3
    assert given == [["--rest", "-k", "resume"]]


@pytest.mark.parametrize(
    ("args", "status"),
    [
        (["config", "trainer.steps=3"], 0),
        (["config", "trainer.stepz=3"], 1),
        (["--local_rank=0", "config", "trainer.steps=3"], 0),  # DeepSpeed's launcher puts its word first
    ],
)
def test_a_command_is_started_and_its_exit_status_passed_on(args: list[str], status: int, tmp_path: Path) -> None:
    answer = run(*args, cwd=tmp_path, python=())
    assert answer.returncode == status, answer.stderr
    assert ("steps: 3" in answer.stdout) == (status == 0)


def test_the_installed_command_and_its_files_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    module, function = project["project"]["scripts"]["hocket"].split(":")
    assert callable(getattr(importlib.import_module(module), function))
    for name in project["tool"]["setuptools"]["package-data"]["hocket"]:
        if not name.startswith("extras/"):  # which may be deleted
            check_data(name)


def check_data(name: str) -> None:
    """Checks that there are files which a pattern of package-data names."""
    assert any(path.is_file() for path in (ROOT / "src" / "hocket").glob(name))
