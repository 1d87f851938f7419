"""Pool and batcher against small real HTTP servers on loopback: which are up, which plays what, what becomes of it."""

import asyncio
import contextlib
import json
import random
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pydantic
import pytest

import fakes
from hocket import batcher as batcher_module
from hocket.batcher import Batcher, Turn
from hocket.errors import ServerError, SyncError
from hocket.pool import Deadline, Member, ServerPool
from hocket.protocol import Completion, ErrorBody, GenerateRequest, Health, SamplingParams, SessionRequest, Toolbox
from hocket.system import cancel

SEED = 1000
SAMPLING = SamplingParams(max_tokens=10)


def error(code: str) -> dict[str, str]:
    return {"code": code, "message": f"it is {code}", "hint": "do something"}


def count(request: GenerateRequest) -> int:
    """Returns the completions of a request's first prompt."""
    return request.n if request.seeds is None else len(request.seeds[0])


class FakeServer:
    """Completes every prompt with a text that tells its first token and the seed; fails as it is told to.

    Attributes:
        requests: bodies of /generate.
        opened: sessions that are open.
        played: (first token, seed) of every completion that was sent.
        looks: how often /health was asked.
        hold: /generate waits for it before each completion.
        cut_after: breaks the connection after so many completions of a request.
        end_with: error that ends a request before its first completion; refuse: the same, as (status, code).
        junk: sends what is no answer.
    """

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.session, self.status = "s1", "ready"
        self.failure: dict[str, str] | None = None
        self.requests: list[GenerateRequest] = []
        self.played: list[tuple[int, int | None]] = []
        self.opened: list[SessionRequest] = []
        self.looks = self.dropped = 0
        self.hold = asyncio.Event()
        self.hold.set()
        self.mute = self.junk = False
        self.cut_after: int | None = None
        self.end_with: str | None = None
        self.refuse: tuple[int, str] | None = None
        self._listening: asyncio.Server | None = None
        self._connections: set[asyncio.StreamWriter] = set()

    async def start(self) -> "FakeServer":
        self._listening = await asyncio.start_server(self._answer, "127.0.0.1", self.port)
        return self

    async def die(self) -> None:
        assert self._listening is not None
        self._listening.close()
        for writer in self._connections:
            writer.transport.abort()
        await asyncio.sleep(0)  # lets the handlers see it

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections.add(writer)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            length = int(head.partition("content-length:")[2].split("\r\n")[0] or 0)
            body = await reader.readexactly(length)
            if head.startswith("get /health"):
                self.looks += 1
                while self.mute and not writer.transport.is_closing():
                    await asyncio.sleep(0.01)
                await self._send(writer, 200, self.health().model_dump_json())
            elif "/sessions" in head.partition("\r\n")[0]:
                await self._session(writer, head.startswith("post"), body)
            else:
                await self._generate(writer, GenerateRequest.model_validate_json(body))
            writer.close()
        self._connections.discard(writer)

    async def _session(self, writer: asyncio.StreamWriter, opening: bool, body: bytes) -> None:
        if not opening:
            await self.hold.wait()
            if writer.transport.is_closing():
                return
            self.opened.pop()
            await self._send(writer, 200, json.dumps({"calls": [], "cut_off": False}))
        elif self.refuse is not None:
            await self._send(writer, self.refuse[0], json.dumps({"error": error(self.refuse[1])}))
        else:
            self.opened.append(SessionRequest.model_validate_json(body))
            await self._send(writer, 200, json.dumps({"id": "x", "key": "k", "model": "m"}))

    async def _generate(self, writer: asyncio.StreamWriter, request: GenerateRequest) -> None:
        self.requests.append(request)
        refuse = (409, "other_session") if request.session not in (None, self.session) else self.refuse
        if refuse is not None:
            await self._send(writer, refuse[0], json.dumps({"error": error(refuse[1])}))
            return
        await self._send(writer, 200, "")
        end: dict[str, Any] = {"done": True, "version": 1, "model": "m", "error": None}
        if self.end_with is not None:
            end, self.end_with = end | {"error": error(self.end_with)}, None
        else:
            seeds = request.seeds or [[None] * request.n for _ in request.prompts]
            pairs = [(i, j) for i, mine in enumerate(seeds) for j in range(len(mine))]
            for number, (i, j) in enumerate(pairs):
                if number == self.cut_after:
                    self.cut_after = None
                    writer.transport.abort()
                    return
                if not self.hold.is_set():
                    await self.hold.wait()
                if writer.transport.is_closing():
                    self.dropped += 1
                    return
                seed = seeds[i][j]
                self.played.append((request.prompts[i][0], seed))  # type: ignore[arg-type]
                done = {"token_ids": [5], "logprobs": [-0.5], "finish_reason": "stop", "versions": [[1, 0, 1]]}
                text = f"{request.prompts[i][0]} {seed}"
                line = {"prompt": i, "index": j, "completion": done | {"text": text}}
                writer.write(b"{}\n" if self.junk else json.dumps(line).encode() + b"\n")
                await writer.drain()
        writer.write(json.dumps(end).encode() + b"\n")
        await writer.drain()

    async def _send(self, writer: asyncio.StreamWriter, status: int, body: str) -> None:
        writer.write(f"HTTP/1.1 {status} x\r\nconnection: close\r\n\r\n{body}".encode())
        await writer.drain()

    def health(self) -> Health:
        return fakes.health(
            status=self.status,
            version=1,
            session=self.session,
            error=None if self.failure is None else ErrorBody.model_validate(self.failure),
        )


