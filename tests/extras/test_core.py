"""The core trains where extras/ is deleted, and any extra can be deleted alone."""

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hocket.observe.rows import lines_of
from hocket.types import Group, Prompt, Rollout, Score, TokenSequence
from support.processes import ROOT, START_S, Command

pytestmark = pytest.mark.e2e

EXTRAS = ROOT / "src" / "hocket" / "extras"
UNITS = sorted(
    path.relative_to(EXTRAS).as_posix()
    for path in EXTRAS.iterdir()
    if (path.suffix == ".py" or (path / "__init__.py").exists()) and path.name != "__init__.py"
)
"""What can be deleted: a file, or a folder."""

SETTINGS = ["trainer.steps=2", "eval.num_prompts=0", "data.limit=8"]
IMPORTED = """
import importlib, pkgutil, sys

source, run, recorded, *settings = sys.argv[1:]
for name in [name for name in sys.modules if name.partition(".")[0] == "hocket"]:
    del sys.modules[name]
sys.path.insert(0, source)
import hocket

assert hocket.__file__.startswith(source)
for module in pkgutil.walk_packages(hocket.__path__, "hocket."):
    if module.name != "hocket.server.worker":  # it ends with the process that has started an engine
        importlib.import_module(module.name)
import unittest.mock
from hocket.server.app import assemble

assemble(unittest.mock.MagicMock(), host="127.0.0.1", token=None)
from hocket.commands.runs import train
from hocket.config import load

config = load("config/quickstart.yaml", [*settings, f"run.dir={run}", f"pipeline.replay={recorded}"])
"""
TRAINS = f"{IMPORTED}\nsys.exit(train(config))\n"
SHOWS_HELP_AND_TRIES = f"""{IMPORTED}
from hocket.commands.cli import main
from hocket.commands.command import COMMANDS

for name in sorted(COMMANDS.names):
    try:
        main([name, "--help"])
    except SystemExit as ended:
        assert ended.code == 0, name
sys.exit(train(config, dry_run=True))
"""
TEXT = """
import sys
from hocket.commands.runs import train
from hocket.config import load

run, recorded, *settings = sys.argv[1:]
train(load("config/quickstart.yaml", [*settings, f"run.dir={run}", f"pipeline.replay={recorded}"]))
seen = [name for name in sys.modules if name.startswith("hocket.") and name.endswith(".vision")]
sys.exit(" ".join(seen) or 0)
"""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that has played two steps."""
    folder = tmp_path_factory.mktemp("recorded")
    (folder / "rollouts").mkdir()
    for step in (1, 2):
        groups = []
        for number in range(2):
            prompt = Prompt(id=f"p{number}", token_ids=(5, 6, 7), text="?", answer="a")
            rollouts = []
            for index in range(4):
                tokens = (5, 6, 7, 8 + index, 20 + step)
                mask = (False, False, False, True, True)
                sequence = TokenSequence(token_ids=tokens, mask=mask, logprobs=(0.0, 0.0, 0.0, -3.0, -3.0), text="a")
                rollouts.append(Rollout(id=f"step {step}/{number}/{index}", prompt=prompt, sequences=(sequence,)))
            scores = tuple(Score(total=float(index % 2), parts={"exact_match": index % 2}) for index in range(4))
            groups.append(Group(id=f"step {step}/{number}", rollouts=tuple(rollouts), scores=scores))
        (folder / "rollouts" / f"step_{step:06d}.jsonl").write_text(lines_of(groups))
    return folder


def run_with(source: Path, code: str, recorded: Path, folder: Path) -> None:
    """Runs a program with the package in `source` in place of hocket's own."""
    (folder / "left.py").write_text(code)
    words = [str(source), str(folder / "run"), str(recorded), *SETTINGS]
    with Command(words, folder / "log", program=[str(folder / "left.py")]) as process:
        assert process.wait_end() == 0, process.output()


def copied(folder: Path, *deleted: str) -> Path:
    """Copies the package without some of extras/; "" is all of it. Returns where the copy is found."""
    source = folder / "src"
    shutil.copytree(ROOT / "src" / "hocket", source / "hocket", ignore=shutil.ignore_patterns("__pycache__"))
    for name in deleted:
        path = source / "hocket" / "extras" / name
        path.unlink() if path.is_file() else shutil.rmtree(path)
    return source


def test_without_extras_the_package_is_imported_serves_and_trains(recorded: Path, tmp_path: Path) -> None:
    run_with(copied(tmp_path, ""), TRAINS, recorded, tmp_path)
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [step.get("train/updates") for step in metrics] == [None, 1.0, 1.0]
    assert min(step["train/grad_norm"] for step in metrics[1:]) > 0


def users_of(unit: str) -> set[str]:
    """Returns the units whose modules can't be imported without this one."""
    module = f"hocket.extras.{unit.removesuffix('.py')}"
    found = set()
    for file in EXTRAS.rglob("*.py"):
        own = file.relative_to(EXTRAS).parts[0]
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ImportFrom) and own != unit:
                names = {f"{node.module}.", *(f"{node.module}.{alias.name}." for alias in node.names)}
                if any(name.startswith(f"{module}.") for name in names):
                    found.add(own)
    return found


def test_few_extras_need_another_one() -> None:
    needed = {unit: users for unit in UNITS if (users := users_of(unit))}
    assert needed == {"agents": {"verifiers"}, "http_reward": {"judge.py"}}


@pytest.mark.long
@pytest.mark.parametrize("unit", UNITS)
def test_without_one_extra_the_others_are_imported_show_their_help_and_dry_run(
    unit: str, recorded: Path, tmp_path: Path
) -> None:
    run_with(copied(tmp_path, unit, *users_of(unit)), SHOWS_HELP_AND_TRIES, recorded, tmp_path)


@pytest.mark.long
def test_the_core_s_own_tests_and_three_steps_of_the_quickstart_pass_without_extras(tmp_path: Path) -> None:
    variables = os.environ | {"TMPDIR": str(tmp_path)}
    command = [sys.executable, "run.py", "test", "--core"]
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=10 * START_S)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-1000:]


@pytest.mark.long
def test_a_text_run_has_imported_nothing_of_images(recorded: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", TEXT, str(tmp_path / "run"), str(recorded), *SETTINGS]  # Command's have all
    variables = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=START_S)
    assert done.returncode == 0, done.stderr
