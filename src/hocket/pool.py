"""Several generation servers used as one: who plays what, and what becomes of it.

Work goes to the server with the fewest tokens in flight, whole prompts at a time. What a lost server had not finished
is played again, by the others or by itself when it is back.
"""

import asyncio
import contextlib
import dataclasses
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from hocket.client import HEALTH_TIMEOUT_S
from hocket.errors import ServerError
from hocket.members import POLL_S, Member, Members
from hocket.protocol import AgentRecord, Completion, SamplingParams, SessionResponse, Toolbox

MAX_LOSSES = 3
"""A completion or an episode on which so many servers were lost is not played again: it may be what they die of."""

MAX_PROMPTS = 256
"""In one request: below what a server takes (server.max_prompts)."""
MAX_SAMPLES = 64
"""Of one prompt, as one item of a request (server.max_n); a prompt with more is asked for one by one."""

Pair = tuple[int, int]
"""(prompt index, sample index) of one completion."""

_GONE = {"unreachable", "timeout", "cut", "protocol", "other_session", "engine_dead", "reload_failed", "shutting_down"}
"""Codes of errors after which a server is no use until somebody has looked at it again."""
_AGAIN = {"aborted", "asleep"}
"""Codes of errors of requests that were ended for others to go first."""


class ServerPool(Members):
    """Plays on the servers that are up."""

    @asynccontextmanager
    async def session(self, sampling: SamplingParams, *, tokens: int, **bounds: Any) -> AsyncIterator["Session"]:
        """Opens a session on the server with the fewest tokens in flight, which it leaves with the body's end.

        Args:
            sampling: of each call.
            tokens: how many to count as in flight.
            bounds: the other fields of a SessionRequest.

        Raises:
            ServerError: refused, or no server is left and none came back.
        """
        await self.look_at_all()
        waited_s = 0.0
        while True:
            start = time.monotonic()
            up = self.up or await self.wait_up()
            waited_s += time.monotonic() - start
            member = min(up, key=lambda member: member.in_flight)
            member.in_flight += tokens  # already here: others that open one at the same time go elsewhere
            try:
                if (session := await self._open(member, sampling, bounds)) is None:
                    continue
                session.waited_s = waited_s
                try:
                    yield session
                finally:
                    if session.open:
                        with contextlib.suppress(ServerError):  # nobody asks for its calls any more
                            await session.close()
                return
            finally:
                member.in_flight -= tokens

    async def _open(self, member: Member, sampling: SamplingParams, bounds: Mapping[str, Any]) -> "Session | None":
        """Opens a session on one server; None where that is lost."""
        try:
            opened = await member.server.open_session(
                sampling, session=member.session, timeout_s=self.silence_s, **bounds
            )
        except ServerError as error:
            if error.code not in _GONE:
                raise
            self.lose(member, str(error))
            return None
        return Session(self, member, opened)

    async def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams,
        *,
        n: int = 1,
        timeout_s: float,
        seeds: Sequence[Sequence[int]] | None = None,
        tools: Toolbox | None = None,
    ) -> AsyncIterator[tuple[int, int, Completion]]:
        """Yields (prompt index, sample index, completion) as the servers finish them, each pair exactly once.

        The same seed gives every pair the same random numbers, whichever server plays it and how often.

        Args:
            prompts: token ids of each prompt.
            n: completions per prompt.
            timeout_s: deadline for all of them.
            seeds: of each prompt, one per completion, instead of sampling.seed.
            tools: calls of these are looked for in the completions.

        Raises:
            ServerError: refused, not finished in time, or no server is left and none came back.
        """
        if seeds is None and sampling.seed is not None:
            seeds = [[(sampling.seed + i * n + j) % 2**63 for j in range(n)] for i in range(len(prompts))]
        sampling = sampling.model_copy(update={"seed": None})
        end = time.monotonic() + timeout_s
        work = _Work(prompts=prompts, sampling=sampling, n=n, end=end, seeds=seeds, tools=tools)
        waiting = [(i, j) for i in range(len(prompts)) for j in range(n)]
        left = len(waiting)
        events: asyncio.Queue[tuple[int, int, Completion] | _Lost | Exception] = asyncio.Queue()
        tasks: set[asyncio.Task[None]] = set()
        try:
            await self.look_at_all()
            while left:
                if waiting:
                    start = time.monotonic()
                    up = self.up or await self.wait_up()
                    work.end += time.monotonic() - start  # nobody could have played then
                    for member, pairs in _shares(up, waiting, work):
                        tasks.add(asyncio.create_task(self._play(member, pairs, work, events)))
                    waiting = []
                event = await events.get()
                if isinstance(event, Exception):
                    raise event
                if isinstance(event, _Lost):
                    work.count(event)
                    waiting = event.pairs
                    continue
                left -= 1
                yield event
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _play(
        self,
        member: Member,
        pairs: Sequence[Pair],
        work: "_Work",
        events: "asyncio.Queue[tuple[int, int, Completion] | _Lost | Exception]",
    ) -> None:
        """Has one server play its share; where it is lost, hands back what is left of it."""
        todo = dict.fromkeys(pairs)

        async def stream() -> None:
            async for i, j, completion in _ask(member, pairs, work):
                del todo[i, j]
                member.in_flight -= work.tokens(i)
                events.put_nowait((i, j, completion))

        member.in_flight += sum(work.tokens(i) for i, _ in pairs)
        try:
            await _first(stream(), self._watch(member))
        except ServerError as error:
            if time.monotonic() >= work.end or error.code not in _GONE | _AGAIN:
                events.put_nowait(error)
                return
            if error.code in _GONE:
                self.lose(member, str(error))
            else:
                await asyncio.sleep(POLL_S)
            events.put_nowait(_Lost(pairs=list(todo), error=error))
        except Exception as error:  # noqa: BLE001 - whatever it is, `generate` raises it and does not wait for ever
            events.put_nowait(error)
        finally:
            member.in_flight -= sum(work.tokens(i) for i, _ in todo)

    async def _watch(self, member: Member) -> None:
        """Returns never; raises ServerError once the server has been silent for too long."""
        heard = time.monotonic()
        while True:
            await asyncio.sleep(min(5.0, self.silence_s / 4))
            with contextlib.suppress(ServerError):
                await member.server.health(timeout_s=min(HEALTH_TIMEOUT_S, self.silence_s))
                heard = time.monotonic()
            if time.monotonic() - heard > self.silence_s:
                raise ServerError(f"it has not answered for {self.silence_s:g} s", code="timeout")


