"""The servers of a run: who can be given work now.

A server that answers is not yet one that may work: first `bring_up` gives it the weights that the others have. Knows
neither how these travel nor what servers are asked for.
"""

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Self

from hocket.client import ServerClient
from hocket.errors import ServerError, SyncError
from hocket.protocol import Health

POLL_S = 0.25
LOOK_S = 3.0
LOOKING_SHARE = 0.1
"""Share of the time that looking at servers that are out may cost those that work."""


@dataclasses.dataclass(eq=False, slots=True)
class Member:
    """One server of the pool.

    Attributes:
        session: of the server's process that holds the current weights; None: it gets no work.
        in_flight: prompt and completion tokens of its unfinished requests, at most.
        kv_tokens: what its KV cache holds.
        out: why it gets no work; None: it does, or nobody has looked yet.
    """

    server: ServerClient
    session: str | None = None
    in_flight: int = 0
    out: str | None = None
    kv_tokens: int = 0
    _next_look: float = 0.0

    @property
    def url(self) -> str:
        """Base URL of the server."""
        return self.server.url

    def take_out(self, reason: str) -> None:
        """Gives it no more work until it has been looked at and brought up again."""
        self.session, self.out = None, reason

    def rest(self, seconds: float) -> None:
        """Leaves it alone for a while."""
        self._next_look = time.monotonic() + seconds

    def holds(self, session: str) -> None:
        """Says that it has the current weights: it may work."""
        self.session, self.out = session, None

    @property
    def due(self) -> bool:
        """Whether it is out and it is time to look at it again."""
        return self.session is None and time.monotonic() >= self._next_look


BringUp = Callable[[Member, Health], Awaitable[None]]
"""Gives one server that answers the current weights; raises HocketError where that fails."""


class Members:
    """The servers of a run: who is up. Use it inside one event loop, and as `async with`.

    Args:
        urls: base URLs.
        token: bearer token of all of them.
        silence_s: a server whose /health is silent for so long is lost.
        start_timeout_s: how long to wait for a server while there is none.
        on_wait: told what is being waited for, and for how many seconds already.
        say: told when a server is lost or comes back.

    Attributes:
        silence_s: as given.
        bring_up: set by who publishes weights; None: servers work with what they hold.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        token: str | None = None,
        silence_s: float = 60.0,
        start_timeout_s: float = 600.0,
        on_wait: Callable[[str, float], None] = lambda what, seconds: None,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.members = [Member(ServerClient(url, token=token)) for url in urls]
        self.bring_up: BringUp | None = None
        self.silence_s = silence_s
        self._start_timeout_s = start_timeout_s
        self._on_wait = on_wait
        self._say = say

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            for member in self.members:
                await stack.enter_async_context(member.server)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._stack.aclose()

    @property
    def up(self) -> list[Member]:
        """The servers that may be given work."""
        return [member for member in self.members if member.session is not None]

    @property
    def kv_tokens(self) -> int:
        """Tokens that the KV caches of all servers hold together; 0 until one has answered."""
        return sum(member.kv_tokens for member in self.members)

    async def wait_up(self) -> list[Member]:
        """Brings up every server that has come (back), and returns those that may work: at least one, if it has any.

        Raises:
            ServerError: none came within start_timeout_s, or one refused the token.
        """
        start = time.monotonic()
        while True:
            await self.look_at_all()
            if self.up or not self.members:
                return self.up
            waited = time.monotonic() - start
            if waited > self._start_timeout_s:
                reasons = "; ".join(f"{member.url}: {member.out}" for member in self.members)
                raise ServerError(
                    f"gave up after {waited:.0f} s of waiting for a server ({reasons}). Start one with "
                    f"`python run.py serve CONFIG`, or set server.urls and server.start_timeout_s",
                    code="timeout",
                )
            self._on_wait(f"waiting for {' or '.join(f'{m.url} ({m.out})' for m in self.members)}", waited)
            await asyncio.sleep(POLL_S)

    async def look_at_all(self) -> None:
        """Looks at every server that is out and due, and brings it up where it is well. Raises as `wait_up`."""
        looks = [self._look(member) for member in self.members if member.due]
        for failure in await asyncio.gather(*looks, return_exceptions=True):
            if failure is not None:
                raise failure

    async def _look(self, member: Member) -> None:
        """Asks a server how it is, and brings it up where it is well enough to be given weights."""
        start = time.monotonic()
        try:
            await self._ask_and_bring_up(member)
        except ServerError as error:
            if error.status in (401, 403):
                raise
            member.take_out("nothing answers there yet" if error.code == "unreachable" else str(error))
        except SyncError as error:
            member.take_out(str(error))
            if not self.up:
                raise
            self._say(f"server {member.url} is left out: {error}")
        if member.session is None:
            spent = time.monotonic() - start
            member.rest(max(POLL_S, spent / LOOKING_SHARE if self.up else spent))

    async def _ask_and_bring_up(self, member: Member) -> None:
        known = member.out
        health = await member.server.health(timeout_s=LOOK_S)
        member.kv_tokens = health.kv_tokens
        # A failed load is mended by the next one that succeeds; of any other failure a server does not recover.
        if health.status == "failed" and (health.error is None or health.error.code != "reload_failed"):
            member.take_out(f"it failed: {health.error.message if health.error else 'it does not say why'}")
        elif health.status in ("loading", "updating"):
            member.take_out(f"it is {health.status}")
        elif self.bring_up is None:
            member.holds(health.session)
        else:
            await self.bring_up(member, health)
        if member.session is not None and known is not None and len(self.members) > 1:
            self._say(f"server {member.url} is there")

    def lose(self, member: Member, reason: str) -> None:
        """Takes a server out that was working, and says so."""
        if member.session is not None:
            self._say(f"lost server {member.url}: {reason}")
        member.take_out(reason)
