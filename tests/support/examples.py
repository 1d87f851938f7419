"""The examples that docstrings show, run as plugins."""

import contextlib
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from hocket.common.registry import Registry, load_plugin


def shown(module: ModuleType, begins: str) -> str:
    """Returns the block of code in a module's documentation whose first line begins so."""
    assert module.__file__ is not None
    text = Path(module.__file__).read_text(encoding="utf-8")
    found = re.search(rf"^( +){re.escape(begins)}.*\n((\1.*)?\n)+", text, re.M)
    assert found is not None, begins
    return textwrap.dedent(found[0])


@contextlib.contextmanager
def plugged(folder: Path, code: str, *names: tuple[Registry, str]) -> Iterator[ModuleType]:
    """Loads a file with this code as a plugin; at the end the registries forget what it has registered."""
    file = folder / f"{names[0][1]}.py"
    file.write_text(code, encoding="utf-8")
    try:
        yield load_plugin(str(file))
    finally:
        for registry, name in names:
            registry.forget(name)
