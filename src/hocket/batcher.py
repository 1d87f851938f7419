"""Ask the servers for model turns: many episodes' turns in few requests, each turn's seed its own.

One request per turn costs the engine more than half of its throughput, and the HTTP client slows down with hundreds in
flight. Turns that come within a few milliseconds go together, and a prompt that several share is sent once. What a
lost server has not finished is asked again, of the others or of itself once it is back.
"""

import asyncio
import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from hocket.errors import ServerError
from hocket.pool import GONE, MAX_LOSSES, POLL_S, Deadline, Member, ServerPool
from hocket.protocol import Completion, SamplingParams, Toolbox

WINDOW_S = 0.002
MAX_REQUESTS = 48
"""Requests in flight at the same time; each server's client has a few more connections."""
MAX_PROMPTS = 256
"""Different prompts in one request: at most what a server takes."""
MAX_SAMPLES = 64
"""Completions of one prompt in one request: at most what a server takes."""
MAX_HOMES = 1 << 12
"""Groups whose server is remembered."""
AGAIN = frozenset({"aborted", "asleep"})
"""Error codes of requests that the server ended for others to go first."""


@dataclasses.dataclass(eq=False, slots=True, kw_only=True)
class Turn:
    """One model turn that waits for its completion."""

    token_ids: tuple[int, ...]
    sampling: SamplingParams  # its seed plays no part
    seed: int
    deadline: Deadline
    group: str  # turns of one group go to one server, whose prefix cache has what they share
    place: str  # of its episode, for messages: "step 12/5/0 (prompt gsm8k:1042)"
    answer: "asyncio.Future[Completion]"
    request: "asyncio.Task[None] | None" = None  # that it was last sent with
    losses: int = 0  # servers that were lost while they played it

    @property
    def tokens(self) -> int:
        """Tokens that the turn takes at most."""
        return len(self.token_ids) + self.sampling.max_tokens


