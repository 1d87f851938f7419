"""Keep track of a run's servers: which are up, that is hold the current weights, how loaded, and which are lost."""

import asyncio
import contextlib
import dataclasses
import functools
import math
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from hocket.client.server import HEALTH_TIMEOUT_S, ServerClient
from hocket.common.tasks import cancel
from hocket.errors import Outcome, ServerError, SyncError, door
from hocket.protocol import CURABLE, Health, HeartbeatRequest, ReloadResponse

LOAD = {"status", "in_flight", "waiting", "kv_use", "kv_tokens"}  # fields of Health
MAX_LOSSES = 3  # of servers under a turn or episode, the likely cause
POLL_S = 0.25
LOOK_S = 3.0
LOST_REST_S = 1.0
BEAT_S = 5.0  # between heartbeats
FIND_S = 5.0  # between look-ups
LOOKING_SHARE = 0.1  # of the time that looks at lost servers may cost


class Deadline:
    """When a batch must be generated; time without a server does not count."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._at = time.monotonic() + seconds
        self._stops = 0
        self._stopped_at = math.inf

    @property
    def left_s(self) -> float:
        return max(0.0, self._at - min(self._stopped_at, time.monotonic()))

    @property
    def over(self) -> bool:
        return self.left_s == 0

    @contextmanager
    def stopped(self) -> Iterator[None]:
        self._stops += 1
        self._stopped_at = min(self._stopped_at, time.monotonic())
        try:
            yield
        finally:
            self._stops -= 1
            if self._stops == 0:
                self._at += time.monotonic() - self._stopped_at
                self._stopped_at = math.inf


@dataclasses.dataclass(eq=False, slots=True)
class Member:
    server: ServerClient
    session: str | None = None  # of the process with the current weights; None: out
    version: int = 0  # of its weights, when it was last up
    in_flight: int = 0  # tokens of unfinished turns and sessions, at most
    out: str | None = None  # why it gets no work
    seen: str | None = None  # its session
    kv_tokens: int = 0  # of its KV cache
    dtype: str = ""
    next_look: float = 0.0  # by time.monotonic, while it is out
    held: bool = False  # it has worked for this trainer
    health: Health | None = None  # its last one, by its heartbeat

    @property
    def url(self) -> str:
        return self.server.url

    def state(self) -> dict[str, Any]:
        """Return what is known, for people."""
        load = self.health.model_dump(include=LOAD) if self.health else {}
        return {"url": self.url, "up": self.session is not None, "out": self.out, "version": self.version, **load}

    def mark_ready(self, said: Health | ReloadResponse) -> None:
        self.session = said.session
        self.version = said.version
        self.out = None

    def mark_out(self, reason: str) -> None:
        self.session = None
        self.seen = None
        self.out = reason


Find = Callable[[], Awaitable[Sequence[str]]]
"""Looks up base URLs; raises ServerError where it finds none."""
BringUp = Callable[[Mapping[Member, Health]], Awaitable[None]]
"""Gives servers the current weights; raises HocketError where one fails."""


async def _as_they_are(there: Mapping[Member, Health]) -> None:
    for member, health in there.items():
        member.mark_ready(health)


@dataclasses.dataclass(eq=False)
class ServerPool:
    """The servers of a run. Use it by `async with`."""

    urls: dataclasses.InitVar[Sequence[str]]
    _: dataclasses.KW_ONLY
    find: Find | None = None  # None: `urls` stay
    token: dataclasses.InitVar[str | None] = None  # bearer token
    trainer: str | None = None  # its id, if this is one
    take_over: bool = False  # from other trainers, once each
    silence_s: float = 60.0  # of /health, after which a server is lost
    start_timeout_s: float = 600.0  # without a server
    on_wait: Callable[[str, float], None] = lambda what, seconds: None
    say: Callable[[str], None] = lambda line: None

    def __post_init__(self, urls: Sequence[str], token: str | None) -> None:
        self._client = functools.partial(ServerClient, token=token, trainer=self.trainer)
        self.members = [Member(self._client(url)) for url in urls]
        self._not_found: str | None = "none is found yet"  # why the last look-up failed
        self.bring_up: BringUp = _as_they_are  # with the weights they hold
        self.on_change: Callable[[], None] = lambda: None  # a server was lost, or came (back)
        self._told: set[str] = set()  # of what is left out
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> "ServerPool":
        if self.find is not None:
            self.start(self._again(FIND_S, self._look_up))
        if self.trainer is not None:
            self.start(self._again(BEAT_S, self._tell))
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        while self._tasks:  # a task that ends may start another
            await cancel([*self._tasks])
            await asyncio.sleep(0)  # until they are discarded
        for member in self.members:
            await member.server.close()

    def start(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _again(self, seconds: float, work: Callable[[], Awaitable[None]]) -> None:
        while True:
            await work()
            await asyncio.sleep(seconds)

    async def release(self) -> None:
        await self._tell(leaving=True)

    async def _tell(self, **news: bool) -> None:
        beats = [self._beat(member, **news) for member in self.members if member.held]
        await asyncio.gather(*beats, return_exceptions=True)

    async def _beat(self, member: Member, **news: bool) -> Health:
        assert self.trainer is not None
        request = HeartbeatRequest(trainer=self.trainer, **news)
        member.health = await member.server.ask(request, timeout_s=LOOK_S)
        return member.health

    async def _look_up(self) -> None:
        assert self.find is not None
        try:
            await self._update(await self.find())
            self._not_found = None
        except Exception as error:  # noqa: BLE001 - the run goes on with what it has
            if self._not_found is None:
                self.say(f"{error}. Those known so far are kept")
            self._not_found = str(error)

    async def _update(self, urls: Sequence[str]) -> None:
        """Add servers; drop those that have left and are out: a scheduler also takes out one that is slow to answer."""
        known = {member.url for member in self.members}
        self.members += [Member(self._client(url)) for url in dict.fromkeys(urls) if url not in known]
        for member in [*self.members]:
            idle = member.session is None and not member.in_flight and member.next_look < math.inf
            if idle and member.url not in urls:
                self.members.remove(member)
                self.say(f"server {member.url} has left: {member.out}")
                await member.server.close()

    @property
    def up(self) -> list[Member]:
        return [member for member in self.members if member.session is not None]

    def states(self) -> list[dict[str, Any]]:
        return [member.state() for member in self.members]

    async def wait_up(self, *deadlines: Deadline) -> list[Member]:
        """Bring up what has come (back) and return who may work; deadlines stop while none may.

        Raises ServerError after start_timeout_s, or where one of a fixed list has another model or token.
        """
        await self.look_at_all()
        start = time.monotonic()
        with contextlib.ExitStack() as stack:
            for deadline in deadlines:
                stack.enter_context(deadline.stopped())
            while not self.up and (self.members or self.find):
                waited = time.monotonic() - start
                names = " or ".join(f"{member.url} ({member.out})" for member in self.members)
                what = f"waiting for {names or f'a server ({self._not_found})'}"
                if waited > self.start_timeout_s:
                    raise ServerError(
                        f"gave up after {waited:.0f} s of {what}. Start one with `{door()} serve CONFIG`, correct "
                        f"server.urls or server.discover, or raise server.start_timeout_s",
                        code="timeout",
                    )
                self.on_wait(f"{what}; if none is starting, start one: {door()} serve CONFIG", waited)
                await asyncio.sleep(POLL_S)
                await self.look_at_all()
        return self.up

    async def look_at_all(self) -> None:
        """Look at servers that are due, and bring up the well ones. Raises as `wait_up`."""
        now = time.monotonic()
        due = [member for member in self.members if member.session is None and now >= member.next_look]
        found = zip(due, await asyncio.gather(*map(self._look, due)), strict=True)
        there = {member: health for member, health in found if health is not None}
        if there:
            await self._bring_up(there)
            self.on_change()

    async def _look(self, member: Member) -> Health | None:
        """Return the health of a server to bring up; else note why it is out."""
        with self._looking(member):
            if self.trainer is None:
                health = await member.server.health(timeout_s=LOOK_S)
            else:
                health = await self._beat(member, take_over=self.take_over and not member.held)
                member.held = True
            twin = next((one for one in self.members if one.seen == health.session), member)
            if twin is not member:
                raise ServerError(f"it is {twin.url} under another name", code="same_server")
            member.seen = health.session
            member.kv_tokens = health.kv_tokens
            member.dtype = health.dtype
            failure = health.error
            member.out = "it is updating" if health.status == "updating" else None
            if failure is not None and failure.code not in CURABLE:
                member.out = f"it failed: {failure.message}"
        return health if member.out is None else None

    async def _bring_up(self, there: Mapping[Member, Health]) -> None:
        """Bring up servers together or, where that fails, one by one."""
        with self._looking(*there):
            try:
                await self.bring_up(there)
            except (ServerError, SyncError) as error:
                if len(there) == 1:
                    raise
                for member in there:
                    member.mark_out(str(error))
                for member, health in there.items():
                    await self._bring_up({member: health})

    @contextmanager
    def _looking(self, *members: Member) -> Iterator[None]:
        """Mark servers as looked at; then note the failure, which is of one alone, and when they are due."""
        start = time.monotonic()
        for member in members:
            member.next_look = math.inf
        try:
            yield
        except (ServerError, SyncError) as error:
            self._leave_out(members[0], error)
        finally:
            now = time.monotonic()
            rest = max(POLL_S, (now - start) / (LOOKING_SHARE if self.up else 1))
            for member in members:
                member.next_look = now + rest

    def _leave_out(self, member: Member, error: ServerError | SyncError) -> None:
        """Note why a server can't be used; where waiting won't help, say it once or end the run."""
        member.mark_out(str(error))
        if isinstance(error, SyncError):
            ends_run = not self.up
        elif error.foreign:
            ends_run = self.find is None  # one that is found may be another run's
        elif error.code in ("protocol", "same_server"):  # a proxy answers 5xx while the server starts
            is_only_one = not (self.find or member.held) and len(self.members) == 1
            ends_run = is_only_one and error.status in (None, 404)
        else:
            if error.code == "unreachable":
                member.out = "nothing answers there yet"
            return
        if ends_run:
            raise error
        line = f"server {member.url} is left out: {error}"
        if line not in self._told:
            self._told.add(line)
            self.say(line)

    def mark_lost(self, member: Member, reason: str) -> None:
        was_up = member.session is not None
        member.mark_out(reason)
        member.next_look = time.monotonic() + LOST_REST_S  # the others get its work first
        if was_up:
            self.say(f"lost server {member.url}: {reason}")
            self.on_change()

    def loses(self, member: Member, error: ServerError) -> bool:
        """Return whether an error means that a server is lost, and mark it."""
        lost = error.outcome is Outcome.LOST
        if lost:
            self.mark_lost(member, str(error))
        return lost

    async def watched(self, member: Member, work: Coroutine[Any, Any, None]) -> None:
        """Run a server's work. Raises ServerError once its /health is silent."""
        tasks = [asyncio.create_task(work), asyncio.create_task(self._watch(member))]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            await cancel(tasks)

    async def _watch(self, member: Member) -> None:
        heard = time.monotonic()
        while True:
            await asyncio.sleep(min(5.0, self.silence_s / 4))
            with contextlib.suppress(ServerError):
                await member.server.health(timeout_s=min(HEALTH_TIMEOUT_S, self.silence_s))
                heard = time.monotonic()
            if time.monotonic() - heard > self.silence_s:
                raise ServerError(f"it has not answered for {self.silence_s:g} s", code="timeout")
