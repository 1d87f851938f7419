"""Request model turns from the servers, the turns of many episodes in one request.

A request per turn would halve the throughput. Turns that a lost server has not finished are
requested again, from another one.
"""

import asyncio
import dataclasses
import itertools
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import aclosing
from typing import NamedTuple
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

# A turn waits for others to share its request, for WINDOW_S * 2 ** (r / REQUESTS_PER_DOUBLING)
# seconds, where r requests are in flight on the least busy server. It is doubled MAX_DOUBLINGS times
# at most, which is about a second.
WINDOW_S = 0.002
REQUESTS_PER_DOUBLING = 8
MAX_DOUBLINGS = 9
MAX_TURNS = MAX_PROMPTS  # turns in one request


@dataclasses.dataclass(eq=False, slots=True, kw_only=True)
class Turn:
    """A model turn that waits for its completion."""

    token_ids: TokenIds
    sampling: SamplingParams  # how to sample; its seed is not used
    seed: int  # decides the random numbers, whichever server samples
    deadline: Deadline
    group: str  # name of the group, whose turns share a prefix and so go to one server
    place: str  # name for messages: "step 12/5/0 (prompt gsm8k:1042)"
    images: tuple[Image, ...] = ()
    begun: int = 0  # number of tokens at the prompt's end that belong to this turn already
    answer: "asyncio.Future[Completion]" = dataclasses.field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    losses: int = 0  # number of servers lost while they generated this turn

    @property
    def tokens(self) -> int:
        """The most tokens that this turn takes in a KV cache."""
        return len(self.token_ids) + self.sampling.max_tokens

    def check(self, completion: Completion, url: str) -> None:
        """Raise ServerError unless a completion has the length and the prompt of this turn."""
        # A completion ends early only at a stop.
        size = len(completion.token_ids)
        at_most = self.sampling.max_tokens
        at_least = at_most if completion.finish_reason == "length" else 1
        if not at_least <= size <= at_most:
            message = f"{url}/generate cut {self.place} off at {size} tokens, asked for {at_most}"
            raise ServerError(message, code="protocol")

        # The engine puts the tokens of images in by itself: they must be those counted here.
        server_ids = completion.prompt_token_ids
        if not self.images or server_ids == tuple(self.token_ids):
            return
        pairs = itertools.zip_longest(self.token_ids, server_ids)
        for place, (ours, theirs) in enumerate(pairs):
            if ours != theirs:
                message = (
                    f"{url}/generate read another prompt of {self.place}: token {place} is "
                    f"{theirs}, here {ours}; do both sides have the same model folder, with the "
                    "same processor?"
                )
                raise ServerError(message, code="protocol")


class _RequestKey(NamedTuple):
    """What a request has only once: turns with the same key can share one."""

    member: Member
    sampling: SamplingParams
    deadline: Deadline
    images: tuple[Image, ...]


