"""Number weight versions and write them, as weights/v000012: Hugging Face models, or PEFT adapters.

The manifest is of the tensors in memory: a server also notices what went wrong on writing.
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

KINDS = ("weights", "deltas")
KEEP = 2  # of each kind: servers may be loading them


class WrittenVersion(NamedTuple):
    version: int
    folder: Path
    checksum: str
    num_bytes: int
    kind: str = "disk"  # of the source that says how to load it
    metrics: Mapping[str, float] = MappingProxyType({})


class Versions:
    """The versions of a run."""

    def __init__(self, run_dir: Path, trainer: "Trainer") -> None:
        self.trainer = trainer
        self.current = 0  # number; also before a resume
        self._begun = False  # `current` is of this process
        self._run_dir = run_dir.resolve()
        self._full: WrittenVersion | None = None

    def begin(self, held: int) -> None:
        """Set the first number above the run's and `held`, the servers' highest."""
        if not self._begun:
            self._begun = True
            self.current = max(held, self.current) + 1

    def state(self) -> dict[str, int]:
        return {"version": self.current}

    def restore(self, state: Mapping[str, int]) -> None:
        """Continue after a saved version; remove newer ones."""
        self.current = state["version"]
        for kind in KINDS:
            for version, folder in numbered(self._run_dir / kind, "v*").items():
                if version > self.current:
                    shutil.rmtree(folder)

    def save(self) -> Path:
        """Return the folder of the current version in full, written if need be."""
        folder = self.path("weights", self.current)
        return folder if folder.exists() else self.full(self.current).folder

    def path(self, kind: str, version: int) -> Path:
        return self._run_dir / kind / f"v{version:06d}"

    def full(self, version: int) -> WrittenVersion:
        """Write the weights in full, once. Raises SyncError."""
        if self._full is None or self._full.version != version:
            self._full = self.write("weights", version, self.trainer.export)
        return self._full

    def write(
        self, kind: str, version: int, fill: Callable[[Path], Mapping[str, TensorSpec]]
    ) -> WrittenVersion:
        """Write a version, whose specs `fill` returns. Raises SyncError."""
        folder = self.path(kind, version)
        if folder.exists():
            raise SyncError(f"{folder} exists already; two trainers must not share run.dir")
        try:
            with atomic_folder(folder) as partial:
                checksum = manifest.write(partial, version, fill(partial))
                num_bytes = sum(path.stat().st_size for path in partial.iterdir())
        except (OSError, SafetensorError) as error:
            advice = f"{remedy(error) or 'is the disk well?'}; or set another run.dir"
            raise SyncError(
                f"can't write weight version {version} to {folder}: {error}; {advice}"
            ) from error
        return WrittenVersion(version, folder, checksum, num_bytes)

    def mended(self, written: WrittenVersion) -> WrittenVersion | None:
        """Write a version in full, if it is not, or its files are damaged, and return it; None for a sound one."""
        if written is self._full:
            with contextlib.suppress(SyncError):
                self.check(written)
                return None
            shutil.rmtree(written.folder, ignore_errors=True)
            self._full = None
        return self.full(written.version)

    def check(self, written: WrittenVersion) -> None:
        """Raise SyncError unless the files hold what was written to them."""
        try:
            found = manifest.total_checksum(manifest.specs(manifest.tensors(written.folder)))
        except (OSError, SafetensorError) as error:
            found = str(error)
        if found != written.checksum:
            raise SyncError(
                f"{written.folder} does not hold the weights that were written to it: something has changed its files, "
                "or the disk is failing. Set another run.dir"
            )

    def prune(self) -> None:
        """Remove older versions of each kind."""
        for kind in KINDS:
            for old in [*numbered(self._run_dir / kind, "v*").values()][:-KEEP]:
                with contextlib.suppress(OSError):  # it is tried again
                    remove_folder(old)
