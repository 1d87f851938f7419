"""Each optional feature of docs/architecture.md can be carried out by its one door: what is left trains."""

import ast
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from hocket.observe.run_folder import lines_of
from hocket.types import Group, Prompt, Rollout, Score, TokenSequence
from processes import ROOT, Command

pytestmark = pytest.mark.e2e

PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").partition("## Doors")[2]
ROWS = re.findall(r"^\| (\w.*?) \| (`.+?`) \| ([\d,]+) \| `(\S+)` \|$", PAGE, re.M)
FEATURES = {name: (re.findall(r"`(\S+)`", files), door) for name, files, _, door in ROWS}
NAMES = list(FEATURES)

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
from hocket.commands.runs import train
from hocket.config import load

steps = ["trainer.steps=2", "eval.num_prompts=0", "data.limit=8", f"run.dir={run}", f"pipeline.replay={recorded}"]
sys.exit(train(load("config/quickstart.yaml", steps)))
"""


def without(text: str, gone: set[str]) -> str:
    """Returns a module without what it takes from modules that are gone: imports, table entries, calls, functions."""
    tree, lines = ast.parse(text), text.splitlines()
    names: set[str] = set()
    cuts: list[tuple[int, int, list[str]]] = []  # first and last line, and what stands there instead

    def takes(node: ast.AST) -> bool:
        return any(
            (isinstance(one, ast.Name) and one.id in names)
            or (isinstance(one, ast.ImportFrom) and any(map(is_gone, origins(one))))
            or (isinstance(one, ast.Constant) and one.value in gone)
            for one in ast.walk(node)
        )

    def origins(node: ast.ImportFrom) -> list[str]:
        return [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]

    def is_gone(module: str) -> bool:
        return module in gone

    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            lost = [a for a in node.names if node.module in gone or f"{node.module}.{a.name}" in gone]
            names |= {alias.asname or alias.name for alias in lost}
            kept = [ast.unparse(alias) for alias in node.names if alias not in lost]
            if lost:
                instead = [f"from {node.module} import {', '.join(kept)}"] if kept else []
                cuts.append((node.lineno, node.end_lineno or 0, instead))
        elif isinstance(node, ast.FunctionDef) and takes(node):
            first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
            cuts.append((first, node.end_lineno or 0, []))
        elif isinstance(node, ast.Assign | ast.AnnAssign) and takes(node.value or node):
            cuts += entries(node.value, takes)
        elif isinstance(node, ast.ClassDef):
            calls = [one for one in ast.walk(node) if isinstance(one, ast.Expr) and takes(one)]
            cuts += [(one.lineno, one.end_lineno or 0, []) for one in calls]
    for first, last, instead in sorted(cuts, reverse=True):
        lines[first - 1 : last] = instead
    return "\n".join(lines) + "\n"


def entries(table: ast.expr | None, takes: object) -> Iterator[tuple[int, int, list[str]]]:
    """Yields the lines of a table's entries that are to go; each entry has lines of its own."""
    assert callable(takes)
    if isinstance(table, ast.Dict):
        pairs = [(key, value) for key, value in zip(table.keys, table.values, strict=True) if takes(value)]
        yield from ((key.lineno, value.end_lineno or 0, []) for key, value in pairs if key is not None)
    elif isinstance(table, ast.Call):
        yield from ((one.lineno, one.end_lineno or 0, []) for one in table.keywords if takes(one.value))
    elif isinstance(table, ast.Tuple | ast.List):
        yield from ((one.lineno, one.end_lineno or 0, []) for one in table.elts if takes(one))


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


@pytest.mark.parametrize("feature", NAMES)
def test_what_is_left_without_a_feature_is_imported_and_trains(feature: str, recorded: Path, tmp_path: Path) -> None:
    files, door = FEATURES[feature]
    source = tmp_path / "src"
    shutil.copytree(ROOT / "src" / "hocket", source / "hocket", ignore=shutil.ignore_patterns("__pycache__"))
    gone = set()
    for file in files:
        (source / "hocket" / file).unlink()
        gone.add("hocket." + file.removesuffix(".py").replace("/", "."))
    opened = source / "hocket" / door
    text = opened.read_text(encoding="utf-8")
    opened.write_text(without(text, gone), encoding="utf-8")
    assert opened.read_text(encoding="utf-8") != text
    (tmp_path / "left.py").write_text(LEFT)
    words = [str(source), str(tmp_path / "run"), str(recorded)]
    with Command(words, tmp_path / "log", program=[str(tmp_path / "left.py")]) as process:
        assert process.wait_end() == 0, process.output()
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [step.get("train/updates") for step in metrics] == [None, 1.0, 1.0]
    assert min(step["train/grad_norm"] for step in metrics[1:]) > 0


def test_every_row_names_files_that_are_there_with_their_size() -> None:
    assert len(ROWS) == len(FEATURES) > 0
    for name, files, told, door in ROWS:
        paths = [ROOT / "src" / "hocket" / file for file in re.findall(r"`(\S+)`", files)]
        lines = [line.strip() for path in paths for line in path.read_text(encoding="utf-8").splitlines()]
        assert abs(sum(map(len, lines)) / int(told.replace(",", "")) - 1) < 0.1, name
        assert (ROOT / "src" / "hocket" / door).exists()


def test_taking_out_leaves_the_other_entries_imports_and_statements() -> None:
    table = "T = (\n    x,\n    z,\n)\n"
    module = f"from a import x, y as z\n{table}\n\nclass C:\n    def f(self):\n        z.g()\n        x()\n"
    left = "from a import x\nT = (\n    x,\n)\n\n\nclass C:\n    def f(self):\n        x()\n"
    assert without(module, {"a.y"}) == left
