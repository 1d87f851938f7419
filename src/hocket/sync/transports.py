"""Carry weight versions to servers in files: in a folder that both sides see, or uploaded over HTTP.

The receiving half is `/reload_weights` in server/engine.py and server/worker.py, and `/upload` in server/uploads.py.
"""

import asyncio
import dataclasses
import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from hocket.client import ServerClient
from hocket.config import SyncConfig
from hocket.errors import HocketError, ServerError
from hocket.protocol import DiskSource, ReloadRequest
from hocket.sync.disk import VersionFolders, WrittenVersion
from hocket.sync.publish import Answer, Delivery, Transport
from hocket.system import run_in_thread


@dataclasses.dataclass
class DiskTransport:
    """Write a version, have all servers load it at once, and send the full one where a delta does not load."""

    folders: VersionFolders
    root: Path  # which the servers see, too; versions are named relative to it
    sync: SyncConfig
    say: Callable[[str], None] = lambda line: None
    _upload_name: str = dataclasses.field(default_factory=lambda: secrets.token_hex(4))  # versions of one trainer

    async def deliver(self, version: int, servers: Sequence[ServerClient]) -> Delivery:
        """Load the version into the servers, as `Transport.deliver`."""
        start = time.perf_counter()
        first = await run_in_thread(lambda: self.folders.delta(version) or self.folders.full(version))
        prepared = time.perf_counter()
        answers, _ = await asyncio.gather(self._load(first, servers), run_in_thread(self.folders.prune))
        num_bytes = first.num_bytes * max(len(servers), 1)
        metrics = {} if first.changed is None else {"sync/changed": first.changed}
        failed = [server for server in servers if _has_failed(answers[server])]
        if failed and first.changed is None:
            await run_in_thread(self.folders.check, first)
        elif failed:
            for server in failed:
                self.say(f"version {version} goes to {server.url} in full: {answers[server]}")
            full = await run_in_thread(self.folders.full, version)
            answers |= await self._load(full, failed)
            num_bytes += full.num_bytes * len(failed)
        metrics |= {
            "sync/mebibytes": num_bytes / max(len(servers), 1) / 2**20,
            "sync/prepare_s": prepared - start,
            "sync/transfer_s": time.perf_counter() - prepared,
        }
        return Delivery(checksums=[first.checksum] * len(servers), answers=[*answers.values()], metrics=metrics)

    async def _load(self, written: WrittenVersion, servers: Sequence[ServerClient]) -> dict[ServerClient, Answer]:
        async def answer(server: ServerClient) -> Answer:
            try:
                name = written.folder.relative_to(self.root.resolve()).as_posix()
                if self.sync.upload:
                    name = "-".join((self._upload_name, *written.folder.parts[-2:]))
                    name = await server.upload(written.folder, name, timeout_s=self.sync.timeout_s)
                source = DiskSource(name=name)
                request = ReloadRequest(version=written.version, source=source, in_flight=self.sync.in_flight)
                return await server.reload_weights(request, timeout_s=self.sync.timeout_s)
            except HocketError as error:
                return error

        return dict(zip(servers, await asyncio.gather(*map(answer, servers)), strict=True))


@dataclasses.dataclass
class WithFallback:
    """Use a fast transport, and the disk for servers that it does not reach but that do answer."""

    fast: Transport
    disk: Transport
    say: Callable[[str], None] = lambda line: None

    async def deliver(self, version: int, servers: Sequence[ServerClient]) -> Delivery:
        """Load the version into the servers, as `Transport.deliver`."""
        first = await self.fast.deliver(version, servers)
        results = dict(zip(servers, zip(first.checksums, first.answers, strict=True), strict=True))
        failed = [server for server, (_, answer) in results.items() if _has_failed(answer)]
        metrics = first.metrics | {"sync/fallbacks": float(len(failed))}
        if failed:
            start = time.perf_counter()
            urls = ", ".join(server.url for server in failed)
            self.say(f"version {version} goes to {urls} by disk instead: {results[failed[0]][1]}")
            second = await self.disk.deliver(version, failed)
            results |= zip(failed, zip(second.checksums, second.answers, strict=True), strict=True)
            metrics["sync/transfer_s"] += time.perf_counter() - start
        checksums, answers = [checksum for checksum, _ in results.values()], [answer for _, answer in results.values()]
        return Delivery(checksums=checksums, answers=answers, metrics=metrics)


def _has_failed(answer: Answer) -> bool:
    """Return whether a server that answers did not load a version: it may load it in another way."""
    silent = isinstance(answer, ServerError) and answer.code in ("unreachable", "timeout")
    return isinstance(answer, HocketError) and not silent
