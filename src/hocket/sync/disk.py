"""Weights through files: in a folder that trainer and servers see, or sent over HTTP.

The receiving half is `/reload_weights` in server/engine.py and server/worker.py, and `/upload` in server/uploads.py. A
version is a folder of its own: written under a temporary name, flushed to disk, marked COMPLETE and renamed.
weights/v000012 is a complete Hugging Face model, or a PEFT adapter, and its manifest is of the tensors in the trainer's
memory, so that a server also sees what went wrong while they were written; deltas/v000012 has the manifest of the same
weights, but only what changed in them since version 11 (hocket.delta). A server that can't use it gets the model.
"""

import asyncio
import dataclasses
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError

from hocket import delta, manifest
from hocket.client import ServerClient
from hocket.config import Config
from hocket.errors import HocketError, ServerError, SyncError
from hocket.protocol import BaseVersion, Content, DiskSource, Manifest, ReloadRequest, ReloadResponse, TensorSpec
from hocket.sync.delivery import Delivery
from hocket.system import flush, run_in_thread


class Exporter(Protocol):
    """What publishing needs of the trainer."""

    def export(self, folder: Path) -> dict[str, TensorSpec]:
        """Writes the current weights as a Hugging Face model, or those of the adapter, where there is one, as PEFT.

        Returns what they are in memory.
        """

    def stream(self, max_bytes: int, sink: Callable[..., None]) -> None:
        """Gives the current weights to `sink`, under the names of the exported ones."""


