"""Keep track of a run's servers: bring up the well ones, watch the busy ones, wait for the first.

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

MAX_LOSSES = 3  # lost servers after which a turn or episode is itself the likely cause
POLL_S = 0.25  # seconds between looks while no server is up
LOOK_S = 3.0  # seconds that a server has to answer a look
LOST_REST_S = 1.0  # seconds before a lost server is looked at again
LOOKING_SHARE = 0.1  # share of the time that looks at resting servers may take while others work


class Deadline:
    """The time by which a batch must be generated. A pool stops the clock while no server is up."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._at = time.monotonic() + seconds
        self._stopped_at: float | None = None

    @property
    def left_s(self) -> float:
        """Seconds until the deadline, 0 once it has passed."""
        now = time.monotonic() if self._stopped_at is None else self._stopped_at
        return max(0.0, self._at - now)

    @property
    def over(self) -> bool:
        """Whether the deadline has passed."""
        return self.left_s == 0

    def stop(self) -> None:
        """Stop the clock. Does nothing if it stands still already."""
        if self._stopped_at is None:
            self._stopped_at = time.monotonic()

    def go_on(self) -> None:
        """Start the clock again. Does nothing if it runs already."""
        if self._stopped_at is not None:
            self._at += time.monotonic() - self._stopped_at
            self._stopped_at = None


Look = Callable[[Member], Awaitable[Health]]
"""Asks a server how it is. Raises ServerError where this run can't have the server."""
BringUp = Callable[[Mapping[Member, Health]], Awaitable[None]]
"""Gives servers the current weights, checks them, and marks each of them loaded, lost or waiting.

Those that are loaded work once it has returned. Raises HocketError where one of them fails.
"""


async def _health(member: Member) -> Health:
    return await member.server.health(timeout_s=LOOK_S)


