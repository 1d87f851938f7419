"""Optional features can be taken out, extras by deleting them, others of docs/architecture.md by their doors too."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest

from hocket.observe.rows import lines_of
from hocket.types import Group, Prompt, Rollout, Score, TokenSequence
from support.processes import ROOT, START_S, Command

pytestmark = pytest.mark.e2e

PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").partition("## Extras and doors")[2]
ROWS = re.findall(r"^\| (\w.*?) \| (`.+?`) \| ([\d,]+) \| (`.+?`) \|$", PAGE, re.M)
FEATURES = {name: tuple(re.findall(r"`(\S+?)`", both) for both in (files, doors)) for name, files, _, doors in ROWS}
NAMES = list(FEATURES)
NO_DOOR = ("__init__.py", "elsewhere.py", "flops.py", "page/__init__.py", "page/plugin_files.py")
"""Extras that the core imports itself, in ways that no door takes out (SEAMS_MISSING of test_contract.py)."""

LEFT = """
import importlib, pkgutil, sys

source, run, recorded = sys.argv[1:]
for name in [name for name in sys.modules if name.partition(".")[0] == "hocket"]:
    del sys.modules[name]
sys.path.insert(0, source)
import hocket

assert hocket.__file__.startswith(source)
for module in pkgutil.walk_packages(hocket.__path__, "hocket."):
    if module.name != "hocket.server.worker":  # it ends with the process that has started an engine
        importlib.import_module(module.name)
import unittest.mock
from fastapi import FastAPI
from hocket.server.app import assemble

assemble(FastAPI(), unittest.mock.MagicMock(), host="127.0.0.1", token=None)
from hocket.commands.runs import train
from hocket.config import load

steps = ["trainer.steps=2", "eval.num_prompts=0", "data.limit=8", f"run.dir={run}", f"pipeline.replay={recorded}"]
sys.exit(train(load("config/quickstart.yaml", steps)))
"""


TEXT = """
import sys
from hocket.commands.runs import train
from hocket.config import load