class Batcher:
    """Gathers turns for a moment and sends them to the servers of a pool, many in a request.

    Example:
        >>> from array import array
        >>> async def main() -> None:
        ...     async with ServerPool(["http://127.0.0.1:8000"]) as pool:
        ...         turn = Turn(
        ...             token_ids=array("I", [1, 2, 3]),
        ...             sampling=SamplingParams(max_tokens=16),
        ...             seed=7,
        ...             deadline=Deadline(60.0),
        ...             group="step 1/0",
        ...             place="step 1/0/0",
        ...         )
        ...         completion = await Batcher(pool).ask(turn)
        ...         print(completion.finish_reason)
        >>> asyncio.run(main())
        stop
    """

    def __init__(self, pool: ServerPool, *, tools: Toolbox | None = None) -> None:
        self._pool = pool
        self._tools = tools
        self._waiting: list[Turn] = []
        self._requests = Counter[Member]()  # number of requests in flight on each server
        # The home of each group: the server that has its prefix cached, and the number of tokens of
        # the group's first turns. A batch's groups are forgotten with the batch's deadline.
        self._homes = WeakKeyDictionary[Deadline, dict[str, tuple[Member, int]]]()

    async def ask(self, turn: Turn) -> Completion:
        """Generate a turn's completion.

        Raises:
            ServerError: A server refused the turn, the deadline has passed, or several servers
                failed while they generated it.
        """
        with self._pool.waiting(turn.deadline):
            self._enqueue([turn])
            return await turn.answer

    def _enqueue(self, turns: Iterable[Turn]) -> None:
        """Have turns wait for the next requests. The first one that waits starts the clock."""
        if not self._waiting:
            self._pool.start(self._dispatch())
        self._waiting += turns

    async def _dispatch(self) -> None:
        """Wait for more turns, the longer the busier all servers are, then send them."""
        start = time.monotonic()
        while time.monotonic() - start < self._window_s():
            await asyncio.sleep(WINDOW_S)
        try:
            up = await self._pool.wait_up()
            # A turn whose episode was cancelled has a cancelled answer.
            turns = [turn for turn in self._waiting if not turn.answer.done()]
            for member, part in self._divided(turns, up):
                self._pool.start(self._request(member, part))
        except Exception as error:  # noqa: BLE001 - every episode that waits raises it
            _fail(self._waiting, error)
        self._waiting = []  # no other turn has come since wait_up: nothing is awaited in between

    def _window_s(self) -> float:
        fewest = min((self._requests[member] for member in self._pool.up), default=0)
        return WINDOW_S * 2 ** min(fewest / REQUESTS_PER_DOUBLING, MAX_DOUBLINGS)

    # Which server gets which turns

    def _divided(
        self, turns: Sequence[Turn], up: Sequence[Member]
    ) -> Iterator[tuple[Member, Sequence[Turn]]]:
        """Divide turns into requests: pairs of a server and its turns, urgent ones first."""
        turns_by_key = self._by_key(turns, up)
        for key in sorted(turns_by_key, key=lambda key: key.deadline.left_s):
            # Every turn may need a prompt of its own, which brings its images along.
            image_bytes = sum(len(image.data) for image in key.images)
            at_most = MAX_TURNS
            if image_bytes:
                at_most = min(MAX_TURNS, IMAGE_BYTES // image_bytes)
            turns_of_key = turns_by_key[key]
            for start in range(0, len(turns_of_key), at_most):
                yield key.member, turns_of_key[start : start + at_most]

    def _by_key(self, turns: Sequence[Turn], up: Sequence[Member]) -> dict[_RequestKey, list[Turn]]:
        """Choose a server for each group, and sort the turns by the key of their request."""
        groups: dict[tuple[Deadline, str], list[Turn]] = defaultdict(list)
        sizes = Counter[tuple[Deadline, str]]()  # tokens of each group
        for turn in turns:
            group = turn.deadline, turn.group
            groups[group].append(turn)
            sizes[group] += turn.tokens

        # The largest groups choose first: small ones even the load out.
        load = {member: member.in_flight for member in up}
        turns_by_key: dict[_RequestKey, list[Turn]] = defaultdict(list)
        for group, size in sizes.most_common():
            member = self._choose(group, size, load)
            load[member] += size
            for turn in groups[group]:
                key = _RequestKey(member, turn.sampling, turn.deadline, turn.images)
                turns_by_key[key].append(turn)
        return turns_by_key

    def _choose(self, group: tuple[Deadline, str], size: int, load: dict[Member, int]) -> Member:
        """Choose a group's server: the least busy one, or its last one unless that is much busier.

        Its last server has the group's prefix cached. To compute it again costs about the tokens
        of the group's first turns, so a server that is busier by more than these is left.
        """
        deadline, name = group
        homes = self._homes.setdefault(deadline, {})
        idlest = min(load, key=load.__getitem__)
        home, first_size = homes.get(name, (idlest, size))
        if home not in load or load[home] - load[idlest] > first_size:
            home = idlest
        homes[name] = home, first_size
        return home

    # Requests

    async def _request(self, member: Member, turns: Sequence[Turn]) -> None:
        """Have one server generate turns. Those that it loses wait again."""
        # The turns without an answer, by the numbers of prompt and sample in the request.
        pending: dict[tuple[int, int], Turn] = {}
        start = time.perf_counter()
        self._requests[member] += 1
        try:
            prompts = _by_prompt(turns)
            for number, samples in enumerate(prompts):
                for index, turn in enumerate(samples):
                    pending[number, index] = turn
            member.in_flight += sum(turn.tokens for turn in turns)
            await self._pool.watched(member, self._generate(member, prompts, pending))
        except ServerError as error:
            unanswered = list(pending.values())
            if turns[0].deadline.over:
                _fail(unanswered, error)
            elif self._pool.loses(member, error):
                for turn in unanswered:
                    _count_loss(turn, error)
                self._enqueue(unanswered)
            elif error.outcome is ErrorOutcome.AGAIN:
                await asyncio.sleep(POLL_S)
                self._enqueue(unanswered)
            else:
                _fail(unanswered, error)
        except Exception as error:  # noqa: BLE001 - every episode whose turn it was raises it
            _fail(turns, error)  # those without an answer
        finally:
            note(f"{len(turns)} turns", start, who=member.url)
            self._requests[member] -= 1
            # `_generate` has taken off the tokens of the turns that it has answered.
            member.in_flight -= sum(turn.tokens for turn in pending.values())

    async def _generate(
        self,
        member: Member,
        prompts: Sequence[Sequence[Turn]],
        pending: dict[tuple[int, int], Turn],
    ) -> None:
        """Answer turns as completions come: take them out of `pending` and the server's load."""
        first_turns = [samples[0] for samples in prompts]
        request = GenerateRequest(
            prompts=[prompt_input(turn.token_ids, turn.images) for turn in first_turns],
            begun=[turn.begun for turn in first_turns],
            sampling=first_turns[0].sampling,
            seeds=[[turn.seed for turn in samples] for samples in prompts],
            session=member.session,
            tools=self._tools,
        )
        timeout_s = first_turns[0].deadline.left_s
        async with aclosing(member.server.generate(request, timeout_s=timeout_s)) as lines:
            async for line in lines:
                place = line.prompt, line.index
                if place not in pending:
                    raise ServerError(
                        f"{member.url}/generate answered prompt {line.prompt}, sample {line.index} "
                        "twice, or unasked",
                        code="protocol",
                    )
                turn = pending[place]
                turn.check(line.completion, member.url)
                del pending[place]
                member.in_flight -= turn.tokens
                if not turn.answer.done():
                    turn.answer.set_result(line.completion)
        if pending:
            raise ServerError(
                f"{member.url}/generate ended {len(pending)} completions too early",
                code="protocol",
            )


def _by_prompt(turns: Sequence[Turn]) -> list[list[Turn]]:
    """Gather the turns with equal prompts, up to MAX_SAMPLES for each prompt of a request."""
    prompts: list[list[Turn]] = []
    last_of: dict[tuple[bytes, int], list[Turn]] = {}  # the list that is being filled
    for turn in turns:
        key = turn.token_ids.tobytes(), turn.begun
        if key not in last_of or len(last_of[key]) == MAX_SAMPLES:
            last_of[key] = []
            prompts.append(last_of[key])
        last_of[key].append(turn)
    return prompts


def _count_loss(turn: Turn, error: ServerError) -> None:
    """Count a server that failed with a turn. The turn fails once MAX_LOSSES have."""
    turn.losses += 1
    if turn.losses == MAX_LOSSES:
        message = (
            f"{MAX_LOSSES} servers failed while generating {turn.place}. It may crash the "
            f"engine: see the server logs, or leave the row out. Last error: {error}"
        )
        _fail([turn], ServerError(message, code=error.code, status=error.status))


def _fail(turns: Iterable[Turn], error: Exception) -> None:
    for turn in turns:
        if not turn.answer.done():
            turn.answer.set_exception(error)
