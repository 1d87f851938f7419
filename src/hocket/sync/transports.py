"""Carry weight versions to servers in files: in a folder that both sides see, or uploaded over HTTP."""

import asyncio
import dataclasses
import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from hocket.client.server import ServerClient
from hocket.common.tasks import run_in_thread
from hocket.config import SyncConfig
from hocket.errors import HocketError, SyncError
from hocket.protocol import ReloadRequest, meaning
from hocket.sync.disk import Versions
from hocket.sync.folders import WrittenVersion
from hocket.sync.publish import Answer, Answers, Delivery, Transport

REST_S = 5.0  # before a version that could not be written is written again: someone may have freed space


@dataclasses.dataclass
class DiskTransport:
    """Write a version, have all servers load it at once, and send the full one where a delta does not load."""

    versions: Versions
    root: Path  # which the servers see, too; versions are named relative to it
    sync: SyncConfig
    say: Callable[[str], None] = lambda line: None
    on_written: Callable[[], None] = lambda: None  # called when a version is on the disk, before any server loads it
    _upload_name: str = dataclasses.field(default_factory=lambda: secrets.token_hex(4))  # versions of one trainer

    async def deliver(self, version: int, servers: Sequence[ServerClient], *, compare: bool = False) -> Delivery:
        start = time.perf_counter()
        versions = self.versions
        try:
            first = await run_in_thread(self._write, version)
        except SyncError as error:
            self.say(f"{error}. It is tried once more in {REST_S:g} s")
            await asyncio.sleep(REST_S)
            first = await run_in_thread(self._write, version)
        prepared = time.perf_counter()
        answers, _ = await asyncio.gather(self._load(first, servers, compare), run_in_thread(versions.prune))
        num_bytes = float(first.num_bytes)  # per server
        failed = _failed(answers)
        full = await run_in_thread(versions.mended, first) if failed else None
        if full is not None:  # it was a delta, or its files were hurt
            for server in failed:
                self.say(f"version {version} goes to {server.url} in full: {answers[server][1]}")
            answers |= await self._load(full, failed, compare)
            if _failed(answers):
                await run_in_thread(versions.check, full)
            num_bytes += full.num_bytes * len(failed) / len(servers)
        metrics = {
            "sync/mebibytes": num_bytes / 2**20,
            "sync/prepare_s": prepared - start,
            "sync/transfer_s": time.perf_counter() - prepared,
        }
        if first.changed is not None:
            metrics["sync/changed"] = first.changed
        return Delivery(answers, metrics)

    def _write(self, version: int) -> WrittenVersion:
        written = self.versions.first(version)
        self.on_written()
        return written

    async def _load(self, written: WrittenVersion, servers: Sequence[ServerClient], compare: bool) -> Answers:
        async def load(server: ServerClient) -> Answer:
            try:
                name = written.folder.relative_to(self.root.resolve()).as_posix()
                if self.sync.upload:
                    name = "-".join((self._upload_name, *written.folder.parts[-2:]))
                    name = await server.upload(written.folder, name, timeout_s=self.sync.timeout_s)
                request = ReloadRequest(
                    version=written.version,
                    source=written.source(name=name),
                    in_flight=self.sync.in_flight,
                    compare=compare,
                )
                return await server.ask(request, timeout_s=self.sync.timeout_s)
            except HocketError as error:
                return error

        answers = await asyncio.gather(*map(load, servers))
        return {server: (written.checksum, answer) for server, answer in zip(servers, answers, strict=True)}


@dataclasses.dataclass
class WithFallback:
    """Use a fast transport, and the disk for servers that it does not reach but that do answer."""

    fast: Transport
    disk: Transport
    say: Callable[[str], None] = lambda line: None

    async def deliver(self, version: int, servers: Sequence[ServerClient], *, compare: bool = False) -> Delivery:
        first = await self.fast.deliver(version, servers, compare=compare)
        answers, failed = first.answers, _failed(first.answers)
        metrics = first.metrics | {"sync/fallbacks": float(len(failed))}
        if failed:
            start = time.perf_counter()
            urls = ", ".join(server.url for server in failed)
            self.say(f"version {version} goes to {urls} by disk instead: {answers[failed[0]][1]}")
            second = await self.disk.deliver(version, failed, compare=compare)
            answers |= second.answers
            metrics["sync/mebibytes"] += second.metrics["sync/mebibytes"] * len(failed) / len(servers)
            metrics["sync/transfer_s"] += time.perf_counter() - start
        return Delivery(answers, metrics)


def _failed(answers: Answers) -> list[ServerClient]:
    """Return the servers that answer but did not load a version, or compare it: they may do so in another way."""
    failures = {server: answer for server, (_, answer) in answers.items() if isinstance(answer, HocketError)}
    return [server for server in failures if not meaning(getattr(failures[server], "code", "")).final]
