"""A publisher with fake transports, and servers in memory."""

import asyncio
import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hocket import config as config_module
from hocket.config import Config
from hocket.errors import HocketError, ServerError, TrainerError
from hocket.protocol import Completion, Health, ReloadResponse
from hocket.sync.publish import Publisher
from hocket.sync.transports import Delivery, WithFallback
from hocket.sync.versions import Versions
from support import fakes
from support.servers import FakeServer, Pool
from support.weights import FakeTrainer

A, B, C = URLS = ("http://a", "http://b", "http://c")
GONE = ServerError("can't reach it", code="unreachable")
BROKEN = ServerError("it broke", code="reload_failed", status=500)
REFUSED = ServerError("tensor a has another shape", code="bad_version", status=409)
STALLED = ServerError("nothing came for 60 s", code="body_timeout", status=408)
UNABLE = ServerError("no memory is left", code="compare_failed", status=500)
SLOW = ServerError("the files were not read", code="slow_disk", status=503)
NOT_HELD = ServerError("layers.1.mlp.down_proj differs", code="not_held", status=409)
METRICS = {"sync/mebibytes": 3.0, "sync/prepare_s": 0.5, "sync/transfer_s": 0.25}


class FakeTransport:
    """Delivers at once: `answers` by URL are of servers that do not take a version, `sent` is (version, urls)."""

    def __init__(self, checksum: str) -> None:
        self.checksum = checksum
        self.answers: dict[str, HocketError | ReloadResponse] = {}
        self.sent: list[tuple[int, list[str]]] = []
        self.compared: list[tuple[int, list[str]]] = []
        self.found: dict[str, ServerError] = {}  # by comparisons
        self.running = 0

    async def deliver(self, version: int, servers: Sequence[Any], *, compare: bool = False) -> Delivery:
        (self.compared if compare else self.sent).append((version, [server.url for server in servers]))
        self.running += 1
        assert self.running == 1, "there is one trainer, which sends one version at a time"
        await asyncio.sleep(0.01)
        self.running -= 1
        held = {server.url: fakes.reloaded(version, self.checksum, server.session) for server in servers}
        known = held | self.answers | (self.found if compare else {})
        return Delivery({server: (self.checksum, known[server.url]) for server in servers}, {**METRICS})


@dataclasses.dataclass
class World:
    config: Config
    sync: Publisher
    pool: Pool
    servers: list[FakeServer]
    trainer: FakeTrainer
    disk: FakeTransport
    collective: FakeTransport
    said: list[str]
    other_model: bool = False  # the servers serve

    @property
    def up(self) -> list[str]:
        return [member.url for member in self.pool.up]

    def check_model(self, health: Health) -> None:
        if self.other_model:
            raise TrainerError("the server serves another model")

    async def look_again(self) -> None:
        """Has the pool look at every server that is out with its next chance, as if time had passed."""
        for member in self.pool.members:
            member.next_look = 0.0
        await self.pool.wait_up()


def completes(prompt: Any, seed: int) -> Completion:
    return fakes.completion(7, 8, logprobs=(-0.5, -0.25))


def make(*settings: str, servers: int = 2, collective: bool = False, version: int = 4, start_s: float = 5.0) -> World:
    config = config_module.load(None, ["rollout.max_tokens=8", "rollout.temperature=0.7", *settings])
    there = [FakeServer(url, session=f"s1 {url}", complete=completes) for url in URLS[:servers]]
    for server in there:
        server.version = version
    pool = Pool(there, start_timeout_s=start_s)
    trainer, disk, fast = FakeTrainer(), FakeTransport("disk"), FakeTransport("fast")
    sync = Publisher(
        versions=Versions(Path("/nowhere"), trainer),  # type: ignore[arg-type]
        pool=pool,
        transport=WithFallback(fast, disk, pool.say) if collective else disk,
        max_logprob_gap=config.sync.max_logprob_gap,
    )
    world = World(config, sync, pool, there, trainer, disk, fast, pool.said)
    pool.bring_up = functools.partial(sync.bring_up, world.check_model)
    return world


async def make_up(*settings: str, **options: Any) -> World:
    """Makes a world whose servers are up: they hold version 5."""
    world = make(*settings, **options)
    await world.pool.wait_up()
    return world
