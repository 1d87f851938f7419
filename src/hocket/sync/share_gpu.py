"""Share a GPU between server and trainer (launch.share_gpu).

Each leaves the GPU before the other one loads. The columns are times, in the order in which they
come; the first line says what the run does, and the other two where each process has its memory:

generate │ trainer_turn  step │ deliver  write, load version        │ generate …
server   │ asleep             │ weights, once loaded the KV cache   │ weights and KV cache
trainer  │ on the GPU         │ off, once it has written            │ off
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from hocket.client.pool import ServerPool
from hocket.common.tasks import run_in_thread, timed
from hocket.config import SyncConfig
from hocket.errors import ServerError, SyncError
from hocket.protocol import SleepRequest
from hocket.sync.publish import Publisher
from hocket.types import Metrics

if TYPE_CHECKING:
    from hocket.trainer.trainer import Trainer

GONE = ("unreachable", "engine_dead", "shutting_down")
"""Codes of a server whose engine has ended, and so holds no memory of the GPU."""


@asynccontextmanager
async def shared_gpu(
    trainer: "Trainer", publisher: Publisher, sync: SyncConfig, keep: bool, publishes: bool
) -> AsyncIterator[Metrics]:
    """Give the GPU to the trainer for the body. Yields the metrics of it. Raises SyncError.

    With `publishes`, a weight sync after the body gives the GPU back to the server. Without it, the
    server gets the GPU back here, with the version that it holds. With `keep`, the server keeps its
    weights in the CPU's memory, as new versions are adapters of them.
    """
    metrics: Metrics = {}
    with timed(metrics, "time/turn"):
        await put_to_sleep(publisher.pool, sync, keep=keep or not publishes)
        await run_in_thread(trainer.onload)
    yield metrics
    if not publishes:
        # A server that is still checked must wake up, too.
        members = publisher.pool.members
        with timed(metrics, "time/turn"):
            await publisher.deliver([member for member in members if member.is_loaded])


async def put_to_sleep(pool: ServerPool, sync: SyncConfig, *, keep: bool) -> None:
    """Have all servers leave the GPU. Raises SyncError where one does not.

    Without `keep` they throw their weights away, and must be sent a version to wake up.
    """
    request = SleepRequest(level=1 if keep else 2, in_flight=sync.in_flight)
    for member in pool.members:
        try:
            await member.server.ask(request, timeout_s=sync.timeout_s)
        except ServerError as error:
            if error.code not in GONE:
                message = f"server and trainer can't take turns on the GPU: {error}"
                raise SyncError(message) from error
            pool.mark_lost(member, str(error))
