"""The page of what users may import: its examples are files that work as they stand."""

import ast
import inspect
import re
from pathlib import Path

import pytest

import reference
from hocket.common.registry import Registry, load_plugin

PAGE = (reference.FOLDER / "python_api.md").read_text(encoding="utf-8")
CODES = re.findall(r"^Example.*?\n\n```python\n(.*?)```", PAGE, re.M | re.S)
EXAMPLES = [code for code in CODES if '"runs/' not in code]  # the others need a run, or train


@pytest.mark.parametrize("code", EXAMPLES, ids=range(len(EXAMPLES)))
def test_an_example_is_a_file_that_can_be_imported(code: str, tmp_path: Path) -> None:
    file = tmp_path / "example.py"
    file.write_text(code, encoding="utf-8")
    names = {name for pair in re.findall(r'\("(\w+)"|^def (\w+)', code, re.M) for name in pair if name}
    # Another test may have left a plugin of the same name.
    kept = [(registry, name) for registry in Registry.every for name in names & registry.items.keys()]
    values = [registry.items.pop(name) for registry, name in kept]
    load_plugin(str(file))
    added = [(registry, name) for registry in Registry.every for name in names & registry.items.keys()]
    for registry, name in added:
        registry.forget(name)
    for (registry, name), value in zip(kept, values, strict=True):
        registry.items[name] = value
    assert added or "@" not in code


def test_every_decorator_has_an_example_and_every_object_a_sentence() -> None:
    assert len(EXAMPLES) > 20
    decorators = re.findall(r"^### (\S+)\n\n```python\n(?:def [^`]*?-> Decorator|\w+\.register)", PAGE, re.M | re.S)
    shown = {node.id for code in CODES for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name)}
    assert [name for name in decorators if name.rpartition(".")[2] not in shown] == []
    for part in PAGE.split("\n### ")[1:]:
        text = re.sub(r"^```.*?^```\n", "", part.partition("\n")[2], flags=re.M | re.S).strip()
        assert re.match(r"[A-Z`].*\.(\s|$)", text, re.S), part


def test_the_arguments_that_a_docstring_lists_are_those_of_the_function() -> None:
    for path in (name for names in reference.PYTHON.values() for name in names):
        item = reference.item_of(path)
        listed = re.findall(r"^Args:\n(.*?)(?:\n\n|\Z)", inspect.getdoc(item) or "", re.M | re.S)
        if listed and inspect.isfunction(item):
            names = re.findall(r"^    (\w+): ", listed[0], re.M)
            assert names == list(inspect.signature(item).parameters), path
