"""How many episodes may be under way, by their tokens. Knows nothing of what they do."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager


class Budget:
    """Tokens that unfinished episodes hold; who comes first starts first.

    Attributes:
        limit: gives the number at the moment; an episode does not start where it would be passed, but for one that is
            alone; 0: there is none.
    """

    def __init__(self, limit: Callable[[], int] = lambda: 0) -> None:
        self.limit = limit
        self.held = 0
        self._queue: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def start(self, tokens: int) -> None:
        """Returns once there is room for so many tokens, and holds them."""
        if self._fits(tokens) and not self._queue:
            self.held += tokens
            return
        turn = asyncio.get_running_loop().create_future()
        self._queue.append((tokens, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it was let in and ended at the same moment
                self.change(-tokens)
            raise

    @asynccontextmanager
    async def holding(self, tokens: int) -> AsyncIterator[None]:
        """Holds so many tokens for the time of its body, which begins once there is room for them."""
        await self.start(tokens)
        try:
            yield
        finally:
            self.change(-tokens)

    def change(self, tokens: int) -> None:
        """Holds so many tokens more, or less: an episode that has begun never waits for others."""
        self.held += tokens
        while self._queue and (self._queue[0][1].done() or self._fits(self._queue[0][0])):
            wanted, turn = self._queue.popleft()
            if not turn.done():
                self.held += wanted
                turn.set_result(None)

    def _fits(self, tokens: int) -> bool:
        limit = self.limit()
        return self.held == 0 or limit == 0 or self.held + tokens <= limit
