"""Single turns of many episodes, asked for in few requests.

One request per turn costs the engine more than half of its throughput, and the HTTP client slows down with hundreds in
flight. Turns that come within a few milliseconds go together; the more requests are under way, the longer the next one
waits for company. Knows nothing of episodes.
"""

import asyncio
import dataclasses
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from hocket.protocol import Completion, SamplingParams, Toolbox

WINDOW_S = 0.002
MAX_REQUESTS = 24
"""In flight at the same time, of one batch; several batches share the client's connections."""
MAX_TURNS = 256
"""In one request, which a pool sends as one."""


class Generator(Protocol):
    """What turns need of a server: hocket.pool.ServerPool is one."""

    @property
    def kv_tokens(self) -> int:
        """Tokens of all requests together that it can hold."""

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams,
        *,
        n: int = 1,
        timeout_s: float,
        seeds: Sequence[Sequence[int]] | None = None,
        tools: Toolbox | None = None,
    ) -> AsyncIterator[tuple[int, int, Completion]]:
        """Yields (prompt index, sample index, completion) in any order."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Turn:
    token_ids: Sequence[int]
    seed: int
    answer: "asyncio.Future[Completion]"


class Coalescer:
    """Asks a server for turns. Use it inside one event loop, and as `async with`: leaving it ends what is in flight.

    Args:
        timeout_s: from now on, until every turn must have been answered.
        tools: calls of these are looked for in the completions.
    """

    def __init__(self, server: Generator, *, timeout_s: float, tools: Toolbox | None = None) -> None:
        self._server = server
        self._end = time.monotonic() + timeout_s
        self._tools = tools
        self._waiting: dict[SamplingParams, list[_Turn]] = defaultdict(list)
        self._requests: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def late(self) -> bool:
        """Whether its time is over."""
        return time.monotonic() >= self._end

    async def __aenter__(self) -> "Coalescer":
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._waiting.clear()
        for request in self._requests:
            request.cancel()
        await asyncio.gather(*self._requests, return_exceptions=True)

    async def ask(self, token_ids: Sequence[int], sampling: SamplingParams, *, seed: int) -> Completion:
        """Returns the completion of one prompt; `seed` alone decides its random numbers, whatever it travels with.

        Raises:
            ServerError: refused, not finished in time, or no server is left.
        """
        answer: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._waiting[sampling.model_copy(update={"seed": None})].append(
            _Turn(token_ids=token_ids, seed=seed, answer=answer)
        )
        self._schedule()
        return await answer

    def _schedule(self) -> None:
        if self._timer is None and self._waiting and len(self._requests) < MAX_REQUESTS:
            delay_s = WINDOW_S * (1 + len(self._requests))
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._send)

    def _send(self) -> None:
        self._timer = None
        waiting, self._waiting = self._waiting, defaultdict(list)
        for sampling, turns in waiting.items():
            wanted = [turn for turn in turns if not turn.answer.done()]  # an episode may have been given up
            while wanted and len(self._requests) < MAX_REQUESTS:
                request = asyncio.create_task(self._request(sampling, wanted[:MAX_TURNS]))
                self._requests.add(request)
                request.add_done_callback(self._ended)
                wanted = wanted[MAX_TURNS:]
            if wanted:
                self._waiting[sampling] = wanted  # until a request has ended

    def _ended(self, request: "asyncio.Task[None]") -> None:
        self._requests.discard(request)
        self._schedule()

    async def _request(self, sampling: SamplingParams, turns: Sequence[_Turn]) -> None:
        try:
            answers = self._server.generate(
                [turn.token_ids for turn in turns],
                sampling,
                timeout_s=max(0.0, self._end - time.monotonic()),
                seeds=[[turn.seed] for turn in turns],
                tools=self._tools,
            )
            async for i, _, completion in answers:
                if not turns[i].answer.done():
                    turns[i].answer.set_result(completion)
        except Exception as error:  # noqa: BLE001 - whatever it is, every episode that waits for it raises it
            for turn in turns:
                if not turn.answer.done():
                    turn.answer.set_exception(error)