class Batcher:
    """Asks for the turns of all episodes of a run; leaving the pool cancels what is in flight."""

    def __init__(self, pool: ServerPool, *, tools: Toolbox | None = None) -> None:
        self._pool = pool
        self._tools = tools  # calls of these are looked for in the completions
        self._waiting: list[Turn] = []
        self._requests: dict[asyncio.Task[None], Sequence[Turn]] = {}
        self._dispatch: asyncio.Task[None] | None = None
        self._homes: dict[str, tuple[Member, int]] = {}  # group: its server, tokens of its first turns

    async def ask(
        self,
        token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        seed: int,
        deadline: Deadline,
        group: str = "",
        place: str = "",
    ) -> Completion:
        """Return the completion of one prompt; `seed` alone decides its random numbers, whichever server plays it.

        Raises:
            ServerError: refused, not finished in time, no server is left, or MAX_LOSSES servers were lost with it.
        """
        turn = Turn(
            token_ids=tuple(token_ids),
            sampling=sampling,
            seed=seed,
            deadline=deadline,
            group=group,
            place=place,
            answer=asyncio.get_running_loop().create_future(),
        )
        self._waiting.append(turn)
        self._wake()
        try:
            return await turn.answer
        except asyncio.CancelledError:
            together = self._requests.get(turn.request) if turn.request else None
            if turn.request and together and all(other.answer.done() for other in together):
                turn.request.cancel()  # no episode waits for any of its turns; its server is free then
            raise

    def _wake(self) -> None:
        if self._dispatch is None and self._waiting and len(self._requests) < MAX_REQUESTS:
            self._dispatch = self._pool.start(self._dispatch_soon())

    async def _dispatch_soon(self) -> None:
        """Wait for company, the longer the more requests are under way, then send the turns that wait."""
        await asyncio.sleep(WINDOW_S * (1 + len(self._requests)))
        try:
            up = await self._pool.wait_up(*{turn.deadline for turn in self._waiting})
            waiting, self._waiting = self._waiting, []
            wanted = [turn for turn in waiting if not turn.answer.done()]  # an episode may have been cancelled
            for member, prompts in _requests(self._routed(wanted, up)):
                turns = [turn for turns in prompts for turn in turns]
                if len(self._requests) >= MAX_REQUESTS:
                    self._waiting += turns  # until a request has ended
                    continue
                request = self._pool.start(self._request(member, prompts))
                self._requests[request] = turns
                for turn in turns:
                    turn.request = request
                request.add_done_callback(self._ended)
        except Exception as error:  # noqa: BLE001 - whatever it is, every episode that waits raises it
            _fail(self._waiting, error)
            self._waiting = []
        self._dispatch = None
        self._wake()

    def _ended(self, request: "asyncio.Task[None]") -> None:
        del self._requests[request]
        self._wake()

    def _routed(self, turns: Sequence[Turn], up: Sequence[Member]) -> dict[Member, list[Turn]]:
        """Divide turns among servers: a group goes to its last server, unless that is busier by more than the group."""
        groups: dict[str | Turn, list[Turn]] = defaultdict(list)
        for turn in turns:
            groups[turn.group or turn].append(turn)
        load = {member: member.in_flight for member in up}
        shares: dict[Member, list[Turn]] = defaultdict(list)
        sizes = {group: sum(turn.tokens for turn in mine) for group, mine in groups.items()}
        for group, mine in sorted(groups.items(), key=lambda item: -sizes[item[0]]):
            member = min(load, key=load.__getitem__)
            if isinstance(group, str):
                home, size = self._homes.get(group, (member, sizes[group]))
                if home in load and load[home] - load[member] <= size:
                    member = home
                self._homes[group] = member, size
                if len(self._homes) > MAX_HOMES:
                    del self._homes[next(iter(self._homes))]
            load[member] += sizes[group]
            shares[member] += mine
        return shares

    async def _request(self, member: Member, prompts: Sequence[Sequence[Turn]]) -> None:
        """Have one server play a request; turns that it has not finished when it is lost wait again."""
        todo = {turn: None for turns in prompts for turn in turns}
        deadline = prompts[0][0].deadline
        member.in_flight += sum(turn.tokens for turn in todo)
        try:
            await self._pool.watched(member, self._play(member, prompts, todo))
        except ServerError as error:
            if deadline.over or error.code not in GONE | AGAIN:
                _fail(todo, error)
            elif error.code in GONE:
                self._pool.mark_lost(member, str(error))
                for turn in todo:
                    turn.losses += 1
                    if turn.losses == MAX_LOSSES:
                        _fail([turn], _lost_too_often(turn, error))
            else:
                await asyncio.sleep(POLL_S)
            self._waiting += todo
        except Exception as error:  # noqa: BLE001 - whatever it is, every episode that waits for it raises it
            _fail(todo, error)
        finally:
            member.in_flight -= sum(turn.tokens for turn in todo)

    async def _play(self, member: Member, prompts: Sequence[Sequence[Turn]], todo: dict[Turn, None]) -> None:
        answers = member.server.generate(
            [turns[0].token_ids for turns in prompts],
            prompts[0][0].sampling,
            timeout_s=prompts[0][0].deadline.left_s,
            seeds=[[turn.seed for turn in turns] for turns in prompts],
            session=member.session,
            tools=self._tools,
        )
        async for i, j, completion in answers:
            turn = prompts[i][j]
            del todo[turn]
            member.in_flight -= turn.tokens
            if not turn.answer.done():
                turn.answer.set_result(completion)


def _requests(shares: Mapping[Member, Sequence[Turn]]) -> list[tuple[Member, list[list[Turn]]]]:
    """Divide shares into requests of one sampling and deadline, prompt by prompt, within what a server takes."""
    alike: dict[tuple[Member, SamplingParams, Deadline], dict[tuple[int, ...], list[Turn]]] = {}
    for member, turns in shares.items():
        for turn in turns:
            by_prompt = alike.setdefault((member, turn.sampling, turn.deadline), {})
            by_prompt.setdefault(turn.token_ids, []).append(turn)
    requests = []
    for (member, _, _), by_prompt in sorted(alike.items(), key=lambda item: item[0][2].left_s):
        prompts = [
            turns[k : k + MAX_SAMPLES] for turns in by_prompt.values() for k in range(0, len(turns), MAX_SAMPLES)
        ]
        requests += [(member, prompts[k : k + MAX_PROMPTS]) for k in range(0, len(prompts), MAX_PROMPTS)]
    return requests


def _fail(turns: Iterable[Turn], error: Exception) -> None:
    for turn in turns:
        if not turn.answer.done():
            turn.answer.set_exception(error)


def _lost_too_often(turn: Turn, error: ServerError) -> ServerError:
    return ServerError(
        f"{MAX_LOSSES} servers failed while generating {turn.place}. The prompt may crash the engine: see the server "
        f"logs, or leave the row out. Last error: {error}",
        code=error.code,
        status=error.status,
    )