@pytest.fixture
async def servers() -> AsyncIterator[list[FakeServer]]:
    servers = [await FakeServer().start() for _ in range(2)]
    yield servers
    for server in servers:
        server.hold.set()
        await server.die()


@pytest.fixture(autouse=True)
async def deadline() -> AsyncIterator[None]:
    """No wait without a deadline: a pool that hangs fails its test."""
    task = asyncio.current_task()
    assert task is not None
    async with asyncio.timeout(30):
        yield


def make_pool(servers: Sequence[FakeServer], **options: Any) -> ServerPool:
    return ServerPool([server.url for server in servers], **{"start_timeout_s": 10.0} | options)


def turn(
    token_ids: Sequence[int],
    seed: int,
    deadline: Deadline,
    sampling: SamplingParams = SAMPLING,
    place: str = "",
) -> Turn:
    """A turn of the group that its first token names."""
    return Turn(
        token_ids=tuple(token_ids),
        sampling=sampling,
        seed=seed,
        deadline=deadline,
        group=f"g/{token_ids[0]}",
        place=f"step 1/{place}",
    )


async def play(
    pool: ServerPool,
    prompts: Sequence[Sequence[int]],
    *,
    n: int = 1,
    timeout_s: float = 10.0,
    batcher: Batcher | None = None,
    sampling: SamplingParams = SAMPLING,
) -> dict[tuple[int, int], Completion]:
    """All completions of each prompt, whose turns are a group."""
    batcher, deadline = batcher or Batcher(pool), Deadline(timeout_s)
    pairs = [(i, j) for i in range(len(prompts)) for j in range(n)]
    async with asyncio.timeout(20):
        asks = [
            asyncio.create_task(
                batcher.ask(turn(prompts[i], SEED + i * n + j, deadline, sampling, f"{i}/{j} (prompt p{i})"))
            )
            for i, j in pairs
        ]
        try:
            done = await asyncio.gather(*asks)
        finally:
            await cancel(asks)
    return dict(zip(pairs, done, strict=True))


def texts(prompts: Sequence[Sequence[int]], n: int) -> dict[tuple[int, int], str]:
    """What each pair must be: its prompt's first token, and the seed that is its own whoever plays it."""
    return {(i, j): f"{p[0]} {SEED + i * n + j}" for i, p in enumerate(prompts) for j in range(n)}


def outcome(done: dict[tuple[int, int], Completion]) -> dict[tuple[int, int], str]:
    return {pair: completion.text for pair, completion in done.items()}


