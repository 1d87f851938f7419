"""Number the weight versions of a run, and choose how they are written."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from hocket.config import SyncConfig
from hocket.sync.deltas import DeltaWriter
from hocket.sync.folders import Folders

if TYPE_CHECKING:
    from hocket.trainer.trainer import Trainer


class Versions(Folders):
    def __init__(self, run_dir: Path, trainer: "Trainer", sync: SyncConfig) -> None:
        super().__init__(run_dir, trainer)
        self.current = 0  # also of before the run was resumed
        self.first = self.full  # writes what servers are sent first
        if sync.backend == "delta":
            self.first = DeltaWriter(self).write
        self._begun = False  # whether it is one of this process

    def begin(self, held: int) -> None:
        """Set the first version's number above those of the run and of a server."""
        if not self._begun:
            self.current = max(held, self.current)
            self.advance()

    def advance(self) -> None:
        self._begun = True
        self.current += 1

    def save(self) -> Path:
        """Return the folder with the current version in full; write it if it is not there."""
        folder = self.path("weights", self.current)
        return folder if folder.exists() else self.full(self.current).folder

    def state(self) -> dict[str, int]:
        return {"version": self.current}

    def restore(self, state: Mapping[str, int]) -> None:
        """Continue after a saved version; remove newer ones."""
        self.current = state["version"]
        self.remove_above(self.current)