run, recorded = sys.argv[1:]
steps = ["trainer.steps=2", "eval.num_prompts=0", "data.limit=8", f"run.dir={run}", f"pipeline.replay={recorded}"]
train(load("config/quickstart.yaml", steps))
seen = [name for name in sys.modules if name.startswith("hocket.") and name.endswith(".vision")]
sys.exit(" ".join(seen) or 0)
"""


class Without(ast.NodeTransformer):
    """Takes out of a module what it has from modules that are gone: imports, table entries, statements, commands."""

    def __init__(self, gone: set[str]) -> None:
        self.gone = gone
        self.names: set[str] = set()  # that are gone with them
        self.known: set[str] = set()  # local names that have another value, too

    def takes(self, *nodes: ast.AST | None) -> bool:
        """Whether a node names what is gone."""
        found = (one for node in nodes if node is not None for one in ast.walk(node))
        return any(
            (isinstance(one, ast.Name) and one.id in self.names)
            or (isinstance(one, ast.Constant) and one.value in self.gone)
            for one in found
        )

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST | None:
        lost = [a for a in node.names if node.module in self.gone or f"{node.module}.{a.name}" in self.gone]
        self.names |= {alias.asname or alias.name for alias in lost}
        node.names = [alias for alias in node.names if alias not in lost]
        return node if node.names else None

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        node.bases = [base for base in node.bases if not self.takes(base)]
        node.body = self.left(node.body) or [ast.Pass()]
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST | None:
        names, known = set(self.names), set(self.known)
        if self.takes(node.args):
            return None
        imports = [one for one in node.body if isinstance(one, ast.ImportFrom)]
        body = self.left(node.body)
        self.names, self.known = names, known
        kept = [one for one in body if isinstance(one, ast.ImportFrom)]
        if node.decorator_list and (len(kept) < len(imports) or not body):
            return None  # a command, which is the feature
        node.body = body or [ast.Pass()]
        return node

    visit_AsyncFunctionDef = visit_FunctionDef  # type: ignore[assignment]  # noqa: N815

    def left(self, body: list[ast.stmt]) -> list[ast.stmt]:
        return [one for one in (self.visit(statement) for statement in body) if one is not None]

    def generic_visit(self, node: ast.AST) -> Any:
        if isinstance(node, ast.Module):
            node.body = self.left(node.body)
        elif isinstance(node, ast.If | ast.With | ast.AsyncWith | ast.For | ast.AsyncFor | ast.While | ast.Try):
            return self.block(node)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            return self.assignment(node)
        elif isinstance(node, ast.stmt) and self.takes(node):
            return None
        return node

    def block(self, node: Any) -> ast.AST | None:
        """Returns what is left of a block; without its header nothing is."""
        bodies = ("body", "orelse", "finalbody", "handlers")
        if self.takes(
            *(one for one in ast.iter_child_nodes(node) if not isinstance(one, ast.stmt | ast.ExceptHandler))
        ):
            return None
        node.body = self.left(node.body)
        for name in bodies[1:3]:
            if getattr(node, name, None):
                setattr(node, name, self.left(getattr(node, name)))
        if not node.body and not any(getattr(node, name, None) for name in bodies):
            return None
        node.body = node.body or [ast.Pass()]
        return cast(ast.AST, node)

    def assignment(self, node: ast.Assign | ast.AnnAssign) -> ast.AST | None:
        targets = {one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}
        value = node.value
        if isinstance(value, ast.Dict) and None not in value.keys:
            pairs = [(key, one) for key, one in zip(value.keys, value.values, strict=True) if not self.takes(one)]
            value.keys, value.values = [key for key, _ in pairs], [one for _, one in pairs]
        elif isinstance(value, ast.Tuple | ast.List):
            value.elts = [one for one in value.elts if not self.takes(one)]
        elif isinstance(value, ast.Call) and not self.takes(value.func):
            value.keywords = [one for one in value.keywords if not self.takes(one.value)]
        if self.takes(value):
            self.names |= targets - self.known
            return None
        self.known |= targets
        return node


def without(text: str, gone: set[str]) -> str:
    """Returns a module without what it takes from modules that are gone."""
    return ast.unparse(Without(gone).visit(ast.parse(text))) + "\n"


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


def carry_out(features: list[str], source: Path) -> None:
    """Makes a copy of the package without features: their files are gone, and what their doors have from them.

    Without all of them, those of extras/ that the core knows by name alone are gone, too.
    """
    shutil.copytree(ROOT / "src" / "hocket", source / "hocket", ignore=shutil.ignore_patterns("__pycache__"))
    files = {file for feature in features for file in FEATURES[feature][0]}
    doors = {door for feature in features for door in FEATURES[feature][1]} - files
    for file in files:
        (source / "hocket" / file).unlink()
    gone = {"hocket." + file.removesuffix(".py").replace("/", ".") for file in files}
    for door in doors:
        opened = source / "hocket" / door
        text = without(opened.read_text(encoding="utf-8"), set())
        opened.write_text(without(text, gone), encoding="utf-8")
        assert opened.read_text(encoding="utf-8") != text, door
    if features == NAMES:
        extras = source / "hocket" / "extras"
        for path in [*extras.rglob("*")]:
            if path.is_file() and str(path.relative_to(extras)) not in NO_DOOR:
                path.unlink()


ONE_BY_ONE = [pytest.param([name], id=name, marks=pytest.mark.long) for name in NAMES]


@pytest.mark.parametrize("features", [pytest.param(NAMES, id="all"), *ONE_BY_ONE])
def test_what_is_left_without_features_is_imported_and_trains(
    features: list[str], recorded: Path, tmp_path: Path
) -> None:
    source = tmp_path / "src"
    carry_out(features, source)
    (tmp_path / "left.py").write_text(LEFT)
    words = [str(source), str(tmp_path / "run"), str(recorded)]
    with Command(words, tmp_path / "log", program=[str(tmp_path / "left.py")]) as process:
        assert process.wait_end() == 0, process.output()
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [step.get("train/updates") for step in metrics] == [None, 1.0, 1.0]
    assert min(step["train/grad_norm"] for step in metrics[1:]) > 0


@pytest.mark.long
def test_a_text_run_has_imported_nothing_of_images(recorded: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", TEXT, str(tmp_path / "run"), str(recorded)]  # Command's have all imported
    variables = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=START_S)
    assert done.returncode == 0, done.stderr


@pytest.mark.long
def test_what_is_left_without_features_type_checks(tmp_path: Path) -> None:
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    cache = tmp_path / "cache"  # of the last check of ROOT, if there was one: a check of all files takes 20 s
    if (ROOT / ".mypy_cache").exists():
        shutil.copytree(ROOT / ".mypy_cache", cache)

    def mistakes() -> set[tuple[str, str]]:
        command = [sys.executable, "-m", "mypy", f"--cache-dir={cache}", "--hide-error-context", "src/hocket"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=START_S)
        assert done.returncode in (0, 1), done.stdout + done.stderr
        return set(re.findall(r"^(\S+?):\d+: error: (.*)$", done.stdout, re.M))

    copied = tmp_path / "src" / "hocket"
    shutil.copytree(ROOT / "src" / "hocket", copied, ignore=shutil.ignore_patterns("__pycache__"))
    for door in {door for _, doors in FEATURES.values() for door in doors}:
        text = without((copied / door).read_text(encoding="utf-8"), set())
        (copied / door).write_text(text, encoding="utf-8")
    known = mistakes()  # which comments allow, that the syntax tree has no more
    shutil.rmtree(tmp_path / "src")
    carry_out(NAMES, tmp_path / "src")
    assert mistakes() <= known


def test_every_row_names_files_that_are_there_with_their_size() -> None:
    assert len(ROWS) == len(FEATURES) > 0
    for name, files, told, doors in ROWS:
        paths = [ROOT / "src" / "hocket" / file for file in re.findall(r"`(\S+?)`", files)]
        lines = [line.strip() for path in paths for line in path.read_text(encoding="utf-8").splitlines()]
        assert abs(sum(map(len, lines)) / int(told.replace(",", "")) - 1) < 0.2, name
        assert all((ROOT / "src" / "hocket" / door).exists() for door in re.findall(r"`(\S+?)`", doors))


def test_taking_out_leaves_the_other_entries_imports_and_statements() -> None:
    module = """
from a import x, y as z
T = (x, z)
class C(x, z):
    def f(self):
        made = z.g()
        one = x()
        if made:
            made.h()
        elif one:
            one = z
            x()
        return one
@x
def command():
    return z()
"""
    left = """
from a import x
T = (x,)
class C(x):
    def f(self):
        one = x()
        return one
"""
    without_if = left.replace("        return", "        if one:\n            x()\n        return")
    assert (
        without(module.replace("if made", "if x").replace("made.h()", "pass"), {"a.y"})
        == ast.unparse(ast.parse(without_if.replace("if one:", "if x:\n            pass\n        elif one:"))) + "\n"
    )
    assert (
        without(module.replace("elif one:\n            one = z\n            x()\n", "\n"), {"a.y"})
        == ast.unparse(ast.parse(left)) + "\n"
    )
