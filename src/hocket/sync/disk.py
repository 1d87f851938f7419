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
    joined,
    not_reached,
    transport,
)
from hocket.sync.versions import Versions, WrittenVersion
from hocket.types import Metrics

REST_S = 5.0  # before writing is tried again: someone may free space


@dataclasses.dataclass
class DiskTransport:
    """Write a version and have all servers load it; write it in full again for those that could not."""

    versions: Versions
    root: Path  # which servers see, too
    sync: SyncConfig
    say: Callable[[str], None] = lambda line: None
    on_written: Callable[[], None] = lambda: None  # before any server loads it
    write: Callable[[int], WrittenVersion] | None = (
        None  # what servers are sent first; None: the whole version
    )
    _upload_name: str = dataclasses.field(
        default_factory=lambda: secrets.token_hex(4)
    )  # of this trainer's uploads

    async def deliver(
        self, version: int, servers: Sequence[ServerClient], *, compare: bool = False
    ) -> Delivery:
        versions = self.versions
        metrics = Metrics()
        with timed(metrics, "sync/prepare_s"):
            try:
                first = await run_in_thread(self._write, version)
            except SyncError as error:
                self.say(f"{error}. It is tried once more in {REST_S:g} s")
                await asyncio.sleep(REST_S)
                first = await run_in_thread(self._write, version)
        delivery, _ = await asyncio.gather(
            self._load(first, servers, compare), run_in_thread(versions.prune)
        )
        failed = not_reached(delivery)
        full = await run_in_thread(versions.mended, first) if failed else None
        if full is not None:  # it was a delta, or its files were hurt
            for server in failed:
                self.say(
                    f"version {version} goes to {server.url} in full: {delivery.answers[server][1]}"
                )
            delivery = joined(delivery, await self._load(full, failed, compare))
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
        metrics = {"sync/mebibytes": written.num_bytes / 2**20, **written.metrics}
        with timed(metrics, "sync/transfer_s"):
            answers = await asyncio.gather(
                *(self._ask(server, written, compare) for server in servers)
            )
        sent = ((written.checksum, answer) for answer in answers)
        return Delivery(dict(zip(servers, sent, strict=True)), metrics)

    async def _ask(self, server: ServerClient, written: WrittenVersion, compare: bool) -> Answer:
        timeout_s = self.sync.timeout_s
        try:
            name = written.folder.relative_to(self.root.resolve()).as_posix()
            if self.sync.upload:
                name = "-".join((self._upload_name, *written.folder.parts[-2:]))
                name = await server.upload(written.folder, name, timeout_s=timeout_s)
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
    """Return the source of a version in the folder `name` below the servers' root."""
    if kind == "disk":
        return DiskSource(name=name)
    return OtherSource.model_validate({"kind": kind, "name": name})


@transport("disk")
def by_disk(sending: Sending) -> Transport:
    """Send whole versions as files."""
    return sending.disk()
