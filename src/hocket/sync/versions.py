"""Number weight versions, and write them to folders such as weights/v000012.

A folder holds a Hugging Face model, or a PEFT adapter. Its manifest describes the tensors in
memory, so that a server also notices what went wrong on writing.
"""

import contextlib
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from safetensors import SafetensorError

from hocket.common.files import atomic_folder, numbered, remove_folder
from hocket.errors import SyncError, remedy
from hocket.protocol import TensorSpec, manifest

if TYPE_CHECKING:
    from hocket.trainer.trainer import Trainer

KINDS = ("weights", "deltas")  # subfolders of a run that hold versions
KEEP = 2  # versions of each kind that are kept, as servers may be loading them


class WrittenVersion(NamedTuple):
    """A version in a folder, as the trainer has written it."""

    version: int
    folder: Path
    checksum: str
    num_bytes: int
    kind: str = "disk"  # kind of the source, which tells servers how to load it
    metrics: Mapping[str, float] = MappingProxyType({})


class Versions:
    """The versions of a run."""

    def __init__(self, run_dir: Path, trainer: "Trainer") -> None:
        self.trainer = trainer
        self.current = 0  # the newest version's number, also that of a process before a resume
        self._has_started = False  # whether `start_above` has chosen this process's first number
        self._run_dir = run_dir.resolve()
        self._full: WrittenVersion | None = None  # the last version that was written in full

    def start_above(self, held: int) -> None:
        """Choose this process's first number: above the run's and `held`, the servers' highest.

        Later calls do nothing.
        """
        if not self._has_started:
            self._has_started = True
            self.current = max(held, self.current) + 1

    def state(self) -> dict[str, int]:
        """Make the state for a checkpoint; `restore` continues from it."""
        return {"version": self.current}

    def restore(self, state: Mapping[str, int]) -> None:
        """Continue after a saved version; remove newer ones."""
        self.current = state["version"]
        for kind in KINDS:
            for version, folder in numbered(self._run_dir / kind, "v*").items():
                if version > self.current:
                    shutil.rmtree(folder)

    def save(self) -> Path:
        """Write the current version in full, unless it has been. Returns its folder."""
        folder = self.path("weights", self.current)
        return folder if folder.exists() else self.full(self.current).folder

    def path(self, kind: str, version: int) -> Path:
        """Name the folder of a version."""
        return self._run_dir / kind / f"v{version:06d}"

    def full(self, version: int) -> WrittenVersion:
        """Write the weights in full, once. Raises SyncError."""
        if self._full is None or self._full.version != version:
            self._full = self.write("weights", version, self.trainer.export)
        return self._full

    def write(
        self, kind: str, version: int, fill: Callable[[Path], Mapping[str, TensorSpec]]
    ) -> WrittenVersion:
        """Write a version: `fill` writes the files and returns their specs. Raises SyncError.

        The folder appears under its name only once it is complete.
        """
        folder = self.path(kind, version)
        if folder.exists():
            raise SyncError(f"{folder} exists already; two trainers must not share run.dir")
        try:
            with atomic_folder(folder) as partial:
                checksum = manifest.write(partial, version, fill(partial))
                num_bytes = sum(path.stat().st_size for path in partial.iterdir())
        except (OSError, SafetensorError) as error:
            advice = f"{remedy(error) or 'is the disk well?'}; or set another run.dir"
            message = f"can't write weight version {version} to {folder}: {error}; {advice}"
            raise SyncError(message) from error
        return WrittenVersion(version, folder, checksum, num_bytes)

    def write_again(self, written: WrittenVersion) -> WrittenVersion | None:
        """Write a version in full, if it was not, or if its files are damaged. Raises SyncError.

        Returns the full version, or None where it was in full and its files are sound.
        """
        if written is self._full:
            if self._is_sound(written):
                return None
            shutil.rmtree(written.folder, ignore_errors=True)
            self._full = None
        return self.full(written.version)

    def _is_sound(self, written: WrittenVersion) -> bool:
        try:
            specs = manifest.specs(manifest.tensors(written.folder))
        except (OSError, SafetensorError):
            return False
        return manifest.total_checksum(specs) == written.checksum

    def check(self, written: WrittenVersion) -> None:
        """Raise SyncError unless the files hold what was written to them."""
        if not self._is_sound(written):
            raise SyncError(
                f"{written.folder} does not hold the weights that were written to it: something "
                "has changed its files, or the disk is failing. Set another run.dir"
            )

    def prune(self) -> None:
        """Remove all versions of each kind but the newest KEEP."""
        for kind in KINDS:
            folders = list(numbered(self._run_dir / kind, "v*").values())  # oldest first
            for folder in folders[:-KEEP]:
                with contextlib.suppress(OSError):  # the next version tries it again
                    remove_folder(folder)
