"""Number weight versions, and write them to folders such as weights/v000012.

A folder holds a Hugging Face model, or a PEFT adapter. Its manifest describes the tensors in
memory, so that a server also notices what went wrong on writing. While a run with servers on this
machine trains, a folder may be a link to one in memory (sync/memory.py).
"""

import contextlib
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from safetensors import SafetensorError

from hocket.common.files import (
    atomic_folder,
    complete_folder,
    flush,
    is_in_memory,
    numbered,
    partial_of,
    remove_folder,
)
from hocket.errors import SyncError, remedy
from hocket.protocol import TensorSpec, manifest
from hocket.sync.memory import MemoryFolder

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

    def __init__(
        self, run_dir: Path, trainer: "Trainer", memory: MemoryFolder | None = None
    ) -> None:
        self.trainer = trainer
        self._memory = memory  # None: all versions go to the disk
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
                    _remove(folder)

    def save(self) -> Path:
        """Have the current version on the disk, in full. Returns its folder. Raises SyncError."""
        folder = self.path("weights", self.current)
        if not folder.exists():
            return self.full(self.current).folder
        if folder.is_symlink():
            try:
                _move_to_disk(folder)
            except OSError as error:
                raise SyncError(_unwritten(folder, error)) from error
        return folder

    def close(self) -> None:
        """Have the newest version on the disk, and give back the memory that versions take.

        After a failure, too: what was published last stays. If the disk is full, it stays in memory.
        """
        if self._memory is None:
            return
        folders = self._versions("weights")
        for link in folders:
            if not link.is_symlink():
                continue
            if link != folders[-1]:
                link.unlink()
                continue
            try:
                _move_to_disk(link)
            except OSError as error:
                self._memory.say(_unwritten(link, error))
                return
        self._memory.close()

    def _versions(self, kind: str) -> list[Path]:
        """List the versions of a kind, oldest first. Links to memory that is gone are removed."""
        folder = self._run_dir / kind
        for path in folder.glob("v*"):
            if path.is_symlink() and is_in_memory(path.resolve()) and not path.exists():
                path.unlink()
        return list(numbered(folder, "v*").values())

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
        place = self._place(folder, kind)
        try:
            with atomic_folder(place) as partial:
                checksum = manifest.write(partial, version, fill(partial))
                num_bytes = sum(path.stat().st_size for path in partial.iterdir())
            if place != folder:
                folder.symlink_to(place)
        except (OSError, SafetensorError) as error:
            if self._memory is not None and place != folder:
                self._memory.give_up(str(error))
                return self.write(kind, version, fill)
            advice = f"{remedy(error) or 'is the disk well?'}; or set another run.dir"
            message = f"can't write weight version {version} to {folder}: {error}; {advice}"
            raise SyncError(message) from error
        return WrittenVersion(version, folder, checksum, num_bytes)

    def _place(self, folder: Path, kind: str) -> Path:
        """Choose where a version is written: in memory, or in its folder of the run.

        The size of the version before says whether there is room: the first one goes to the disk.
        """
        older = self._versions(kind)  # this removes a link of the same name without its memory
        if self._memory is None or self._full is None or kind != "weights":
            return folder
        place = self._memory.place(folder.name, self._full.num_bytes)
        if place is None:
            return folder
        # The servers have loaded the newest one, and the memory of the others is needed.
        for path in older[:-1]:
            with contextlib.suppress(OSError):
                _remove(path)
        return place

    def write_again(self, written: WrittenVersion) -> WrittenVersion | None:
        """Write a version in full to the disk, if it was not, or if its files are damaged.

        Returns the full version, or None where it was there in full and its files are sound. Raises
        SyncError.
        """
        if written is self._full:
            is_sound = self._is_sound(written)
            if is_sound and not written.folder.is_symlink():
                return None
            if self._memory is not None:
                self._memory.give_up("a server could not load a version from there")
            with contextlib.suppress(FileNotFoundError):  # somebody has removed it
                _remove(written.folder)
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
            for folder in self._versions(kind)[:-KEEP]:
                with contextlib.suppress(OSError):  # the next version tries it again
                    _remove(folder)


def _remove(folder: Path) -> None:
    """Remove a version, and its memory where it is a link."""
    if folder.is_symlink():
        place = folder.resolve()
        folder.unlink()
        shutil.rmtree(place, ignore_errors=True)
    else:
        remove_folder(folder)


def _unwritten(link: Path, error: OSError) -> str:
    """Say where a version is that could not be written to the disk."""
    advice = remedy(error) or "is the disk well?"
    fact = f"the newest weights are in memory only, in {link.resolve()}: {error}; {advice}"
    return f"{fact}. Copy them before the next run, which frees this memory"


def _move_to_disk(link: Path) -> None:
    """Put a version that is in memory in the place of the link to it.

    Raises OSError, with the link and the memory as they were.
    """
    place = link.resolve()
    partial = partial_of(link)
    shutil.rmtree(partial, ignore_errors=True)
    try:
        shutil.copytree(place, partial)
        for file in partial.iterdir():
            flush(file)  # a disk may tell only now that it is full
    except OSError:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    link.unlink()
    complete_folder(link)
    shutil.rmtree(place, ignore_errors=True)
