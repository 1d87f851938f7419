"""Ask the servers for model turns: many episodes' turns in one request, as one of each would halve the throughput.

What a lost server has not finished is asked again.
"""

import asyncio
import dataclasses
import itertools
import math
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import aclosing
from weakref import WeakKeyDictionary

from hocket.client.member import Member
from hocket.client.pool import MAX_LOSSES, POLL_S, Deadline, ServerPool
from hocket.client.server import IMAGE_BYTES, prompt_input
from hocket.common.tasks import note
from hocket.errors import ErrorOutcome, ServerError
from hocket.protocol import (
    MAX_PROMPTS,
    MAX_SAMPLES,
    Completion,
    GenerateRequest,
    SamplingParams,
    Toolbox,
)
from hocket.types import Image, TokenIds

WINDOW_S = 0.002  # for which turns wait for company
DOUBLES = 8  # the time doubles with so many requests in flight on the least busy server
MAX_DOUBLINGS = 9  # to a second
MAX_TURNS = MAX_PROMPTS  # in one request


@dataclasses.dataclass(eq=False, slots=True, kw_only=True)
class Turn:
    """A model turn that waits for its completion."""

    token_ids: TokenIds
    sampling: SamplingParams  # without its seed
    seed: int  # alone decides the random numbers
    deadline: Deadline
    group: str  # whose turns share a prefix, and so go to one server
    place: str  # for messages: "step 12/5/0 (prompt gsm8k:1042)"
    images: tuple[Image, ...] = ()
    begun: int = 0  # of its last tokens, how many the model wrote in this turn
    answer: "asyncio.Future[Completion]" = dataclasses.field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    losses: int = 0  # of servers that played it

    @property
    def tokens(self) -> int:
        return len(self.token_ids) + self.sampling.max_tokens

    def check(self, completion: Completion, url: str) -> None:
        """Raise ServerError unless the server did what it was asked."""
        size = len(completion.token_ids)
        asked = self.sampling.max_tokens
        at_least = asked if completion.finish_reason == "length" else 1
        if not at_least <= size <= asked:
            message = f"{url}/generate cut {self.place} off at {size} tokens, asked for {asked}"
            raise ServerError(message, code="protocol")
        read = completion.prompt_token_ids
        if self.images and read != tuple(self.token_ids):
            pairs = enumerate(itertools.zip_longest(self.token_ids, read))
            place, (ours, theirs) = next(pair for pair in pairs if len(set(pair[1])) > 1)
            message = (
                f"{url}/generate read another prompt of {self.place}: token {place} is {theirs}, here {ours}; do both "
                "sides have the same model folder, with the same processor?"
            )
            raise ServerError(message, code="protocol")