class DiskTransport:
    """Writes weight versions below the run folder, has servers load them, and removes old ones.

    Args:
        config: `run.dir` and the sync section are used.
    """

    def __init__(self, config: Config, trainer: Exporter) -> None:
        self._root = config.sync_root.resolve()
        self._weights = config.run_dir.resolve() / "weights"
        self._deltas = config.run_dir.resolve() / "deltas"
        self._config = config.sync
        self._trainer = trainer
        self._upload_name = secrets.token_hex(4)  # another trainer's versions have the same numbers
        self._full: _Written | None = None
        self._delta: _Written | None = None
        self._base: BaseVersion | None = None  # what the next delta changes,
        self._last: dict[str, torch.Tensor] = {}  # and its tensors, on the CPU

    async def deliver(self, version: int, servers: Sequence[ServerClient]) -> Delivery:
        """Writes the version, unless it was the last to be written, and has all servers load it at the same time.

        Raises:
            SyncError: it could not be written.
        """
        start = time.perf_counter()
        first = await run_in_thread(lambda: self._write_delta(version) or self._write_full(version))
        written = time.perf_counter()
        sent, notes = await asyncio.gather(self._send(first, servers), run_in_thread(self._prune))
        answers = dict(zip(servers, sent, strict=True))
        num_bytes = first.num_bytes * len(servers)
        refused = [server for server in servers if first is self._delta and _refused(answers[server])]
        if refused:
            notes += [f"version {version} goes to {server.url} in full: {answers[server]}" for server in refused]
            full = await run_in_thread(self._write_full, version)
            answers |= zip(refused, await self._send(full, refused), strict=True)
            num_bytes += full.num_bytes * len(refused)
        return Delivery(
            checksum=first.checksum,
            num_bytes=num_bytes // len(servers) if servers else first.num_bytes,
            prepare_s=written - start,
            transfer_s=time.perf_counter() - written,
            answers=tuple(answers.values()),
            changed=first.changed,
            notes=tuple(notes),
        )

    def write(self, version: int) -> Path:
        """Writes the version as a complete model, unless it was the last to be written, and returns its folder.

        Raises:
            SyncError: it could not be written.
        """
        return self._write_full(version).folder

    def remove_above(self, version: int) -> None:
        """Removes newer versions, of a run that goes on from before them."""
        for parent in (self._weights, self._deltas):
            for folder in parent.glob("v*"):
                if int(folder.name[1:]) > version:
                    shutil.rmtree(folder)

    async def _send(self, written: "_Written", servers: Sequence[ServerClient]) -> list[ReloadResponse | HocketError]:
        return await asyncio.gather(*(self._load(server, written) for server in servers))

    async def _load(self, server: ServerClient, written: "_Written") -> ReloadResponse | HocketError:
        timeout_s = self._config.timeout_s
        try:
            name = written.folder.relative_to(self._root).as_posix()
            if self._config.upload:
                name = "-".join((self._upload_name, *written.folder.parts[-2:]))
                name = await server.upload(written.folder, name, timeout_s=timeout_s)
            source = DiskSource(name=name)
            request = ReloadRequest(version=written.version, source=source, in_flight=self._config.in_flight)
            return await server.reload_weights(request, timeout_s=timeout_s)
        except HocketError as error:
            return error

    def _write_full(self, version: int) -> "_Written":
        if self._full is None or self._full.version != version:
            keep = self._config.delta and (self._base is None or self._base.version != version)
            if keep:
                self._last, self._base = {}, None

            def content(folder: Path) -> tuple[Manifest, None]:
                specs = self._trainer.export(folder)
                kind: Content = "adapter" if (folder / manifest.ADAPTER_FILE).is_file() else "weights"
                if keep:  # what was read may still be the file
                    self._last = {name: tensor.clone() for name, tensor in manifest.tensors(folder)}
                checksum = manifest.total_checksum(specs)
                return Manifest(version=version, content=kind, tensors=specs, checksum=checksum), None

            self._full = self._write(version, self._weights, content)
            if keep:
                self._base = BaseVersion(version=version, checksum=self._full.checksum)
        return self._full

    def _write_delta(self, version: int) -> "_Written | None":
        """Writes what changed since the version before, or returns None where this one is to be sent in full."""
        if self._delta is not None and self._delta.version == version:
            return self._delta
        base = self._base
        if base is None or base.version == version or version % self._config.full_every == 0:
            return None
        self._base = None  # a failure leaves tensors of both versions

        def content(folder: Path) -> tuple[Manifest, float]:
            changes: dict[str, delta.Change] = {}

            def sink(named: Iterable[tuple[str, torch.Tensor]]) -> None:
                for name, tensor in named:
                    new = tensor.to("cpu", copy=True).contiguous()  # the bucket holds only until the next one
                    changes[name] = delta.encode(self._last[name], new)
                    self._last[name] = new

            self._trainer.stream(self._config.bucket_mib << 20, sink)
            delta.save(changes, folder)
            count = sum(change.count for change in changes.values())
            return manifest.build(version, self._last.items(), base=base), count / sum(
                map(torch.numel, self._last.values())
            )

        self._delta = self._write(version, self._deltas, content)
        self._base = BaseVersion(version=version, checksum=self._delta.checksum)
        return self._delta

    def _write(
        self, version: int, parent: Path, content: Callable[[Path], tuple[Manifest, float | None]]
    ) -> "_Written":
        """Has `content` fill a folder and return its manifest, and publishes that.

        Raises:
            SyncError: it could not be written.
        """
        folder = parent / f"v{version:06d}"
        if folder.exists():
            raise SyncError(f"{folder} exists already; two trainers must not share run.dir")
        partial = folder.with_name(f".{folder.name}.partial")
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            made, changed = content(partial)
            (partial / manifest.MANIFEST_FILE).write_text(made.model_dump_json(indent=1), encoding="utf-8")
            (partial / manifest.COMPLETE_FILE).touch()
            files = sorted(partial.iterdir())
            for path in partial.glob("*.safetensors"):  # written for the owner only; the server may be another user
                shutil.copymode(partial / manifest.COMPLETE_FILE, path)
            for path in (*files, partial):
                flush(path)
            num_bytes = sum(path.stat().st_size for path in files)
            partial.rename(folder)
            flush(folder.parent)
        except BaseException as error:
            shutil.rmtree(partial, ignore_errors=True)
            if isinstance(error, OSError | SafetensorError):
                raise SyncError(
                    f"can't write weight version {version} to {folder}: {error}. Free space there, or set run.dir"
                ) from error
            raise
        return _Written(version, folder, made.checksum, num_bytes, changed)

    def _prune(self) -> list[str]:
        """Removes all but the newest folders of both kinds; returns what stood in the way.

        Servers may be loading: the newest delta, and what they change by it, the newest version in full, are kept.
        """
        notes = []
        for parent in filter(Path.is_dir, (self._weights, self._deltas)):
            versions = sorted(path for path in parent.iterdir() if path.name.startswith("v"))
            for old in versions[: -self._config.keep]:
                # Renamed first: no server may take half a folder for a version.
                gone = old.with_name(f".{old.name}.partial")
                try:
                    old.rename(gone)
                    shutil.rmtree(gone)
                except OSError as error:
                    notes.append(f"can't remove the old version {old}: {error}")
        return notes


@dataclasses.dataclass(frozen=True, slots=True)
class _Written:
    """A version in a folder, which is num_bytes large; `changed` as in Delivery."""

    version: int
    folder: Path
    checksum: str
    num_bytes: int
    changed: float | None


def _refused(answer: ReloadResponse | HocketError) -> bool:
    return isinstance(answer, ServerError) and answer.status is not None and answer.status < 500
