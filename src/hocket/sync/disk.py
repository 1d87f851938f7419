"""Weight hand-over through a folder that both sides see: write → verify → notify → acknowledge.

The receiving half is `/reload_weights` in server/engine.py and server/worker.py. A version is a complete Hugging Face
model in a folder of its own: written under a temporary name, flushed to disk, read back for its manifest, marked
COMPLETE and renamed. The server answers with the checksum of the tensors that went into its model; any other checksum
than the manifest's is an error.
"""

import dataclasses
import shutil
import time
from pathlib import Path
from typing import Protocol

from hocket import manifest
from hocket.config import Config
from hocket.errors import ServerError, SyncError
from hocket.protocol import ReloadResponse
from hocket.system import flush


class Exporter(Protocol):
    """What publishing needs of the trainer."""

    def export(self, folder: Path) -> None:
        """Writes the current weights as a Hugging Face model."""


class Receiver(Protocol):
    """What publishing needs of a server."""

    url: str

    async def reload_weights(self, version: int, name: str, *, timeout_s: float) -> ReloadResponse:
        """Has the server load the published folder and returns what it then holds."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A version that every server has acknowledged; times in seconds."""

    version: int
    folder: Path
    checksum: str
    num_bytes: int
    write_s: float
    load_s: float


class DiskSync:
    """Publishes weight versions below the run folder and removes old ones.

    Args:
        config: `run.dir`, `sync.root`, `sync.keep` and `sync.timeout_s` are used.
    """

    def __init__(self, config: Config) -> None:
        self._root = config.sync_root.resolve()
        self._folder = config.run_dir.resolve() / "weights"
        self._keep = config.sync.keep
        self._timeout_s = config.sync.timeout_s

    async def publish(self, trainer: Exporter, version: int, server: Receiver) -> Published:
        """Writes the trainer's weights as `version`, has the server load them and checks what it then holds.

        Raises:
            SyncError: the version could not be written, was refused, or the server holds something else.
        """
        start = time.perf_counter()
        folder = self._folder / f"v{version:06d}"
        try:
            written, num_bytes = self._write(trainer, version, folder)
        except OSError as error:
            raise SyncError(
                f"can't write weight version {version} to {folder}: {error}. Free space there, or set run.dir"
            ) from error
        loading = time.perf_counter()
        name = folder.relative_to(self._root).as_posix()
        try:
            answer = await server.reload_weights(version, name, timeout_s=self._timeout_s)
        except ServerError as error:
            raise SyncError(f"weight version {version} did not reach {server.url}: {error}") from error
        if (answer.version, answer.checksum) != (version, written):
            raise SyncError(
                f"{server.url} holds version {answer.version} with checksum {answer.checksum}, but version {version} "
                f"with checksum {written} was published. Do both sides see the same {self._root}, and is this its only "
                f"trainer?"
            )
        self._prune()
        return Published(
            version=version,
            folder=folder,
            checksum=written,
            num_bytes=num_bytes,
            write_s=loading - start,
            load_s=time.perf_counter() - loading,
        )

    def _write(self, trainer: Exporter, version: int, folder: Path) -> tuple[str, int]:
        if folder.exists():
            raise SyncError(f"{folder} exists already; two trainers must not share run.dir")
        partial = folder.with_name(f".{folder.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        try:
            trainer.export(partial)
            made = manifest.build(version, manifest.tensors(partial))
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
        for old in versions[: -self._keep]:
            # Renamed first: no server may take half a folder for a version.
            gone = old.with_name(f".{old.name}.partial")
            old.rename(gone)
            shutil.rmtree(gone)
