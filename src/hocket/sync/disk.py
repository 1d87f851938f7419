"""Write weight versions below the run folder: full ones in weights/v000012, deltas in deltas/v000012.

A full version is a complete Hugging Face model, or a PEFT adapter; its manifest is of the tensors in the trainer's
memory, so that a server also notices what went wrong while they were written. A delta has the manifest of the same
weights, but only the elements that changed since the previous version (hocket.delta).
"""

import dataclasses
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError

from hocket import delta, manifest
from hocket.config import SyncConfig
from hocket.errors import SyncError
from hocket.protocol import BaseVersion, Content, Manifest
from hocket.system import atomic_folder, remove_folder

FULL_EVERY = 50  # versions; the others are deltas with sync.delta

if TYPE_CHECKING:
    from hocket.trainer.trainer import Trainer


@dataclasses.dataclass(frozen=True, slots=True)
class WrittenVersion:
    """A version in a folder."""

    version: int
    folder: Path
    checksum: str
    num_bytes: int
    changed: float | None  # a delta's share of elements whose bits differ from the previous version


class VersionFolders:
    """Write weight versions, and remove old ones.

    Args:
        run_dir: versions lie below it.
        sync: delta, keep and bucket_mib are used.
    """

    def __init__(self, run_dir: Path, trainer: "Trainer", sync: SyncConfig) -> None:
        self._run_dir = run_dir.resolve()
        self._trainer = trainer
        self._sync = sync
        self._full: WrittenVersion | None = None
        self._delta: WrittenVersion | None = None
        self._base: BaseVersion | None = None  # what the next delta changes,
        self._last: dict[str, torch.Tensor] = {}  # and its tensors, on the CPU

    def full(self, version: int) -> WrittenVersion:
        """Write the trainer's weights as a full version, unless that is the last one written.

        Raises:
            SyncError: it could not be written.
        """
        if self._full is None or self._full.version != version:
            keep = self._sync.delta and (self._base is None or self._base.version != version)
            if keep:
                self._last, self._base = {}, None

            def fill(folder: Path) -> Manifest:
                specs = self._trainer.export(folder)
                content: Content = "adapter" if (folder / manifest.ADAPTER_FILE).is_file() else "weights"
                if keep:  # copies: what was read may still be the file
                    self._last = {name: tensor.clone() for name, tensor in manifest.tensors(folder)}
                checksum = manifest.total_checksum(specs)
                return Manifest(version=version, content=content, tensors=specs, checksum=checksum)

            self._full = self._write("weights", version, fill)
            if keep:
                self._base = BaseVersion(version=version, checksum=self._full.checksum)
        return self._full

    def delta(self, version: int) -> WrittenVersion | None:
        """Write what changed since the previous version; return None where this one must be sent in full.

        Raises:
            SyncError: it could not be written.
        """
        if self._delta is not None and self._delta.version == version:
            return self._delta
        base = self._base
        if base is None or base.version == version or version % FULL_EVERY == 0:
            return None
        self._base = None  # a failure leaves tensors of both versions
        changes: dict[str, delta.Change] = {}

        def sink(named: Iterable[tuple[str, torch.Tensor]]) -> None:
            for name, tensor in named:
                new = tensor.to("cpu", copy=True).contiguous()  # the bucket is used again for the next one
                changes[name] = delta.encode(self._last[name], new)
                self._last[name] = new

        def fill(folder: Path) -> Manifest:
            self._trainer.stream(self._sync.bucket_mib << 20, sink)
            delta.save(changes, folder)
            return manifest.build(version, self._last.items(), base=base)

        written = self._write("deltas", version, fill)
        count = sum(change.count for change in changes.values())
        self._delta = dataclasses.replace(written, changed=count / sum(map(torch.numel, self._last.values())))
        self._base = BaseVersion(version=version, checksum=written.checksum)
        return self._delta

    def _write(self, kind: str, version: int, fill: Callable[[Path], Manifest]) -> WrittenVersion:
        folder = self._run_dir / kind / f"v{version:06d}"
        if folder.exists():
            raise SyncError(f"{folder} exists already; two trainers must not share run.dir")
        try:
            with atomic_folder(folder) as partial:
                made = fill(partial)
                manifest.write(partial, made)
                num_bytes = sum(path.stat().st_size for path in partial.iterdir())
        except (OSError, SafetensorError) as error:
            raise SyncError(
                f"can't write weight version {version} to {folder}: {error}. Free space there, or set run.dir"
            ) from error
        return WrittenVersion(version, folder, made.checksum, num_bytes, changed=None)

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

    def prune(self) -> list[str]:
        """Remove all but the newest sync.keep folders of both kinds; return the reasons why one could not be removed.

        Servers may be loading: the newest delta is kept, and the newest full version, which it changes.
        """
        failures = []
        for parent in (self._run_dir / "weights", self._run_dir / "deltas"):
            for old in sorted(parent.glob("v*"))[: -self._sync.keep]:
                try:
                    remove_folder(old)
                except OSError as error:
                    failures.append(f"can't remove the old version {old}: {error}")
        return failures

    def remove_above(self, version: int) -> None:
        """Remove newer versions, of steps that a resumed run takes again."""
        for folder in [*self._run_dir.glob("weights/v*"), *self._run_dir.glob("deltas/v*")]:
            if int(folder.name[1:]) > version:
                shutil.rmtree(folder)
