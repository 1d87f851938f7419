"""Keep track of a run's servers: bring up the well ones, watch those that work, wait while none is up.

The states of a server, and which may follow which, are in member.py. The pool alone moves a server.
"""

import asyncio
import contextlib
import dataclasses
import functools
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from hocket.client.member import Member, State
from hocket.client.server import HEALTH_TIMEOUT_S, ServerClient
from hocket.common.tasks import cancel
from hocket.errors import ErrorOutcome, ServerError, SyncError, program
from hocket.formats import ServerRow
from hocket.protocol import CURABLE, Health, ReloadResponse

MAX_LOSSES = 3  # of servers under a turn or episode, the likely cause
POLL_S = 0.25
LOOK_S = 3.0
LOST_REST_S = 1.0
LOOKING_SHARE = 0.1  # of the time that looks at servers that are out may cost those that are up


class Deadline:
    """When a batch must be generated; a pool stops it while no server is up."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._at = time.monotonic() + seconds
        self._stopped_at: float | None = None

    @property
    def left_s(self) -> float:
        now = time.monotonic() if self._stopped_at is None else self._stopped_at
        return max(0.0, self._at - now)

    @property
    def over(self) -> bool:
        return self.left_s == 0

    def stop(self) -> None:
        if self._stopped_at is None:
            self._stopped_at = time.monotonic()

    def go_on(self) -> None:
        if self._stopped_at is not None:
            self._at += time.monotonic() - self._stopped_at
            self._stopped_at = None


Look = Callable[[Member], Awaitable[Health]]
"""Asks a server how it is. Raises ServerError where this run can't have it."""
BringUp = Callable[[Mapping[Member, Health]], Awaitable[None]]
"""Gives servers the current weights, and marks each up, lost or waiting; raises HocketError where one fails."""


async def _health(member: Member) -> Health:
    return await member.server.health(timeout_s=LOOK_S)


async def _release_nothing() -> None:
    """Do nothing: without a trainer's id no server is claimed."""