async def test_two_servers_get_half_of_the_work_each_and_whole_prompts(servers: list[FakeServer]) -> None:
    draw = random.Random(0)
    prompts = [[i] * draw.randint(1, 60) for i in range(60)]
    async with make_pool(servers) as pool:
        done = await play(pool, prompts, n=2)
        assert [member.in_flight for member in pool.members] == [0, 0]
    assert outcome(done) == texts(prompts, 2)
    assert [len(server.requests) for server in servers] == [1, 1]
    assert [count(server.requests[0]) for server in servers] == [2, 2]
    mine = [{prompt[0] for prompt in server.requests[0].prompts} for server in servers]
    assert not mine[0] & mine[1]
    assert [len(server.requests[0].prompts) for server in servers] == [pytest.approx(30, rel=0.1)] * 2
    tokens = [sum(2 * (len(prompts[i]) + 10) for i in share) for share in mine]
    assert tokens == [pytest.approx(sum(tokens) / 2, rel=0.02)] * 2


async def test_work_goes_to_the_server_with_the_fewest_tokens_in_flight(servers: list[FakeServer]) -> None:
    async with make_pool(servers) as pool:
        for server in servers:
            server.hold.clear()
        long = asyncio.create_task(play(pool, [[1] * 90]))  # 100 tokens with the 10 to come
        while not servers[0].requests + servers[1].requests:
            await asyncio.sleep(0.01)
        busy, free = sorted(servers, key=lambda server: not server.requests)
        assert sorted(member.in_flight for member in pool.members) == [0, 100]
        # 40, 80, 120 tokens there against 100 here: the fourth one goes to the busy server.
        short = asyncio.create_task(play(pool, [[i] * 30 for i in range(2, 6)]))
        while len(busy.requests) < 2:
            await asyncio.sleep(0.01)
        assert len(free.requests[0].prompts) == 3
        assert len(busy.requests[1].prompts) == 1
        for server in servers:
            server.hold.set()
        await asyncio.gather(long, short)
        assert [member.in_flight for member in pool.members] == [0, 0]


async def test_every_pair_has_the_same_seed_whoever_plays_it(servers: list[FakeServer]) -> None:
    prompts = [[i, i] for i in range(5)]
    for some in (servers[:1], servers):
        async with make_pool(some) as pool:
            assert outcome(await play(pool, prompts, n=3)) == texts(prompts, 3)
    assert servers[0].requests[0].seeds == [[1000 + 3 * i + j for j in range(3)] for i in range(5)]  # seed + i * n + j
    assert servers[0].requests[0].sampling.seed is None


async def test_tools_go_where_the_turns_go(servers: list[FakeServer]) -> None:
    toolbox = Toolbox(parser="hermes", tools=({"type": "function"},))
    servers[0].cut_after = 1
    async with make_pool(servers) as pool:
        await play(pool, [[i] for i in range(4)], batcher=Batcher(pool, tools=toolbox))
    sent = [request.tools for server in servers for request in server.requests]
    assert sent == [toolbox] * 3  # two shares, and what was lost


