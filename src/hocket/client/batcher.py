"""Ask the servers for model turns: many episodes' turns in few requests, each turn's seed its own.

One request per turn would cost the engine half of its throughput: turns that come within a few milliseconds go
together. What a lost server has not finished is asked again.
"""

import asyncio
import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from contextlib import aclosing

from hocket.client.pool import MAX_LOSSES, POLL_S, Deadline, Member, ServerPool
from hocket.errors import ServerError
from hocket.protocol import MAX_PROMPTS, MAX_SAMPLES, Completion, GenerateRequest, SamplingParams, Toolbox, meaning

WINDOW_S = 0.002
MAX_REQUESTS = 48
"""Requests in flight on one server."""
MAX_TURNS = MAX_PROMPTS  # in one request
MAX_HOMES = 1 << 12
"""Groups whose server is remembered."""


@dataclasses.dataclass(eq=False, slots=True, kw_only=True)
class Turn:
    """A model turn that waits for its completion. Make it inside the event loop."""

    token_ids: tuple[int, ...]
    sampling: SamplingParams  # without its seed
    seed: int  # alone decides the random numbers
    deadline: Deadline
    group: str  # goes to one server, whose prefix cache has what its turns share
    place: str  # of its episode, for messages: "step 12/5/0 (prompt gsm8k:1042)"
    answer: "asyncio.Future[Completion]" = dataclasses.field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    losses: int = 0  # servers that were lost while they played it

    @property
    def tokens(self) -> int:
        return len(self.token_ids) + self.sampling.max_tokens


class Batcher:
    def __init__(self, pool: ServerPool, *, tools: Toolbox | None = None) -> None:
        self._pool = pool
        self._tools = tools
        self._waiting: list[Turn] = []
        self._requests: dict[asyncio.Task[None] | None, Member] = {}
        self._dispatch: asyncio.Task[None] | None = None
        self._homes: dict[str, tuple[Member, int]] = {}  # group: its server, tokens of its first turns

    async def ask(self, turn: Turn) -> Completion:
        """Return a turn's completion. Raises ServerError, at the latest when MAX_LOSSES servers were lost."""
        self._waiting.append(turn)
        self._wake()
        return await turn.answer

    def _wake(self, ended: "asyncio.Task[None] | None" = None) -> None:
        self._requests.pop(ended, None)
        if self._dispatch is None and self._waiting and (not self._pool.up or self._free()):
            self._dispatch = self._pool.start(self._dispatch_soon())

    def _free(self) -> list[Member]:
        counts = Counter(self._requests.values())
        return [member for member in self._pool.up if counts[member] < MAX_REQUESTS]

    async def _dispatch_soon(self) -> None:
        """Wait for company, the longer the busier the servers, then send the turns that wait."""
        await asyncio.sleep(WINDOW_S * (1 + len(self._requests) / max(1, len(self._pool.up))))
        try:
            up = await self._pool.wait_up(*{turn.deadline for turn in self._waiting})
            wanted = [turn for turn in self._waiting if not turn.answer.done()]
            requests = self._divided(wanted, self._free() or up)
            self._waiting = []
            for member, turns in requests:
                if member not in self._free():
                    self._waiting += turns  # until a request has ended
                    continue
                request = self._pool.start(self._request(member, turns))
                self._requests[request] = member
                request.add_done_callback(self._wake)
        except Exception as error:  # noqa: BLE001 - whatever it is, every episode that waits raises it
            _fail(self._waiting, error)
            self._waiting = []
        self._dispatch = None
        self._wake()

    def _divided(self, turns: Sequence[Turn], up: Sequence[Member]) -> list[tuple[Member, list[Turn]]]:
        """Divide turns into requests, urgent ones first; a group stays on its server unless that is much busier."""
        groups: dict[str, list[Turn]] = defaultdict(list)
        for turn in turns:
            groups[turn.group].append(turn)
        load = {member: member.in_flight for member in up}
        sizes = {group: sum(turn.tokens for turn in mine) for group, mine in groups.items()}
        alike: dict[tuple[Member, SamplingParams, Deadline], list[Turn]] = defaultdict(list)
        for group in sorted(groups, key=sizes.__getitem__, reverse=True):
            member = min(load, key=load.__getitem__)
            home, size = self._homes.get(group, (member, sizes[group]))
            if home in load and load[home] - load[member] <= size:
                member = home
            self._homes[group] = member, size
            if len(self._homes) > MAX_HOMES:
                del self._homes[next(iter(self._homes))]
            load[member] += sizes[group]
            for turn in groups[group]:
                alike[member, turn.sampling, turn.deadline].append(turn)
        urgent = sorted(alike.items(), key=lambda item: item[0][2].left_s)
        requests = []
        for (member, _, _), mine in urgent:
            requests += [(member, mine[start : start + MAX_TURNS]) for start in range(0, len(mine), MAX_TURNS)]
        return requests

    async def _request(self, member: Member, turns: Sequence[Turn]) -> None:
        """Have one server play turns; those that it has not finished when it is lost wait again."""
        todo = dict.fromkeys(turns)
        member.in_flight += sum(turn.tokens for turn in todo)
        try:
            await self._pool.watched(member, self._play(member, turns, todo))
        except ServerError as error:
            says = meaning(error.code)
            if turns[0].deadline.over or not (says.lost or says.again):
                _fail(todo, error)
            elif says.lost:
                self._pool.mark_lost(member, str(error))
                for turn in todo:
                    turn.losses += 1
                    if turn.losses == MAX_LOSSES:
                        message = (
                            f"{MAX_LOSSES} servers failed while generating {turn.place}. It may crash the engine: "
                            f"see the server logs, or leave the row out. Last error: {error}"
                        )
                        _fail([turn], ServerError(message, code=error.code, status=error.status))
            else:
                await asyncio.sleep(POLL_S)
            self._waiting += todo
        except Exception as error:  # noqa: BLE001 - the same
            _fail(todo, error)
        finally:
            member.in_flight -= sum(turn.tokens for turn in todo)

    async def _play(self, member: Member, turns: Sequence[Turn], todo: dict[Turn, None]) -> None:
        """Answer turns as completions come, and take them out of `todo`."""
        prompts: dict[tuple[tuple[int, ...], int], list[Turn]] = defaultdict(list)
        counts = Counter[tuple[int, ...]]()
        for turn in turns:
            prompts[turn.token_ids, counts[turn.token_ids] // MAX_SAMPLES].append(turn)
            counts[turn.token_ids] += 1
        by_prompt = list(prompts.values())
        request = GenerateRequest(
            prompts=[list(token_ids) for token_ids, _ in prompts],
            sampling=turns[0].sampling,
            seeds=[[turn.seed for turn in mine] for mine in by_prompt],
            session=member.session,
            tools=self._tools,
        )
        async with aclosing(member.server.generate(request, timeout_s=turns[0].deadline.left_s)) as lines:
            async for line in lines:
                turn = by_prompt[line.prompt][line.index]
                size, asked = len(line.completion.token_ids), turn.sampling.max_tokens
                if size > asked or (size < asked and line.completion.finish_reason == "length"):
                    message = f"{member.url}/generate cut {turn.place} off at {size} tokens, asked for {asked}"
                    raise ServerError(message, code="protocol")
                del todo[turn]
                member.in_flight -= turn.tokens
                if not turn.answer.done():
                    turn.answer.set_result(line.completion)
        if todo:
            raise ServerError(f"{member.url}/generate ended {len(todo)} completions too early", code="protocol")


def _fail(turns: Iterable[Turn], error: Exception) -> None:
    for turn in turns:
        if not turn.answer.done():
            turn.answer.set_exception(error)
