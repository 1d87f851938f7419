"""How the suite is shared out where it runs in several processes (`run.py test` does so)."""

from pathlib import Path

import pytest

LONGEST = ("server", "trainer", "e2e", "faults")
"""Folders that are begun first, so that no process is left with a long one at the end."""
TOGETHER = ("server",)
"""Folders whose files share engines, each of which takes half a minute to start."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keeps the tests of a file, or of a folder with costly fixtures, in one process."""
    if config.getoption("dist", "no") == "no":
        return
    root = Path(__file__).parent

    def folder(item: pytest.Item) -> str:
        return item.path.relative_to(root).parts[0]

    items.sort(key=lambda item: LONGEST.index(folder(item)) if folder(item) in LONGEST else len(LONGEST))
    for item in items:
        name = folder(item) if folder(item) in TOGETHER else str(item.path)
        item.add_marker(pytest.mark.xdist_group(name))