class Batcher:
    def __init__(self, pool: ServerPool, *, tools: Toolbox | None = None) -> None:
        self._pool = pool
        self._tools = tools
        self._waiting: list[Turn] = []
        self._requests = Counter[Member]()  # in flight
        # Of each batch, group: its server, tokens of its first turns.
        self._homes = WeakKeyDictionary[Deadline, dict[str, tuple[Member, int]]]()

    async def ask(self, turn: Turn) -> Completion:
        """Return a turn's completion. Raises ServerError."""
        with self._pool.waiting(turn.deadline):
            self._wait([turn])
            return await turn.answer

    def _wait(self, turns: Iterable[Turn]) -> None:
        if not self._waiting:
            self._pool.start(self._dispatch())
        self._waiting += turns

    async def _dispatch(self) -> None:
        """Wait for company, the longer the busier all servers are, then send the turns."""
        start = time.monotonic()
        while time.monotonic() - start < self._window_s():
            await asyncio.sleep(WINDOW_S)
        try:
            up = await self._pool.wait_up()
            wanted = [turn for turn in self._waiting if not turn.answer.done()]
            for member, turns in self._divided(wanted, up):
                self._pool.start(self._request(member, turns))
        except Exception as error:  # noqa: BLE001 - every episode that waits raises it
            _fail(self._waiting, error)
        self._waiting = []

    def _window_s(self) -> float:
        fewest = min((self._requests[member] for member in self._pool.up), default=0)
        return WINDOW_S * 2 ** min(fewest / DOUBLES, MAX_DOUBLINGS)

    def _divided(
        self, turns: Sequence[Turn], up: Sequence[Member]
    ) -> Iterator[tuple[Member, Sequence[Turn]]]:
        """Divide turns into requests, urgent ones first; a group leaves its server only if that is much busier."""
        groups: dict[tuple[Deadline, str], list[Turn]] = defaultdict(list)
        sizes = Counter[tuple[Deadline, str]]()  # in tokens
        for turn in turns:
            group = turn.deadline, turn.group
            groups[group].append(turn)
            sizes[group] += turn.tokens
        load = {member: member.in_flight for member in up}
        alike: dict[tuple[Member, SamplingParams, Deadline, tuple[Image, ...]], list[Turn]] = (
            defaultdict(list)
        )
        for (deadline, name), size in sizes.most_common():
            homes = self._homes.setdefault(deadline, {})
            member = min(load, key=load.__getitem__)
            home, first_size = homes.get(name, (member, size))
            if load.get(home, math.inf) - load[member] <= first_size:
                member = home
            homes[name] = member, first_size
            load[member] += size
            for turn in groups[deadline, name]:
                alike[member, turn.sampling, deadline, turn.images].append(turn)
        for (member, *_), mine in sorted(alike.items(), key=lambda item: item[0][2].left_s):
            size = sum(len(image.data) for image in mine[0].images)  # all have the same
            most = min(MAX_TURNS, IMAGE_BYTES // size) if size else MAX_TURNS
            for start in range(0, len(mine), most):
                yield member, mine[start : start + most]

    async def _request(self, member: Member, turns: Sequence[Turn]) -> None:
        """Have one server play turns; those that it loses wait again."""
        todo = dict.fromkeys(turns)
        start = time.perf_counter()
        self._requests[member] += 1
        member.in_flight += sum(turn.tokens for turn in todo)
        try:
            await self._pool.watched(member, self._play(member, turns, todo))
        except ServerError as error:
            if turns[0].deadline.over:
                _fail(todo, error)
            elif self._pool.loses(member, error):
                for turn in todo:
                    turn.losses += 1
                    if turn.losses == MAX_LOSSES:
                        message = (
                            f"{MAX_LOSSES} servers failed while generating {turn.place}. It may crash the engine: "
                            f"see the server logs, or leave the row out. Last error: {error}"
                        )
                        _fail([turn], ServerError(message, code=error.code, status=error.status))
                self._wait(todo)
            elif error.outcome is ErrorOutcome.AGAIN:
                await asyncio.sleep(POLL_S)
                self._wait(todo)
            else:
                _fail(todo, error)
        except Exception as error:  # noqa: BLE001 - the same
            _fail(todo, error)
        finally:
            note(f"{len(turns)} turns", start, who=member.url)
            self._requests[member] -= 1
            member.in_flight -= sum(turn.tokens for turn in todo)

    async def _play(self, member: Member, turns: Sequence[Turn], todo: dict[Turn, None]) -> None:
        """Answer turns as completions come, and take them out of `todo`."""
        prompts: dict[tuple[bytes, int, int], list[Turn]] = defaultdict(
            list
        )  # turns that read the same
        counts = Counter[tuple[bytes, int]]()
        for turn in turns:
            prompt = turn.token_ids.tobytes(), turn.begun
            prompts[*prompt, counts[prompt] // MAX_SAMPLES].append(turn)
            counts[prompt] += 1
        by_prompt = list(prompts.values())
        request = GenerateRequest(
            prompts=[prompt_input(mine[0].token_ids, mine[0].images) for mine in by_prompt],
            begun=[mine[0].begun for mine in by_prompt],
            sampling=turns[0].sampling,
            seeds=[[turn.seed for turn in mine] for mine in by_prompt],
            session=member.session,
            tools=self._tools,
        )
        async with aclosing(
            member.server.generate(request, timeout_s=turns[0].deadline.left_s)
        ) as lines:
            async for line in lines:
                turn = by_prompt[line.prompt][line.index]
                turn.check(line.completion, member.url)
                del todo[turn]
                member.in_flight -= turn.tokens
                if not turn.answer.done():
                    turn.answer.set_result(line.completion)
        if todo:
            raise ServerError(
                f"{member.url}/generate ended {len(todo)} completions too early", code="protocol"
            )


def _fail(turns: Iterable[Turn], error: Exception) -> None:
    for turn in turns:
        if not turn.answer.done():
            turn.answer.set_exception(error)