async def test_what_is_too_much_for_one_request_goes_in_several(
    servers: list[FakeServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hocket.batcher.MAX_TURNS", 4)
    prompts = [[i] for i in range(1, 4)]
    async with make_pool(servers[:1]) as pool:
        assert outcome(await play(pool, prompts, n=3)) == texts(prompts, 3)
    assert sorted(sum(map(len, request.seeds or ())) for request in servers[0].requests) == [1, 4, 4]


async def test_what_a_server_had_not_finished_when_it_was_cut_is_played_elsewhere_once(
    servers: list[FakeServer],
) -> None:
    prompts = [[i] for i in range(8)]
    said: list[str] = []
    servers[0].cut_after = 5  # of its 4 prompts with 3 completions each: in the middle of the second prompt
    async with make_pool(servers, say=said.append) as pool:
        done = await play(pool, prompts, n=3)
        assert outcome(done) == texts(prompts, 3)
        lost, other = pool.members
        assert [lost.in_flight, other.in_flight] == [0, 0]
    assert len(servers[0].played) == 5
    assert len(servers[1].played) == 12 + 7
    assert Counter(servers[0].played + servers[1].played).most_common(1)[0][1] == 1
    again = servers[1].requests[1]
    assert sorted(map(len, again.seeds or ())) == [1, 3, 3]  # what is left of a prompt, and two whole ones
    assert any(line.startswith(f"lost server {servers[0].url}") for line in said)


async def test_a_server_that_has_gone_gets_no_work_and_works_again_once_it_is_back(servers: list[FakeServer]) -> None:
    async with make_pool(servers) as pool:
        await pool.wait_up()
        await servers[0].die()
        prompts = [[i] for i in range(6)]
        assert outcome(await play(pool, prompts)) == texts(prompts, 1)
        assert len(servers[1].played) == 6
        await servers[0].start()
        while len(pool.up) < 2:
            await asyncio.sleep(0.05)
            await pool.wait_up()
        await play(pool, prompts)
        assert len(servers[0].played) == 3


async def test_a_server_that_was_started_again_gets_no_work_until_it_is_brought_up(servers: list[FakeServer]) -> None:
    brought: list[tuple[str, str]] = []
    well = True

    async def bring_up(member: Member, health: Health) -> None:
        if not well:
            raise SyncError("it can't take the weights")
        brought.append((member.url, health.session))
        member.mark_ready(health.session)

    async with make_pool(servers) as pool:
        pool.bring_up = bring_up
        await pool.wait_up()
        well = False
        servers[0].session = "s2"  # another process, with other weights, behind the same URL
        prompts = [[i] for i in range(4)]
        assert outcome(await play(pool, prompts)) == texts(prompts, 1)
        assert servers[0].played == []  # it said 409 to what was for the one before
        assert servers[0].requests[0].session == "s1"
        pool.members[0]._next_look = 0.0
        await play(pool, prompts)
        assert servers[0].played == []  # it was looked at, and could not be brought up
        assert pool.members[0].out == "it can't take the weights"
        well = True
        pool.members[0]._next_look = 0.0
        await play(pool, prompts)
        assert len(servers[0].played) == 2
        assert servers[0].requests[-1].session == "s2"
    assert brought == [(servers[0].url, "s1"), (servers[1].url, "s1"), (servers[0].url, "s2")]


async def test_with_no_server_left_work_waits_for_one_to_return_and_its_deadline_with_it(
    servers: list[FakeServer],
) -> None:
    waited: list[tuple[str, float]] = []
    alone = servers[0]
    async with make_pool([alone], on_wait=lambda what, seconds: waited.append((what, seconds))) as pool:
        await pool.wait_up()
        alone.hold.clear()
        playing = asyncio.create_task(play(pool, [[1], [2]], timeout_s=1.5))
        while not alone.requests:
            await asyncio.sleep(0.01)
        await alone.die()
        await asyncio.sleep(1.7)
        alone.hold.set()
        await alone.start()
        assert outcome(await playing) == texts([[1], [2]], 1)
    assert waited
    assert "nothing answers there yet" in waited[-1][0]
    assert waited[-1][1] > 1


async def test_waiting_ends_with_every_servers_reason(servers: list[FakeServer]) -> None:
    await servers[0].die()
    servers[1].status = "loading"
    async with make_pool(servers, start_timeout_s=0.6) as pool:
        with pytest.raises(ServerError, match="gave up after 1 s of waiting for a server") as raised:
            await pool.wait_up()
    assert f"{servers[0].url}: nothing answers there yet; {servers[1].url}: it is loading" in str(raised.value)
    assert "run.py serve" in str(raised.value)
    assert raised.value.code == "timeout"


async def test_a_failed_engine_is_left_out_but_a_failed_load_may_be_mended(servers: list[FakeServer]) -> None:
    for server, code in zip(servers, ("engine_dead", "reload_failed"), strict=True):
        server.status, server.failure = "failed", error(code)
    async with make_pool(servers) as pool:
        assert [member.url for member in await pool.wait_up()] == [servers[1].url]
        assert pool.members[0].out == "it failed: it is engine_dead"


@pytest.mark.parametrize("code", ["aborted", "asleep"])
async def test_what_was_ended_for_others_to_go_first_is_played_again_by_the_same_server(
    servers: list[FakeServer], code: str
) -> None:
    servers[0].end_with = code
    async with make_pool(servers[:1]) as pool:
        assert outcome(await play(pool, [[1], [2]], n=2)) == texts([[1], [2]], 2)
        assert pool.members[0].in_flight == 0
    assert len(servers[0].requests) == 2
    assert servers[0].looks == 1  # it never was out


async def test_a_server_that_is_silent_for_too_long_is_lost(servers: list[FakeServer]) -> None:
    said: list[str] = []
    async with make_pool(servers, silence_s=0.4, say=said.append) as pool:
        await pool.wait_up()
        servers[0].mute = True
        servers[0].hold.clear()
        start = time.monotonic()
        prompts = [[i] for i in range(4)]
        assert outcome(await play(pool, prompts)) == texts(prompts, 1)
        assert 0.4 < time.monotonic() - start < 3
        assert len(servers[1].played) == 4
    assert said == [f"lost server {servers[0].url}: it has not answered for 0.4 s"]


async def test_a_slow_answer_is_waited_for_as_long_as_the_server_lives(servers: list[FakeServer]) -> None:
    async with make_pool(servers[:1], silence_s=0.2) as pool:
        servers[0].hold.clear()
        playing = asyncio.create_task(play(pool, [[1]]))
        await asyncio.sleep(0.8)
        servers[0].hold.set()
        await playing
    assert len(servers[0].requests) == 1


async def test_work_that_is_not_done_in_time_is_an_error(servers: list[FakeServer]) -> None:
    for server in servers:
        server.hold.clear()
    async with make_pool(servers) as pool:
        with pytest.raises(ServerError, match="did not finish in") as raised:
            await play(pool, [[1], [2]], timeout_s=0.3)
        assert [member.in_flight for member in pool.members] == [0, 0]
        assert len(pool.up) == 2
    assert raised.value.code == "timeout"


@pytest.mark.parametrize(("status", "code"), [(401, "unauthorized"), (422, "context_too_long")])
async def test_a_refusal_is_raised_and_tried_nowhere_else(servers: list[FakeServer], status: int, code: str) -> None:
    servers[0].refuse = (status, code)
    async with make_pool(servers) as pool:
        await pool.wait_up()
        with pytest.raises(ServerError, match=f"it is {code}") as raised:
            await play(pool, [[1]])
    assert raised.value.status == status
    assert servers[1].requests == []


async def test_a_refused_token_ends_the_waiting(servers: list[FakeServer]) -> None:
    async def bring_up(member: Member, health: Health) -> None:
        raise ServerError("the token is wrong", code="unauthorized", status=401)

    async with make_pool(servers) as pool:
        pool.bring_up = bring_up
        with pytest.raises(ServerError, match="the token is wrong"):
            await pool.wait_up()


async def test_weights_that_land_nowhere_end_the_run_and_only_here_leave_the_server_out(
    servers: list[FakeServer],
) -> None:
    said: list[str] = []
    bad = {servers[0].url}

    async def bring_up(member: Member, health: Health) -> None:
        member.mark_ready(health.session)  # as the transport reports, before the canary is looked at
        if member.url in bad:
            raise SyncError(f"{member.url} and the trainer disagree")

    async with make_pool(servers[:1]) as pool:
        pool.bring_up = bring_up
        with pytest.raises(SyncError, match="disagree"):
            await pool.wait_up()
        assert pool.up == []
    bad.clear()
    async with make_pool(servers, say=said.append) as pool:
        pool.bring_up = bring_up
        await pool.wait_up()
        bad.add(servers[0].url)
        pool.members[0].mark_out("it was started again")
        pool.members[0]._next_look = 0.0
        await play(pool, [[1], [2]])
        assert pool.up == [pool.members[1]]
        assert "disagree" in str(pool.members[0].out)
    assert f"server {servers[0].url} is left out: {servers[0].url} and the trainer disagree" in said
    assert servers[0].requests == []


async def test_an_answer_that_is_none_is_raised_and_does_not_hang(servers: list[FakeServer]) -> None:
    servers[0].junk = True
    async with make_pool(servers[:1]) as pool:
        with pytest.raises(pydantic.ValidationError):
            await play(pool, [[1], [2]])
        assert pool.members[0].in_flight == 0


async def test_a_request_whose_turns_are_all_cancelled_ends_and_its_server_is_free(servers: list[FakeServer]) -> None:
    async with make_pool(servers[:1]) as pool:
        servers[0].hold.clear()
        batcher, deadline = Batcher(pool), Deadline(10)
        asks = [batcher.ask(turn([i], i, deadline)) for i in (1, 2)]
        first, second = map(asyncio.create_task, asks)
        while not servers[0].requests:
            await asyncio.sleep(0.01)
        first.cancel()
        await asyncio.sleep(0.05)
        assert pool.members[0].in_flight == 22  # the second one goes on
        second.cancel()
        while pool.members[0].in_flight:
            await asyncio.sleep(0.01)
        servers[0].hold.set()
    assert len(servers[0].requests) == 1
    await asyncio.gather(first, second, return_exceptions=True)


async def test_leaving_the_pool_ends_all_requests(servers: list[FakeServer]) -> None:
    servers[0].hold.clear()
    async with make_pool(servers[:1]) as pool:
        playing = asyncio.create_task(play(pool, [[1], [2]]))
        while not servers[0].requests:
            await asyncio.sleep(0.01)
    assert pool.members[0].in_flight == 0
    playing.cancel()
    await asyncio.gather(playing, return_exceptions=True)


async def test_looking_at_a_server_that_is_out_costs_those_that_work_a_tenth_of_their_time(
    servers: list[FakeServer],
) -> None:
    async def bring_up(member: Member, health: Health) -> None:
        if member.url in well:
            member.mark_ready(health.session)
            return
        await asyncio.sleep(0.2)
        raise ServerError("it does not load", code="reload_failed", status=500)

    well: list[str] = []
    for rest_s in (0.25, 2.0):
        async with make_pool(servers) as pool:
            pool.bring_up = bring_up
            start = time.monotonic()
            await pool.look_at_all()
            took_s = time.monotonic() - start
            rested_s = pool.members[1]._next_look - start
            assert 0.2 + rest_s <= rested_s <= took_s + rest_s * took_s / 0.2
        well.append(servers[0].url)  # from now on one of them works


async def test_work_on_which_one_server_after_the_other_is_lost_is_not_played_for_ever(
    servers: list[FakeServer],
) -> None:
    for server in servers:
        server.refuse = (503, "engine_dead")
    async with make_pool(servers) as pool:
        with pytest.raises(
            ServerError, match=r"3 servers failed while generating step 1/0/0 \(prompt p0\)\..*see the server logs"
        ):
            await play(pool, [[1]])


BOUNDS = {"max_length": 64, "max_calls": 3, "idle_timeout_s": 9.0}


async def test_sessions_go_to_the_server_with_the_fewest_tokens_and_end_with_their_body(
    servers: list[FakeServer],
) -> None:
    async with make_pool(servers) as pool, contextlib.AsyncExitStack() as stack:
        for _ in range(6):
            await stack.enter_async_context(pool.session(SAMPLING, tokens=10, deadline=Deadline(60), **BOUNDS))
        assert [len(server.opened) for server in servers] == [3, 3]
        assert [member.in_flight for member in pool.members] == [30, 30]
        assert servers[0].opened[0].session == "s1"
        assert servers[0].opened[0].sampling == SAMPLING
        async with pool.session(SAMPLING, tokens=10, deadline=Deadline(60), **BOUNDS) as session:
            assert session.base_url.startswith(servers[0].url)
            assert (session.model, session.api_key) == ("m", "k")
            assert (await session.close()).calls == ()
            assert [len(server.opened) for server in servers] == [3, 3]  # and not twice
        await stack.aclose()
        assert [len(server.opened) for server in servers] == [0, 0]
        assert [member.in_flight for member in pool.members] == [0, 0]


async def test_sessions_that_are_opened_at_the_same_time_are_spread_over_the_servers(
    servers: list[FakeServer],
) -> None:
    async with make_pool(servers) as pool:
        await pool.wait_up()
        sessions = [pool.session(SAMPLING, tokens=10, deadline=Deadline(60), **BOUNDS) for _ in range(6)]
        await asyncio.gather(*(session.__aenter__() for session in sessions))
        assert [len(server.opened) for server in servers] == [3, 3]
        await asyncio.gather(*(session.__aexit__(None, None, None) for session in sessions))
        assert [member.in_flight for member in pool.members] == [0, 0]


async def test_a_session_whose_closing_is_cancelled_is_closed_with_its_body(servers: list[FakeServer]) -> None:
    async with make_pool(servers[:1]) as pool:
        async with pool.session(SAMPLING, tokens=10, deadline=Deadline(60), **BOUNDS) as session:
            servers[0].hold.clear()
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(session.close(), 0.3)
            await asyncio.sleep(0.1)  # the server sees that nobody listens any more
            servers[0].hold.set()
            assert len(servers[0].opened) == 1
        assert servers[0].opened == []


async def test_a_session_is_opened_elsewhere_where_a_server_is_gone_and_one_that_is_lost_says_so(
    servers: list[FakeServer],
) -> None:
    async with make_pool(servers) as pool:
        await pool.wait_up()
        await servers[0].die()
        async with pool.session(SAMPLING, tokens=10, deadline=Deadline(60), **BOUNDS) as session:
            assert session.base_url.startswith(servers[1].url)
            assert len(pool.up) == 1
            await servers[1].die()
            with pytest.raises(ServerError, match="can't reach"):
                await session.close()
            assert pool.up == []
        assert [member.in_flight for member in pool.members] == [0, 0]
        asyncio.get_running_loop().call_later(0.3, lambda: asyncio.ensure_future(servers[1].start()))
        deadline = Deadline(0.1)
        async with pool.session(SAMPLING, tokens=10, deadline=deadline, **BOUNDS):
            assert deadline.left_s > 0  # it stood still while there was no server


async def test_a_session_that_is_refused_is_an_error(servers: list[FakeServer]) -> None:
    servers[0].refuse = (422, "invalid_request")
    async with make_pool(servers[:1]) as pool:
        with pytest.raises(ServerError, match="it is invalid_request"):
            async with pool.session(SAMPLING, tokens=10, deadline=Deadline(60), **BOUNDS):
                pass
        assert pool.members[0].in_flight == 0


async def test_turns_of_one_moment_are_one_request_per_kind_of_sampling_and_deadline(
    servers: list[FakeServer],
) -> None:
    async with make_pool(servers[:1]) as pool:
        batcher, other = Batcher(pool), SamplingParams(max_tokens=3)
        await asyncio.gather(
            play(pool, [[1], [2]], n=2, batcher=batcher),
            play(pool, [[3]], batcher=batcher),
            play(pool, [[4]], batcher=batcher, sampling=other),
        )
    sent = sorted((request.sampling.max_tokens, request.prompts, request.seeds) for request in servers[0].requests)
    assert sent == [
        (3, [[4]], [[1000]]),
        (10, [[1], [2]], [[1000, 1001], [1002, 1003]]),  # each prompt once
        (10, [[3]], [[1000]]),  # of another batch
    ]


async def test_while_many_requests_are_under_way_turns_wait_for_company(
    servers: list[FakeServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batcher_module, "MAX_REQUESTS", 3)
    alone = servers[0]
    alone.hold.clear()
    async with make_pool([alone]) as pool:
        batcher, deadline = Batcher(pool), Deadline(10)
        asks = []
        for i in range(9):
            asks.append(asyncio.create_task(batcher.ask(turn([i], i, deadline))))
            while len(alone.requests) <= min(i, 2):
                await asyncio.sleep(0.001)
        kinds = [batcher.ask(turn([i], i, deadline, SamplingParams(max_tokens=i))) for i in range(20, 25)]
        kinds = [asyncio.create_task(ask) for ask in kinds]
        await asyncio.sleep(0.1)
        assert len(alone.requests) == 3
        alone.hold.set()
        done = await asyncio.gather(*asks, *kinds)
    assert [one.text for one in done] == [f"{i} {i}" for i in (*range(9), *range(20, 25))]  # to each its own
    assert max(len(request.prompts) for request in alone.requests) == 6  # together


async def test_turns_of_a_group_stay_on_their_server_until_that_is_busier_by_more_than_they_are(
    servers: list[FakeServer],
) -> None:
    async with make_pool(servers) as pool:
        batcher = Batcher(pool)
        await pool.wait_up()
        first, second = pool.members
        first.in_flight = 1
        await play(pool, [[7] * 30], n=2, batcher=batcher)  # 2 x 40 tokens, on the second server
        second.in_flight += 80
        await play(pool, [[7] * 31], batcher=batcher)  # its prefix is there
        assert [len(server.requests) for server in servers] == [0, 2]
        second.in_flight += 2
        await play(pool, [[7] * 32], batcher=batcher)
        assert [len(server.requests) for server in servers] == [1, 2]
