"""Carry weight versions to servers in files: in a folder that both sides see, or uploaded over HTTP.

The receiving half is `/reload_weights` in server/engine.py and server/worker.py, and `/upload` in server/uploads.py.
"""

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from hocket.client import ServerClient
from hocket.config import SyncConfig
from hocket.errors import HocketError, ServerError
from hocket.protocol import DiskSource, ReloadRequest, ReloadResponse
from hocket.sync.disk import VersionFolders, WrittenVersion
from hocket.sync.publish import Delivery, Transport
from hocket.system import run_in_thread

Answer = ReloadResponse | HocketError


class DiskTransport:
    """Write a version to the disk and have all servers load it at the same time.

    With sync.delta that is what changed; a server that can't use it gets the whole version.

    Args:
        root: folder that the servers see, too; versions are named relative to it.
        say: told about whole versions instead of deltas, and old versions that can't be removed.
    """

    def __init__(
        self, folders: VersionFolders, root: Path, sync: SyncConfig, say: Callable[[str], None] = lambda line: None
    ) -> None:
        self._folders = folders
        self._root = root.resolve()
        self._sync = sync
        self._say = say
        self._upload_name = secrets.token_hex(4)  # another trainer's versions have the same numbers

    async def deliver(self, version: int, servers: Sequence[ServerClient]) -> Delivery:
        """Load the version into the servers, as `Transport.deliver`."""
        start = time.perf_counter()
        folders = self._folders
        first = await run_in_thread(lambda: folders.delta(version) or folders.full(version))
        prepared = time.perf_counter()
        answers, failures = await asyncio.gather(self._load(first, servers), run_in_thread(folders.prune))
        for failure in failures:
            self._say(failure)
        num_bytes = first.num_bytes * max(len(servers), 1)
        metrics = {} if first.changed is None else {"sync/changed": first.changed}
        refused = [server for server in servers if metrics and _is_refused(answers[server])]
        for server in refused:
            self._say(f"version {version} goes to {server.url} in full: {answers[server]}")
        if refused:
            whole = await run_in_thread(folders.full, version)
            answers |= await self._load(whole, refused)
            num_bytes += whole.num_bytes * len(refused)
        metrics |= {
            "sync/mebibytes": num_bytes / max(len(servers), 1) / 2**20,
            "sync/prepare_s": prepared - start,
            "sync/transfer_s": time.perf_counter() - prepared,
        }
        return Delivery(checksums=[first.checksum] * len(servers), answers=[*answers.values()], metrics=metrics)

    async def _load(self, written: WrittenVersion, servers: Sequence[ServerClient]) -> dict[ServerClient, Answer]:
        async def answer(server: ServerClient) -> Answer:
            try:
                name = written.folder.relative_to(self._root).as_posix()
                if self._sync.upload:
                    name = "-".join((self._upload_name, *written.folder.parts[-2:]))
                    name = await server.upload(written.folder, name, timeout_s=self._sync.timeout_s)
                source = DiskSource(name=name)
                request = ReloadRequest(version=written.version, source=source, in_flight=self._sync.in_flight)
                return await server.reload_weights(request, timeout_s=self._sync.timeout_s)
            except HocketError as error:
                return error

        return dict(zip(servers, await asyncio.gather(*map(answer, servers)), strict=True))


class WithFallback:
    """Use a fast transport, and the disk for servers that it does not reach but that do answer."""

    def __init__(self, fast: Transport, disk: Transport, say: Callable[[str], None] = lambda line: None) -> None:
        self._fast = fast
        self._disk = disk
        self._say = say

    async def deliver(self, version: int, servers: Sequence[ServerClient]) -> Delivery:
        """Load the version into the servers, as `Transport.deliver`."""
        first = await self._fast.deliver(version, servers)
        results = dict(zip(servers, zip(first.checksums, first.answers, strict=True), strict=True))
        failed = [server for server, (_, answer) in results.items() if _is_failed(answer)]
        metrics = first.metrics | {"sync/fallbacks": float(len(failed))}
        if failed:
            start = time.perf_counter()
            urls = ", ".join(server.url for server in failed)
            self._say(f"version {version} goes to {urls} by disk instead: {results[failed[0]][1]}")
            second = await self._disk.deliver(version, failed)
            results |= zip(failed, zip(second.checksums, second.answers, strict=True), strict=True)
            metrics["sync/transfer_s"] += time.perf_counter() - start
        checksums, answers = [checksum for checksum, _ in results.values()], [answer for _, answer in results.values()]
        return Delivery(checksums=checksums, answers=answers, metrics=metrics)


def _is_refused(answer: Answer) -> bool:
    return isinstance(answer, ServerError) and answer.refused


def _is_failed(answer: Answer) -> bool:
    """Return whether a server that may answer by another way has not taken a version."""
    silent = isinstance(answer, ServerError) and answer.code in ("unreachable", "timeout")
    return isinstance(answer, HocketError) and not silent
