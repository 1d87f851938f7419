"""One GPU for two: server and trainer take turns on it (launch.share_gpu), each off it while the other works.

    generate │ trainer()  step, write version │ server()  load version │ generation()  generate …
    server   │ asleep                         │ weights                │ weights and KV cache
    trainer  │ on the GPU                     │ away                   │ away

Whoever leaves does so before the other comes. Without launch.share_gpu there is no `Turns`, and nothing happens.
"""

import time
from collections.abc import Sequence
from typing import Protocol

from hocket.config import Config
from hocket.errors import ServerError, SyncError
from hocket.members import Member, Members
from hocket.protocol import Memory, SleepRequest, WakeRequest
from hocket.types import TrainSample

_GONE = {"unreachable", "engine_dead", "shutting_down"}
"""Codes of errors after which a server has no memory on the GPU any more."""


class Guest(Protocol):
    """What taking turns needs of the trainer."""

    def offload(self) -> None: ...
    def onload(self) -> None: ...
    def logprob_gap(self, samples: Sequence[TrainSample]) -> float: ...


class Turns:
    """Says who is on the GPU. A server that is lost on the way holds nothing there, and is taken out of the pool."""

    def __init__(self, config: Config, trainer: Guest, pool: Members) -> None:
        self._config = config
        self._trainer = trainer
        self._pool = pool

    async def trainer(self, *, keep: bool = False) -> dict[str, float]:
        """Makes it the trainer's turn: the server sleeps, the trainer is on the GPU. Returns time/turn.

        Args:
            keep: the server will need the weights that it has; else it gets new ones.
        """
        start = time.perf_counter()
        await put_to_sleep(self._pool, self._config, keep=keep)
        self._trainer.onload()
        return {"time/turn": time.perf_counter() - start}

    async def server(self) -> None:
        """Makes it the server's turn: the trainer leaves, the server has room for weights, but none for requests."""
        self._trainer.offload()
        await self._wake_up("weights")

    async def generation(self) -> None:
        """Has the server, which holds good weights, generate again."""
        await self._wake_up("kv_cache")

    async def score(self, samples: Sequence[TrainSample]) -> float:
        """Returns the trainer's `logprob_gap` of what the server has generated; the server then has the GPU again."""
        await self.trainer(keep=True)
        gap = self._trainer.logprob_gap(samples)
        await self.server()
        await self.generation()
        return gap

    async def _wake_up(self, tag: Memory) -> None:
        for member in self._pool.members:
            try:
                await member.server.wake_up(WakeRequest(tags=[tag]), timeout_s=self._config.sync.timeout_s)
            except ServerError as error:
                _lost(self._pool, member, error)


async def put_to_sleep(pool: Members, config: Config, *, keep: bool = False) -> None:
    """Has every server leave the GPU.

    Args:
        keep: its weights go to the CPU's memory; else they are dropped, as all of them come again.

    Raises:
        SyncError: one refuses.
    """
    keep = keep or config.model.lora is not None  # only the adapter comes again
    request = SleepRequest(level=1 if keep else 2, in_flight=config.sync.in_flight)
    for member in pool.members:
        try:
            await member.server.sleep(request, timeout_s=config.sync.timeout_s)
        except ServerError as error:
            _lost(pool, member, error)


def _lost(pool: Members, member: Member, error: ServerError) -> None:
    if error.code not in _GONE:
        raise SyncError(f"server and trainer can't take turns on the GPU: {error}") from error
    pool.lose(member, str(error))