@dataclasses.dataclass(eq=False)
class ServerPool:
    """The servers of a run. Use it by `async with`.

    discover.py changes its list, take_over.py claims its servers for one trainer.
    """

    urls: dataclasses.InitVar[Sequence[str]]
    _: dataclasses.KW_ONLY
    token: dataclasses.InitVar[str | None] = None  # bearer token
    trainer: dataclasses.InitVar[str | None] = None  # its id, which requests have
    silence_s: float = 60.0  # of /health, after which a server is lost
    start_timeout_s: float = 600.0  # without a server
    on_wait: Callable[[str, float], None] = lambda what, seconds: None
    say: Callable[[str], None] = lambda line: None

    def __post_init__(self, urls: Sequence[str], token: str | None, trainer: str | None) -> None:
        self._client = functools.partial(ServerClient, token=token, trainer=trainer)
        self.members: list[Member] = []
        self.is_listed = True  # the settings name each server: one that can't be used is a mistake
        self.not_found = ""  # why there is none, where they do not
        self.look: Look = _health
        self.release: Callable[[], Awaitable[None]] = _release_nothing  # to other trainers
        self.bring_up: BringUp = self._with_their_weights
        self.on_change: Callable[[], None] = lambda: None  # a server was lost, or came (back)
        self._repeated: list[tuple[float, Callable[[], Awaitable[None]]]] = []
        self._said: set[str] = set()  # of those left out
        self._looking = asyncio.Lock()
        self._is_down = True  # no server is up
        self._deadlines = Counter[Deadline]()  # which stop then; how many wait with each
        self._tasks: set[asyncio.Task[None]] = set()
        for url in urls:
            self.add(url)

    async def __aenter__(self) -> "ServerPool":
        for seconds, work in self._repeated:
            self.start(self._again(seconds, work))
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

    def repeat(self, seconds: float, work: Callable[[], Awaitable[None]]) -> None:
        """Have something done while the pool is used, again and again after so many seconds."""
        self._repeated.append((seconds, work))

    async def _again(self, seconds: float, work: Callable[[], Awaitable[None]]) -> None:
        while True:
            await work()
            await asyncio.sleep(seconds)

    def add(self, url: str) -> None:
        self.members.append(Member(self._client(url)))

    async def drop(self, member: Member) -> None:
        self.members.remove(member)
        await member.server.close()

    @property
    def up(self) -> list[Member]:
        return [member for member in self.members if member.is_up]

    def states(self) -> list[ServerRow]:
        return [member.shown() for member in self.members]

    def _move(self, member: Member, state: State, reason: str | None = None) -> None:
        """Move a server to another state. Deadlines stop when none is up any more, and go on with the first."""
        member.move(state, reason)
        self._is_down = not self.up
        for deadline in self._deadlines:
            self._stop_if_down(deadline)

    def _stop_if_down(self, deadline: Deadline) -> None:
        if self._is_down:
            deadline.stop()
        else:
            deadline.go_on()

    @contextmanager
    def waiting(self, deadline: Deadline) -> Iterator[None]:
        """Stop a deadline whenever no server is up, while the body waits for a server's work."""
        self._deadlines[deadline] += 1
        self._stop_if_down(deadline)
        try:
            yield
        finally:
            self._deadlines[deadline] -= 1
            if not self._deadlines[deadline]:
                del self._deadlines[deadline]
                deadline.go_on()

    async def wait_up(self) -> list[Member]:
        """Bring up what has come (back) and return who may work.

        Raises ServerError after start_timeout_s, or where one of a fixed list has another model or token.
        """
        await self.look_at_all()
        start = time.monotonic()
        while not self.up and (self.members or not self.is_listed):
            waited = time.monotonic() - start
            names = " or ".join(f"{member.url} ({member.reason})" for member in self.members)
            what = f"waiting for {names or f'a server ({self.not_found})'}"
            if waited > self.start_timeout_s:
                raise ServerError(
                    f"gave up after {waited:.0f} s of {what}. Start one with `{program()} serve CONFIG`, "
                    f"correct server.urls or server.discover, or raise server.start_timeout_s",
                    code="timeout",
                )
            self.on_wait(
                f"{what}; if none is starting, start one: {program()} serve CONFIG", waited
            )
            await asyncio.sleep(POLL_S)
            await self.look_at_all()
        return self.up

    async def look_at_all(self) -> None:
        """Look at servers that are due, and bring up the well ones. Raises as `wait_up`."""
        if self._looking.locked():
            return  # somebody looks already
        async with self._looking:
            now = time.monotonic()
            due = [
                member for member in self.members if member.is_resting and now >= member.next_look
            ]
            for member in due:
                self._move(member, State.JOINING, member.reason)
            try:
                answers = await asyncio.gather(*map(self._ask, due))
                there = {}
                for member, answer in zip(due, answers, strict=True):
                    if isinstance(answer, ServerError):
                        self._leave_out(member, answer)
                    elif self._is_well(member, answer):
                        there[member] = answer
                if there:
                    await self._bring_up(there)
                    self.on_change()
            finally:
                for member in due:
                    if member.state is State.JOINING:
                        self._move(member, State.WAITING, "the look at it was broken off")

    async def _ask(self, member: Member) -> Health | ServerError:
        start = time.monotonic()
        try:
            return await self.look(member)
        except ServerError as error:
            return error
        finally:
            self._rest(member, since=start)

    def _rest(self, member: Member, *, since: float) -> None:
        """Have a server looked at again after a pause, so that looks cost the others a tenth of their time."""
        now = time.monotonic()
        share = 1.0 if self._is_down else LOOKING_SHARE
        member.next_look = now + max(POLL_S, (now - since) / share)

    def _is_well(self, member: Member, health: Health) -> bool:
        """Check whether a server that answers can be brought up; else move it to the state that says why not."""
        twins = [one for one in self.members if one.session == health.session]
        if twins:
            error = ServerError(f"it is {twins[0].url} under another name", code="same_server")
            self._leave_out(member, error)
            return False
        member.session = health.session
        member.health = health
        if health.error is not None and health.error.code not in CURABLE:
            self._move(member, State.WAITING, f"it failed: {health.error.message}")
        elif health.status == "updating":
            self._move(member, State.WAITING, "it is updating")
        return member.state is State.JOINING

    async def _bring_up(self, there: Mapping[Member, Health]) -> None:
        """Bring up servers together or, where that fails, one by one."""
        start = time.monotonic()
        try:
            await self.bring_up(there)
        except (ServerError, SyncError) as error:
            for member in there:
                if member.is_up:  # it took the weights, but not all checks have passed
                    self._move(member, State.JOINING, str(error))
            for member, health in there.items():
                if member.state is not State.JOINING:
                    continue
                if len(there) == 1:
                    self._leave_out(member, error)
                else:
                    await self._bring_up({member: health})
        finally:
            for member in there:
                self._rest(member, since=start)

    async def _with_their_weights(self, there: Mapping[Member, Health]) -> None:
        for member, health in there.items():
            self.mark_up(member, health)

    def _leave_out(self, member: Member, error: ServerError | SyncError) -> None:
        """Note why a server can't be used; where waiting won't help, say it once or end the run."""
        if isinstance(error, SyncError):
            ends_run = not self.up
        elif error.foreign:
            ends_run = self.is_listed  # one that is discovered may be another run's
        elif error.code in ("protocol", "same_server"):
            # A proxy answers 5xx while a server starts, and anything while one starts again
            is_only_one = self.is_listed and len(self.members) == 1 and member.health is None
            ends_run = is_only_one and error.status in (None, 404)
        else:
            absent = error.code == "unreachable"
            self._move(member, State.WAITING, "nothing answers there yet" if absent else str(error))
            return
        self._move(member, State.LEFT_OUT, str(error))
        if ends_run:
            raise error
        line = f"server {member.url} is left out: {error}"
        if line not in self._said:
            self._said.add(line)
            self.say(line)

    def mark_up(self, member: Member, answer: Health | ReloadResponse) -> None:
        """Have a server work that holds the current weights, unless it was lost meanwhile."""
        if member.state is State.JOINING:
            self._move(member, State.UP)
        if member.is_up:
            member.session = answer.session
            member.version = answer.version

    def mark_waiting(self, member: Member, reason: str) -> None:
        """Have a server that joins looked at again soon."""
        if member.state is State.JOINING:
            self._move(member, State.WAITING, reason)

    def mark_lost(self, member: Member, reason: str) -> None:
        """Give a server no more work until a look finds it well; nothing where it has none."""
        if member.is_resting:
            return
        was_up = member.is_up
        self._move(member, State.LOST, reason)
        member.next_look = time.monotonic() + LOST_REST_S  # the others get its work first
        if was_up:
            self.say(f"lost server {member.url}: {reason}")
            self.on_change()

    def loses(self, member: Member, error: ServerError) -> bool:
        """Mark a server lost if an error at work means that. Returns whether it does."""
        lost = error.outcome is ErrorOutcome.LOST
        if lost and member.is_up:  # else it is out, or looked at again
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
