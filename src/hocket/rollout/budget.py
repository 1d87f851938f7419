"""Bound the tokens that concurrent episodes hold together."""

import asyncio
from collections import deque
from collections.abc import Callable

from hocket.protocol import SamplingParams
from hocket.types import Prompt


class TokenBudget:
    """FIFO token budget for concurrent episodes: one starts when its tokens fit, or when no other is under way."""

    def __init__(self, limit: Callable[[], int] = lambda: 0) -> None:
        self._limit = limit  # gives the number at the moment; 0: no limit
        self.held = 0
        self._queue: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def start(self, tokens: int) -> None:
        """Wait until there is room for the tokens, and hold them."""
        if self._fits(tokens) and not self._queue:
            self.held += tokens
            return
        ready = asyncio.get_running_loop().create_future()
        self._queue.append((tokens, ready))
        try:
            await ready
        except asyncio.CancelledError:
            if ready.done() and not ready.cancelled():  # it was let in and cancelled at the same moment
                self.change(-tokens)
            raise

    def change(self, tokens: int) -> None:
        """Add `tokens`, which may be negative, to those held; an episode that has begun never waits for others."""
        self.held += tokens
        while self._queue and (self._queue[0][1].done() or self._fits(self._queue[0][0])):
            wanted, ready = self._queue.popleft()
            if not ready.done():
                self.held += wanted
                ready.set_result(None)

    def _fits(self, tokens: int) -> bool:
        limit = self._limit()
        return self.held == 0 or limit == 0 or self.held + tokens <= limit


def most_tokens(prompt: Prompt, sampling: SamplingParams) -> int:
    """Return the most tokens that a prompt and one turn take."""
    return len(prompt.token_ids) + sampling.max_tokens