@dataclasses.dataclass(eq=False)
class ServerPool:
    """The servers of a run. Use it by `async with`.

    discover.py changes its list of servers, take_over.py claims them for one trainer.

    Example:
        >>> async def main() -> None:
        ...     async with ServerPool(["http://127.0.0.1:8000"], start_timeout_s=60.0) as pool:
        ...         for member in await pool.wait_up():
        ...             print(member.url, member.state.value)
        >>> asyncio.run(main())
        http://127.0.0.1:8000 up
    """

    urls: dataclasses.InitVar[Sequence[str]]
    _: dataclasses.KW_ONLY
    token: dataclasses.InitVar[str | None] = None  # bearer token that every server wants
    trainer: dataclasses.InitVar[str | None] = None  # id of this trainer, sent with every request
    silence_s: float = 60.0  # seconds without an answer of /health after which a server is lost
    start_timeout_s: float = 600.0  # seconds without any server after which the run is given up
    # Called again and again while no server is up, with the reason and the seconds waited so far.
    on_wait: Callable[[str, float], None] = lambda message, waited_s: None
    say: Callable[[str], None] = lambda line: None  # prints a line

    def __post_init__(self, urls: Sequence[str], token: str | None, trainer: str | None) -> None:
        self._client = functools.partial(ServerClient, token=token, trainer=trainer)
        self.members: list[Member] = []
        # Whether the settings name each server. Then a server that can't be used is a mistake.
        self.is_listed = True
        self.not_found = ""  # why discovery finds no server; "" while it does
        # Hooks: take_over.py replaces the first two, commands/parts.py the last two.
        self.look: Look = _health
        # Ends the pool's work, and frees servers that a trainer has claimed.
        self.release: Callable[[], Awaitable[None]] = self.cancel_tasks
        self.bring_up: BringUp = self._with_their_weights
        self.on_change: Callable[[], None] = lambda: None  # called when a server is lost or joins
        self._repeated: list[tuple[float, Callable[[], Awaitable[None]]]] = []
        self._reported: set[str] = set()  # lines about servers left out: each is said once
        self._looking = asyncio.Lock()
        # How many turns or episodes wait with each deadline; it stops while no server is up.
        self._deadlines = Counter[Deadline]()
        self._tasks: set[asyncio.Task[None]] = set()
        for url in urls:
            self.add(url)

    async def __aenter__(self) -> "ServerPool":
        for seconds, work in self._repeated:
            self.start(self._again(seconds, work))
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.cancel_tasks()
        for member in self.members:
            await member.server.close()

    # Tasks

    def start(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Start a task that is cancelled when the pool is closed."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def cancel_tasks(self) -> None:
        """Cancel the tasks of `start` and `repeat`, and wait until they have ended."""
        while self._tasks:  # a task that ends may start another
            await cancel(list(self._tasks))
            await asyncio.sleep(0)  # lets their callbacks discard them

    def repeat(self, seconds: float, work: Callable[[], Awaitable[None]]) -> None:
        """Repeat work while the pool is open, with a pause of so many seconds."""
        self._repeated.append((seconds, work))

    async def _again(self, seconds: float, work: Callable[[], Awaitable[None]]) -> None:
        while True:
            await work()
            await asyncio.sleep(seconds)

    # Members and their states

    def add(self, url: str) -> None:
        """Add a server. The next look brings it up."""
        self.members.append(Member(self._client(url)))

    async def drop(self, member: Member) -> None:
        """Forget a server and close its connections."""
        self.members.remove(member)
        await member.server.close()

    @property
    def up(self) -> list[Member]:
        """The servers that may work now."""
        return [member for member in self.members if member.is_up]

    def states(self) -> list[ServerRow]:
        """Describe all servers for people."""
        return [member.shown() for member in self.members]

    def _move(self, member: Member, state: State, reason: str | None = None) -> None:
        """Move a server to another state, and stop or restart the deadlines.

        Deadlines stop when the last server goes down, and go on when the first one is up again.
        """
        member.move(state, reason)
        for deadline in self._deadlines:
            self._stop_if_down(deadline)

    def _stop_if_down(self, deadline: Deadline) -> None:
        if self.up:
            deadline.go_on()
        else:
            deadline.stop()

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

    # Looks at servers that rest

    async def wait_up(self) -> list[Member]:
        """Wait until a server is up, and return all that may work.

        Servers that have joined or come back are brought up first.

        Raises:
            ServerError: No server was up for start_timeout_s, or a server that the settings list
                has another model or wants another token.
        """
        await self.look_at_all()
        start = time.monotonic()
        # A pool that lists its servers and has dropped them all waits for nothing.
        while not self.up and (self.members or not self.is_listed):
            waited = time.monotonic() - start
            names = " or ".join(f"{member.url} ({member.reason})" for member in self.members)
            waiting = f"waiting for {names or f'a server ({self.not_found})'}"
            if waited > self.start_timeout_s:
                raise ServerError(
                    f"gave up after {waited:.0f} s of {waiting}. Start one with "
                    f"`{program()} serve CONFIG`, correct server.urls or server.discover, or raise "
                    "server.start_timeout_s",
                    code="timeout",
                )
            self.on_wait(
                f"{waiting}; if none is starting, start one: {program()} serve CONFIG", waited
            )
            await asyncio.sleep(POLL_S)
            await self.look_at_all()
        return self.up

    async def look_at_all(self) -> None:
        """Look at the servers that are due, and bring up the well ones. Raises as `wait_up`."""
        if self._looking.locked():
            return  # another task looks already
        async with self._looking:
            now = time.monotonic()
            due = [
                member for member in self.members if member.is_resting and now >= member.next_look
            ]
            for member in due:
                self._move(member, State.JOINING, member.reason)
            try:
                await self._look_at(due)
            finally:
                # A look may end early, by an error or a cancelled task: no server stays joining.
                for member in due:
                    if member.is_joining:
                        self._move(member, State.WAITING, "the look at it was broken off")

    async def _look_at(self, due: Sequence[Member]) -> None:
        answers = await asyncio.gather(*map(self._ask, due))
        well: dict[Member, Health] = {}
        for member, answer in zip(due, answers, strict=True):
            if member.state is not State.JOINING:
                continue  # something marked it lost meanwhile
            if isinstance(answer, ServerError):
                self._set_aside(member, answer)
            elif self._admits(member, answer):
                well[member] = answer
        if well:
            await self._bring_up(well)
            self.on_change()

    async def _ask(self, member: Member) -> Health | ServerError:
        start = time.monotonic()
        try:
            return await self.look(member)
        except ServerError as error:
            return error
        finally:
            self._rest(member, since=start)

    def _rest(self, member: Member, *, since: float) -> None:
        """Set the next look at a server that was looked at from `since` (time.monotonic) to now.

        While others work, the pause is ten times as long as the look was, as they wait for looks.
        """
        now = time.monotonic()
        pause = now - since
        if self.up:
            pause /= LOOKING_SHARE
        member.next_look = now + max(POLL_S, pause)

    def _admits(self, member: Member, health: Health) -> bool:
        """Note the answer of a server; return whether it can be brought up.

        If it can't, the server is moved to the state that says why not.
        """
        # Two addresses of one process: it would count twice in the load. The member's own session
        # was forgotten when the look began.
        for other in self.members:
            if other.session == health.session:
                error = ServerError(f"it is {other.url} under another name", code="same_server")
                self._set_aside(member, error)
                return False

        member.session = health.session
        member.health = health
        if health.error is not None and health.error.code not in CURABLE:
            self._move(member, State.WAITING, f"it failed: {health.error.message}")
        elif health.status == "updating":
            self._move(member, State.WAITING, "it is updating")
        return member.state is State.JOINING

    async def _bring_up(self, healths: Mapping[Member, Health]) -> None:
        """Bring up servers together or, where that fails, one by one."""
        start = time.monotonic()
        try:
            if len(healths) > 1 and await self._error_of_bringing_up(healths) is None:
                return
            # Which one has failed shows when each is brought up alone.
            for member, health in healths.items():
                if member.state is not State.JOINING:
                    continue
                error = await self._error_of_bringing_up({member: health})
                if error is not None and member.state is State.JOINING:
                    self._set_aside(member, error)
        finally:
            for member in healths:
                self._rest(member, since=start)

    async def _error_of_bringing_up(
        self, healths: Mapping[Member, Health]
    ) -> ServerError | SyncError | None:
        """Bring up servers together, so that they work from now on.

        If that fails, none of them works, and the error is returned.
        """
        error: ServerError | SyncError | None = None
        try:
            await self.bring_up(healths)
        except (ServerError, SyncError) as failure:
            error = failure
        for member in healths:
            if member.state is State.CHECKING and error is None:
                self._move(member, State.UP)
            elif member.state is State.CHECKING:
                self._move(member, State.JOINING, str(error))
        return error

    async def _with_their_weights(self, healths: Mapping[Member, Health]) -> None:
        """Take servers with the weights that they have, in a run that publishes none."""
        for member, health in healths.items():
            self.mark_loaded(member, health)

    def _set_aside(self, member: Member, error: ServerError | SyncError) -> None:
        """Note why a server can't be used. Where waiting won't help, say it once or end the run."""
        if isinstance(error, ServerError) and not error.foreign:
            if error.code == "unreachable":
                self._move(member, State.WAITING, "nothing answers there yet")
                return
            if error.code not in ("protocol", "same_server"):
                self._move(member, State.WAITING, str(error))
                return

        self._move(member, State.LEFT_OUT, str(error))
        if self._ends_run(member, error):
            raise error
        line = f"server {member.url} is left out: {error}"
        if line not in self._reported:
            self._reported.add(line)
            self.say(line)

    def _ends_run(self, member: Member, error: ServerError | SyncError) -> bool:
        """Check whether a server that is left out ends the run."""
        if isinstance(error, SyncError):
            return not self.up
        if error.foreign:
            return self.is_listed  # one that is discovered may be another run's
        # A proxy answers 5xx while a server starts, and anything while one starts again.
        is_only_one = self.is_listed and len(self.members) == 1 and member.health is None
        return is_only_one and error.status in (None, 404)

    # Servers at work

    def mark_loaded(self, member: Member, answer: Health | ReloadResponse) -> None:
        """Note that a server holds the current weights.

        One that joins works once `bring_up` has returned. One that was lost meanwhile stays lost.
        """
        if member.state is State.JOINING:
            self._move(member, State.CHECKING, "its weights are being checked")
        if member.is_loaded:
            member.session = answer.session
            member.version = answer.version

    def mark_waiting(self, member: Member, reason: str) -> None:
        """Have a server that joins looked at again soon."""
        if member.state is State.JOINING:
            self._move(member, State.WAITING, reason)

    def mark_lost(self, member: Member, reason: str) -> None:
        """Give a server no more work until a look finds it well. A resting one stays as it is."""
        if member.is_resting:
            return
        was_loaded = member.is_loaded
        self._move(member, State.LOST, reason)
        member.next_look = time.monotonic() + LOST_REST_S  # the others get its work first
        if was_loaded:
            self.say(f"lost server {member.url}: {reason}")
            self.on_change()

    def loses(self, member: Member, error: ServerError) -> bool:
        """Mark a server lost if an error at work means that. Returns whether it does."""
        lost = error.outcome is ErrorOutcome.LOST
        if lost and member.is_up:  # a server that is not up was lost before, or is looked at again
            self.mark_lost(member, str(error))
        return lost

    async def watched(self, member: Member, work: Coroutine[Any, Any, None]) -> None:
        """Run a server's work. Raises ServerError once its /health is silent."""
        tasks = [asyncio.create_task(work), asyncio.create_task(self._watch(member))]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()  # raises what the work or the watch raised
        finally:
            await cancel(tasks)

    async def _watch(self, member: Member) -> None:
        """Ask for a server's health, until it has been silent for silence_s."""
        last_answer = time.monotonic()
        while True:
            await asyncio.sleep(min(5.0, self.silence_s / 4))
            # A failed request alone means nothing: a busy server may answer the next one.
            with contextlib.suppress(ServerError):
                await member.server.health(timeout_s=min(HEALTH_TIMEOUT_S, self.silence_s))
                last_answer = time.monotonic()
            if time.monotonic() - last_answer > self.silence_s:
                raise ServerError(f"it has not answered for {self.silence_s:g} s", code="timeout")
