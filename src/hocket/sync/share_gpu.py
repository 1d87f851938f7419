"""Share one GPU between server and trainer (launch.share_gpu): each leaves it before the other one loads.

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
"""Codes of a server whose engine has ended, and holds no GPU memory."""


@asynccontextmanager
async def shared_gpu(
    trainer: "Trainer", publisher: Publisher, sync: SyncConfig, keep: bool, publishes: bool
) -> AsyncIterator[Metrics]:
    """Give the trainer the GPU; without new weights the server gets it back with the version that it holds.

    `keep`: the server keeps its own on the CPU, as new ones are adapters.
    """
    metrics: Metrics = {}
    with timed(metrics, "time/turn"):
        await put_to_sleep(publisher.pool, sync, keep=keep or not publishes)
        await run_in_thread(trainer.onload)
    yield metrics
    if not publishes:
        await publisher.deliver(publisher.pool.up)


async def put_to_sleep(pool: ServerPool, sync: SyncConfig, *, keep: bool) -> None:
    """Have servers leave the GPU; without `keep` their weights must be sent again."""
    request = SleepRequest(level=1 if keep else 2, in_flight=sync.in_flight)
    for member in pool.members:
        try:
            await member.server.ask(request, timeout_s=sync.timeout_s)
        except ServerError as error:
            if error.code not in GONE:
                raise SyncError(
                    f"server and trainer can't take turns on the GPU: {error}"
                ) from error
            pool.mark_lost(member, str(error))
