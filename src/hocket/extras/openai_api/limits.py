"""Bound the requests of strangers, who know only the client routes, and let a trainer's go first."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator

from hocket.server.errors import ApiError
from hocket.server.parts import Server

RETRY_AFTER_S = 2
AHEAD = 1.25
"""Strangers' sequences in the engine, for each one that it decodes at once.

A few must wait there, so that it has one as soon as another ends. A trainer's requests wait behind
these, and before all others.
"""


class Strangers:
    """The requests of the client routes, but for those of a trainer's agents."""

    def __init__(self, server: Server) -> None:
        at_once = int(server.engine.llm.vllm_config.scheduler_config.max_num_seqs)
        self._num_slots = int(AHEAD * at_once)
        self._free = asyncio.Semaphore(self._num_slots)
        self._taking = asyncio.Lock()
        self._state = server.app.state
        self._max_requests = server.max_requests
        self._num_requests = 0

    @contextlib.contextmanager
    def request(self) -> Iterator[None]:
        """Count a request during the body. Raises ApiError (429) for one too many."""
        if self._num_requests >= self._max_requests:
            message = f"{self._num_requests} requests are being answered, which is the limit"
            hint = "send it again later, or raise server.max_requests"
            headers = {"Retry-After": str(RETRY_AFTER_S)}
            raise ApiError(429, "too_many_requests", message, hint, headers)
        self._count(1)
        try:
            yield
        finally:
            self._count(-1)

    @contextlib.asynccontextmanager
    async def slots(self, number: int) -> AsyncIterator[None]:
        """Hold slots for so many sequences during the body, but no more than there are."""
        taken = 0
        try:
            # One request takes its slots at a time: two with a part each would wait for ever.
            async with self._taking:
                while taken < min(number, self._num_slots):
                    await self._free.acquire()
                    taken += 1
            yield
        finally:
            for _ in range(taken):
                self._free.release()

    def _count(self, change: int) -> None:
        """Change the number of requests, which vLLM's route /load answers."""
        self._num_requests += change
        self._state.server_load_metrics = self._num_requests
