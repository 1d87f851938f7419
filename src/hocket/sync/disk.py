"""Number the weight versions of a run and write them below its folder: weights/v000012 in full, deltas/v000012.

A full version is a Hugging Face model, or a PEFT adapter. Its manifest is of the tensors in the trainer's memory: a
server also notices what went wrong on writing. A delta has such a manifest, but only what changed (protocol/delta.py).
"""

import contextlib
import dataclasses
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError

from hocket.common.files import atomic_folder, remove_folder
from hocket.config import SyncConfig
from hocket.errors import SyncError, remedy
from hocket.protocol import TensorSpec, delta, manifest, weight_group

FULL_EVERY = 50  # versions; the others are deltas with sync.delta
KEEP = 2  # newest versions of each kind that stay on the disk: servers may be loading those

if TYPE_CHECKING:
    from hocket.trainer.trainer import Trainer


@dataclasses.dataclass(frozen=True, slots=True)
class WrittenVersion:
    """A version in a folder."""

    version: int
    folder: Path
    checksum: str
    num_bytes: int
    changed: float | None = None  # a delta's share of elements whose bits differ from the previous version


class Versions:
    """Number the versions of a run, over resumes and used servers; write them below `run_dir`, and remove old ones."""

    def __init__(self, run_dir: Path, trainer: "Trainer", sync: SyncConfig) -> None:
        self.current = 0  # the last one, also of before the run was resumed; 0 before the first
        self._begun = False  # whether it is one of this process
        self._run_dir = run_dir.resolve()
        self._trainer = trainer
        self._sync = sync
        self._full: WrittenVersion | None = None
        self._base: WrittenVersion | None = None  # what the next delta changes,
        self._last: dict[str, torch.Tensor] = {}  # and its tensors, on the CPU

    def begin(self, held: int) -> None:
        """Choose the number of the first version: above those that the run published and a server holds."""
        if not self._begun:
            self.current = max(held, self.current)
            self.advance()

    def advance(self) -> None:
        """Go to the next version."""
        self._begun = True
        self.current += 1

    def save(self) -> Path:
        """Return the folder with the current version as a complete model; write it if it is not there."""
        folder = self._folder("weights", self.current)
        return folder if folder.exists() else self.full(self.current).folder

    def state(self) -> dict[str, int]:
        return {"version": self.current}

    def restore(self, state: Mapping[str, int]) -> None:
        """Continue after a saved version; newer ones, of steps that are taken again, are removed from the disk."""
        self.current = state["version"]
        for folder in [*self._run_dir.glob("weights/v*"), *self._run_dir.glob("deltas/v*")]:
            if int(folder.name[1:]) > self.current:
                shutil.rmtree(folder)

    def full(self, version: int) -> WrittenVersion:
        """Write the trainer's weights in full, unless that is the last full version. Raises SyncError."""
        if self._full is not None and self._full.version == version:
            return self._full
        keep = self._sync.delta and (self._base is None or self._base.version != version)
        if keep:
            self._last, self._base = {}, None

        def fill(folder: Path) -> Mapping[str, TensorSpec]:
            specs = self._trainer.export(folder)
            if keep:  # copies: what was read may still be the file
                self._last = {name: tensor.clone() for name, tensor in manifest.tensors(folder)}
            return specs

        self._full = self._write("weights", version, fill)
        if keep:
            self._base = self._full
        return self._full

    def delta(self, version: int) -> WrittenVersion | None:
        """Write what changed since the previous version; return None where this one must be sent in full."""
        base = self._base
        if base is None or version % FULL_EVERY == 0:
            return None
        if base.version == version:
            return base if base.changed is not None else None
        self._base = None  # a failure leaves tensors of both versions
        changes: dict[str, delta.Change] = {}

        def sink(named: Iterable[tuple[str, torch.Tensor]]) -> None:
            for name, tensor in named:
                new = tensor.to("cpu", copy=True).contiguous()  # the bucket is used again for the next one
                changes[name] = delta.encode(self._last[name], new)
                self._last[name] = new

        def fill(folder: Path) -> Mapping[str, TensorSpec]:
            self._trainer.stream(weight_group.BUCKET_BYTES, sink)
            delta.save(changes, folder)
            return manifest.specs(self._last.items())

        written = self._write("deltas", version, fill, base=base.checksum)
        count = sum(change.num_changed for change in changes.values())
        self._base = dataclasses.replace(written, changed=count / sum(map(torch.numel, self._last.values())))
        return self._base

    def _folder(self, kind: str, version: int) -> Path:
        return self._run_dir / kind / f"v{version:06d}"

    def _write(
        self, kind: str, version: int, fill: Callable[[Path], Mapping[str, TensorSpec]], base: str | None = None
    ) -> WrittenVersion:
        folder = self._folder(kind, version)
        if folder.exists():
            raise SyncError(f"{folder} exists already; two trainers must not share run.dir")
        try:
            with atomic_folder(folder) as partial:
                checksum = manifest.write(partial, version, fill(partial), base=base)
                num_bytes = sum(path.stat().st_size for path in partial.iterdir())
        except (OSError, SafetensorError) as error:
            advice = f"{remedy(error) or 'is the disk well?'}; or set another run.dir"
            raise SyncError(f"can't write weight version {version} to {folder}: {error}; {advice}") from error
        return WrittenVersion(version, folder, checksum, num_bytes)

    def mended(self, written: WrittenVersion) -> WrittenVersion | None:
        """Return a full version in place of a delta, or of files that were hurt; None if nothing is wrong with it."""
        if written.changed is None:
            with contextlib.suppress(SyncError):
                self.check(written)
                return None
            shutil.rmtree(written.folder, ignore_errors=True)
            self._full = None
        return self.full(written.version)

    def check(self, written: WrittenVersion) -> None:
        """Raise SyncError unless the files of a full version hold the weights that were written to them."""
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
        """Remove all but the newest folders of both kinds."""
        for kind in ("weights", "deltas"):
            for old in sorted(self._run_dir.glob(f"{kind}/v*"))[:-KEEP]:
                with contextlib.suppress(OSError):  # it is tried again after the next version
                    remove_folder(old)
