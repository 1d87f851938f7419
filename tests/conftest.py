"""How the suite is shared out where it runs in several processes (`run.py test` does so)."""

from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent
LONGEST = ("server", "faults", "e2e", "trainer")
"""Folders that are begun first, so that no process is left with a long one at the end."""
TOGETHER = ("server",)
"""Folders whose files share engines, each of which takes half a minute to start."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keeps the tests of a file, or of a folder with costly fixtures, in one process."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = nodeid.partition("::")[0]
            return next((folder for folder in TOGETHER if path.startswith(f"tests/{folder}/")), path)

    return ByFile(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begins with what takes longest."""

    def rank(item: pytest.Item) -> int:
        folder = item.path.relative_to(ROOT).parts[0]
        return LONGEST.index(folder) if folder in LONGEST else len(LONGEST)

    if hasattr(config, "workerinput"):  # in one of several processes
        items.sort(key=rank)
