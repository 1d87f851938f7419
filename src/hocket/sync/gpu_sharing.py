"""Share one GPU between server and trainer (launch.share_gpu): each leaves it before the other one loads.

generate │ trainer_turn  step │ deliver  write, load version        │ generate …
server   │ asleep             │ weights, once loaded the KV cache   │ weights and KV cache
trainer  │ on the GPU         │ off, once it has written            │ off
"""

import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import TYPE_CHECKING

from hocket.client.pool import ServerPool
from hocket.client.server import ServerClient
from hocket.common.tasks import timed
from hocket.config import SyncConfig
from hocket.errors import ServerError, SyncError
from hocket.protocol import SleepRequest, WakeRequest, meaning
from hocket.sync.disk import Versions
from hocket.sync.publish import Delivery, Transport
from hocket.types import Metrics

if TYPE_CHECKING:
    from hocket.trainer.trainer import Trainer


def own_gpu(publishes: bool) -> AbstractAsyncContextManager[Metrics]:
    """Give the trainer the device that it has for itself: a turn without metrics."""
    return nullcontext({})


@dataclasses.dataclass(frozen=True)
class SharedGpu:
    """Wrap the disk transport: server and trainer are never on the GPU together."""

    disk: Transport
    versions: Versions
    trainer: "Trainer"
    pool: ServerPool
    sync: SyncConfig
    keep: bool  # versions are adapters: the server keeps its other weights while it sleeps

    @asynccontextmanager
    async def trainer_turn(self, publishes: bool) -> AsyncIterator[Metrics]:
        """Give the trainer the GPU while the server sleeps; without new weights the server gets it back then."""
        metrics: Metrics = {}
        with timed(metrics, "time/turn"):
            await put_to_sleep(self.pool, self.sync, keep=self.keep or not publishes)
            self.trainer.onload()
        yield metrics
        if not publishes:
            self.trainer.offload()
            request = WakeRequest()
            await _ask(self.pool, lambda server: server.wake_up(request, timeout_s=self.sync.timeout_s))

    async def deliver(self, version: int, servers: Sequence[ServerClient], *, compare: bool = False) -> Delivery:
        """Load the version into the server, as `Transport.deliver`, which wakes up: leave the GPU to it before."""
        metrics: Metrics = {}
        with timed(metrics, "sync/prepare_s"):
            self.versions.full(version)
            self.trainer.offload()
        delivery = await self.disk.deliver(version, servers, compare=compare)
        metrics["sync/prepare_s"] += delivery.metrics["sync/prepare_s"]
        return Delivery(delivery.answers, delivery.metrics | metrics)


async def put_to_sleep(pool: ServerPool, sync: SyncConfig, *, keep: bool) -> None:
    """Make every server leave the GPU; with `keep` its weights go to the CPU's memory, else they must be sent again."""
    request = SleepRequest(level=1 if keep else 2, in_flight=sync.in_flight)
    await _ask(pool, lambda server: server.sleep(request, timeout_s=sync.timeout_s))


async def _ask(pool: ServerPool, ask: Callable[[ServerClient], Awaitable[object]]) -> None:
    """Ask every server; mark those lost that are gone. Raises SyncError for other errors."""
    for member in pool.members:
        try:
            await ask(member.server)
        except ServerError as error:
            if not meaning(error.code).gone:
                raise SyncError(f"server and trainer can't take turns on the GPU: {error}") from error
            pool.mark_lost(member, str(error))
