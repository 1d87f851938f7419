"""Carry weight versions to servers in files: in a shared folder, or uploaded over HTTP."""

import asyncio
import dataclasses
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path

from hocket.client.server import ServerClient
from hocket.common.tasks import run_in_thread, timed
from hocket.config import SyncConfig
from hocket.errors import HocketError, SyncError
from hocket.protocol import DiskSource, OtherSource, ReloadRequest, Source
from hocket.sync.transports import (
    Answer,
    Delivery,
    Sending,
    Transport,
    combined,
    not_reached,
    transport,
)
from hocket.sync.versions import Versions, WrittenVersion
from hocket.types import Metrics

REST_S = 5.0  # seconds before writing is tried again: meanwhile someone may free space


@dataclasses.dataclass
class DiskTransport:
    """Write a version to a folder, and have all servers load it.

    Servers that could not load it are sent the version written anew, in full.
    """

    versions: Versions
    root: Path  # the folder (sync.root) below which servers look for versions
    sync: SyncConfig
    say: Callable[[str], None] = lambda line: None  # prints a line
    on_written: Callable[[], None] = lambda: None  # called before any server loads the version
    # Writes what servers are sent first, such as a delta; None: the whole version.
    write: Callable[[int], WrittenVersion] | None = None
    # Begins the names of this trainer's uploads.
    _upload_name: str = dataclasses.field(default_factory=lambda: secrets.token_hex(4))

    async def deliver(
        self, version: int, servers: Sequence[ServerClient], *, compare: bool = False
    ) -> Delivery:
        """Write the version and have the servers load it, or compare. Raises SyncError."""
        versions = self.versions
        metrics = Metrics()

        # Write it. After a failure, such as a full disk, try once more.
        with timed(metrics, "sync/prepare_s"):
            try:
                first = await run_in_thread(self._write, version)
            except SyncError as error:
                self.say(f"{error}. It is tried once more in {REST_S:g} s")
                await asyncio.sleep(REST_S)
                first = await run_in_thread(self._write, version)

        # Servers load it while older versions are removed.
        loading = self._load(first, servers, compare)
        delivery, _ = await asyncio.gather(loading, run_in_thread(versions.prune))

        # Where servers could not load it, the cause may be that it was a delta, or that its files
        # were damaged. Then they are sent the whole version.
        failed = not_reached(delivery)
        full = await run_in_thread(versions.write_again, first) if failed else None
        if full is not None:
            for server in failed:
                reason = delivery.answers[server][1]
                self.say(f"version {version} goes to {server.url} in full: {reason}")
            delivery = combined(delivery, await self._load(full, failed, compare))
            # If it fails again, say so where the disk does not keep what is written to it.
            if not_reached(delivery):
                await run_in_thread(versions.check, full)
        return Delivery(delivery.answers, delivery.metrics | metrics)

    def _write(self, version: int) -> WrittenVersion:
        write = self.write or self.versions.full
        written = write(version)
        self.on_written()
        return written

    async def _load(
        self, written: WrittenVersion, servers: Sequence[ServerClient], compare: bool
    ) -> Delivery:
        """Have all servers load a written version at once, and collect their answers."""
        metrics: Metrics = {"sync/mebibytes": written.num_bytes / 2**20}
        metrics.update(written.metrics)
        with timed(metrics, "sync/transfer_s"):
            requests = [self._ask(server, written, compare) for server in servers]
            answers = await asyncio.gather(*requests)
        pairs = [(written.checksum, answer) for answer in answers]
        return Delivery(dict(zip(servers, pairs, strict=True)), metrics)

    async def _ask(self, server: ServerClient, written: WrittenVersion, compare: bool) -> Answer:
        """Upload a written version if need be, and have a server load it. Returns any failure."""
        timeout_s = self.sync.timeout_s
        try:
            folder = written.folder
            if self.sync.upload:
                upload = f"{self._upload_name}-{folder.parent.name}-{folder.name}"
                name = await server.upload(folder, upload, timeout_s=timeout_s)
            else:
                name = folder.relative_to(self.root.resolve()).as_posix()
            request = ReloadRequest(
                version=written.version,
                source=source_of(written.kind, name),
                in_flight=self.sync.in_flight,
                compare=compare,
            )
            return await server.ask(request, timeout_s=timeout_s)
        except HocketError as error:
            return error


def source_of(kind: str, name: str) -> Source:
    """Make the source of a version in the folder `name` below the servers' root."""
    if kind == "disk":
        return DiskSource(name=name)
    return OtherSource.model_validate({"kind": kind, "name": name})


@transport("disk")
def by_disk(sending: Sending) -> Transport:
    """Send whole versions as files."""
    return sending.disk()
