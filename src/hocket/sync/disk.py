"""Weights through a folder that trainer and servers see.

The receiving half is `/reload_weights` in server/engine.py and server/worker.py. A version is a complete Hugging Face
model, or a PEFT adapter, in a folder of its own: written under a temporary name, flushed to disk, read back for its
manifest, marked COMPLETE and renamed.
"""

import asyncio
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from hocket import manifest
from hocket.client import ServerClient
from hocket.config import Config
from hocket.errors import HocketError, SyncError
from hocket.protocol import Content, DiskSource, ReloadRequest, ReloadResponse
from hocket.sync.delivery import Delivery
from hocket.system import flush


class Exporter(Protocol):
    """What publishing needs of the trainer."""

    def export(self, folder: Path) -> None:
        """Writes the current weights as a Hugging Face model, or those of the adapter, where there is one, as PEFT."""


class DiskTransport:
    """Writes weight versions below the run folder, has servers load them, and removes old ones.

    Args:
        config: `run.dir` and the sync section are used.
    """

    def __init__(self, config: Config, trainer: Exporter) -> None:
        self._root = config.sync_root.resolve()
        self._folder = config.run_dir.resolve() / "weights"
        self._config = config.sync
        self._trainer = trainer
        self._written: tuple[int, str, int] | None = None

    async def deliver(self, version: int, servers: Sequence[ServerClient]) -> Delivery:
        """Writes the version, unless it was the last to be written, and has all servers load it at the same time.

        Raises:
            SyncError: it could not be written.
        """
        start = time.perf_counter()
        folder = self.write(version)
        assert self._written is not None
        _, checksum, num_bytes = self._written
        written = time.perf_counter()
        source = DiskSource(name=folder.relative_to(self._root).as_posix())
        request = ReloadRequest(version=version, source=source, in_flight=self._config.in_flight)
        answers = await asyncio.gather(*(self._load(server, request) for server in servers))
        self._prune()
        return Delivery(
            checksum=checksum,
            num_bytes=num_bytes,
            prepare_s=written - start,
            transfer_s=time.perf_counter() - written,
            answers=tuple(answers),
        )

    def write(self, version: int) -> Path:
        """Writes the version, unless it was the last to be written, and returns its folder.

        Raises:
            SyncError: it could not be written.
        """
        folder = self._folder / f"v{version:06d}"
        if self._written is None or self._written[0] != version:
            try:
                self._written = (version, *self._write(version, folder))
            except OSError as error:
                raise SyncError(
                    f"can't write weight version {version} to {folder}: {error}. Free space there, or set run.dir"
                ) from error
        return folder

    async def _load(self, server: ServerClient, request: ReloadRequest) -> ReloadResponse | HocketError:
        try:
            return await server.reload_weights(request, timeout_s=self._config.timeout_s)
        except HocketError as error:
            return error

    def _write(self, version: int, folder: Path) -> tuple[str, int]:
        if folder.exists():
            raise SyncError(f"{folder} exists already; two trainers must not share run.dir")
        partial = folder.with_name(f".{folder.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        try:
            self._trainer.export(partial)
            content: Content = "adapter" if (partial / manifest.ADAPTER_FILE).is_file() else "weights"
            made = manifest.build(version, manifest.tensors(partial), content)
            (partial / manifest.MANIFEST_FILE).write_text(made.model_dump_json(indent=1), encoding="utf-8")
            (partial / manifest.COMPLETE_FILE).touch()
            files = sorted(partial.iterdir())
            for path in (*files, partial):
                flush(path)
            num_bytes = sum(path.stat().st_size for path in files)
            partial.rename(folder)
            flush(folder.parent)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        return made.checksum, num_bytes

    def _prune(self) -> None:
        versions = sorted(path for path in self._folder.iterdir() if path.name.startswith("v"))
        for old in versions[: -self._config.keep]:
            # Renamed first: no server may take half a folder for a version.
            gone = old.with_name(f".{old.name}.partial")
            old.rename(gone)
            shutil.rmtree(gone)