class Session:
    """A session on one server of a pool.

    Attributes:
        base_url: for OpenAI clients, whose calls are recorded there.
        api_key: what they send; it opens nothing else.
        model: what the server calls its model.
        open: whether it has not been closed.
        waited_s: how long there was no server to open it on.
    """

    def __init__(self, pool: ServerPool, member: Member, opened: SessionResponse) -> None:
        self.base_url = member.server.session_url(opened.id)
        self.api_key = opened.key
        self.model = opened.model
        self.open = True
        self.waited_s = 0.0
        self._pool = pool
        self._member = member
        self._id = opened.id

    async def close(self) -> AgentRecord:
        """Ends it and returns what was recorded. Raises ServerError where that is lost."""
        try:
            record = await self._member.server.close_session(self._id, timeout_s=self._pool.silence_s)
        except ServerError as error:
            self.open = False
            if error.code in _GONE:
                self._pool.lose(self._member, str(error))
            raise
        self.open = False
        return record


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Lost:
    """What a server did not finish, and why."""

    pairs: list[Pair]
    error: ServerError


@dataclasses.dataclass(slots=True, kw_only=True)
class _Work:
    """One call of `generate`, which must have ended by `end`; `losses` of servers by what they were playing."""

    prompts: Sequence[Sequence[int]]
    sampling: SamplingParams
    n: int
    end: float
    seeds: Sequence[Sequence[int]] | None
    tools: Toolbox | None
    losses: Counter[Pair] = dataclasses.field(default_factory=Counter)

    def count(self, lost: _Lost) -> None:
        """Remembers a loss. Raises ServerError where it was one too many."""
        if lost.error.code in _AGAIN:
            return
        self.losses.update(lost.pairs)
        if any(self.losses[pair] >= MAX_LOSSES for pair in lost.pairs):
            i, _ = max(lost.pairs, key=self.losses.__getitem__)
            raise ServerError(
                f"{MAX_LOSSES} times a server was lost over the same work, which begins with prompt {i} of this step; "
                f"does the engine die of it? The last time: {lost.error}",
                code=lost.error.code,
                status=lost.error.status,
            )

    def tokens(self, i: int) -> int:
        """Returns the tokens that one completion of prompt i takes at most."""
        return len(self.prompts[i]) + self.sampling.max_tokens

    def seed(self, i: int, j: int) -> int | None:
        """Returns the seed of one completion, None where no seeds are asked for."""
        return None if self.seeds is None else self.seeds[i][j]


def _shares(members: Sequence[Member], pairs: Sequence[Pair], work: _Work) -> list[tuple[Member, list[Pair]]]:
    """Divides pairs: all of a prompt go to the server that has the fewest tokens in flight."""
    by_prompt = defaultdict(list)
    for i, j in pairs:
        by_prompt[i].append((i, j))
    load = {member: member.in_flight for member in members}
    shares: dict[Member, list[Pair]] = defaultdict(list)
    for i, mine in sorted(by_prompt.items(), key=lambda item: -work.tokens(item[0]) * len(item[1])):
        member = min(load, key=load.__getitem__)
        load[member] += work.tokens(i) * len(mine)
        shares[member] += mine
    return [(member, part) for member, mine in shares.items() for part in _requests(mine, work)]


def _requests(pairs: Sequence[Pair], work: _Work) -> list[list[Pair]]:
    """Divides pairs into those of one request each; what is left of a prompt, or very many, is not asked for as one."""
    whole = len(pairs) == work.n * len({i for i, _ in pairs}) and work.n <= MAX_SAMPLES
    size = MAX_PROMPTS * (work.n if whole else 1)
    return [list(pairs[start : start + size]) for start in range(0, len(pairs), size)]


async def _ask(member: Member, pairs: Sequence[Pair], work: _Work) -> AsyncIterator[tuple[int, int, Completion]]:
    """Yields the completions of these pairs, asked for in one request."""
    prompts = list(dict.fromkeys(i for i, _ in pairs))
    whole = len(pairs) == work.n * len(prompts) and work.n <= MAX_SAMPLES
    # What is left of a prompt need not be in a row: each is then asked for alone.
    asked = [(i, 0) for i in prompts] if whole else list(pairs)
    n = work.n if whole else 1
    seeds = None
    if work.seeds is not None:
        seeds = [[work.seed(i, first + j) or 0 for j in range(n)] for i, first in asked]
    answers = member.server.generate(
        [work.prompts[i] for i, _ in asked],
        work.sampling,
        n=n if seeds is None else 1,
        timeout_s=max(0.0, work.end - time.monotonic()),
        seeds=seeds,
        session=member.session,
        tools=work.tools,
    )
    async for k, j, completion in answers:
        i, first = asked[k]
        yield i, first + j, completion


async def _first(*works: "asyncio.Future[None] | Awaitable[None]") -> None:
    """Waits until one of these has ended, and ends the others."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
