"""Number the weight versions of a run, over resumes and servers that were used before."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from hocket.sync.disk import VersionFolders


@dataclasses.dataclass
class Versions:
    """Know the current weight version."""

    folders: VersionFolders
    current: int = 0  # 0 before the first version
    _before: int = 0  # the newest version that the run had published before it was resumed

    def begin(self, held: int) -> None:
        """Give the first version of all its number: above what the run published and what a server holds."""
        self.current = self.current or max(held, self._before) + 1

    def advance(self) -> None:
        """Go to the next version."""
        self.current = max(self.current, self._before) + 1

    def save(self) -> Path:
        """Return the folder with the current version as a complete model; write it if it is not there."""
        self.current = self.current or self._before
        return self.folders.full(self.current).folder

    def state(self) -> dict[str, int]:
        """Return the current version, ready for JSON."""
        return {"version": self.current}

    def restore(self, state: Mapping[str, int]) -> None:
        """Continue after a saved version; newer ones, of steps that are taken again, are removed from the disk."""
        self._before = state["version"]
        self.folders.remove_above(state["version"])
