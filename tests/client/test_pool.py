"""Pool and batcher against servers in memory: which are up, which plays what, what becomes of it."""

import asyncio
import doctest
import random
import time
from array import array
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import pytest

from hocket.client.batcher import Batcher, Turn
from hocket.client.member import Member, State
from hocket.client.pool import MAX_LOSSES, Deadline, ServerPool
from hocket.common.tasks import cancel
from hocket.errors import ServerError, SyncError
from hocket.protocol import ErrorBody, GenerateRequest, Health, SamplingParams, StreamLine, Toolbox
from support import fakes
from support.servers import SAMPLING, FakeServer, Pool, error, until

SEED = 1000
Servers = list[FakeServer]


def make_server(number: int) -> FakeServer:
    return FakeServer(f"http://server{number}", session=f"s{number + 1}")


@pytest.fixture
def servers() -> Servers:
    return [make_server(0), make_server(1)]


@pytest.fixture(autouse=True)
async def deadline(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    """No wait without a deadline: a pool that hangs fails its test."""
    for name in ("pool.POLL_S", "discover.FIND_S", "pool.LOST_REST_S", "batcher.POLL_S"):
        monkeypatch.setattr(f"hocket.client.{name}", 0.02)
    # In the test's own task: a fixture has another one.
    ends = asyncio.get_running_loop().call_later(120, lambda: [task.cancel() for task in asyncio.all_tasks()])
    yield
    ends.cancel()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> fakes.Clock:
    clock = fakes.Clock()
    monkeypatch.setattr("hocket.client.pool.time", clock)
    return clock


class Listing:
    """A list of servers that changes while a pool follows it, with what a look-up has to say instead."""

    def __init__(self, servers: Sequence[FakeServer], monkeypatch: pytest.MonkeyPatch) -> None:
        self.servers = [*servers]  # those listed
        self.error: ServerError | None = None
        self.go = asyncio.Event()  # look-ups wait for it
        self.go.set()
        self.count = 0  # look-ups that have ended
        known = {server.url: server for server in servers}
        monkeypatch.setattr("hocket.client.pool.ServerClient", lambda url, **how: known[url])

    async def find(self) -> list[str]:
        await self.go.wait()
        self.count += 1
        if self.error is not None:
            raise self.error
        return [server.url for server in self.servers]

    async def followed(self) -> None:
        """Waits until the pool has made use of the list as it is now."""
        count = self.count
        await until(lambda: self.count > count + 1)  # it asks again only then


def bring_up(pool: ServerPool, check: Callable[[Member], None] = lambda member: None) -> list[tuple[str, str]]:
    """Has the pool bring up servers that pass a check; returns URL and session of those that came, as they come."""
    brought: list[tuple[str, str]] = []

    async def bring(there: Mapping[Member, Health]) -> None:
        for member, health in there.items():
            pool.mark_loaded(member, health)  # as the transport reports, before it is checked
            check(member)
            brought.append((member.url, health.session))

    pool.bring_up = bring
    return brought


async def play(
    pool: ServerPool,
    prompts: Sequence[Sequence[int]],
    *,
    n: int = 1,
    timeout_s: float = 10.0,
    deadline: Deadline | None = None,  # else a batch of its own
    batcher: Batcher | None = None,
    sampling: SamplingParams = SAMPLING,
) -> None:
    """Asks for n completions of each prompt; each is its own, whoever plays it. The turns of a prompt are a group."""
    batcher, deadline = batcher or Batcher(pool), deadline or Deadline(timeout_s)
    turns = [
        Turn(
            token_ids=array("I", prompt),
            sampling=sampling,
            seed=SEED + i * n + j,
            deadline=deadline,
            group=f"g/{prompt[0]}",
            place=f"step 1/{i}/{j} (prompt p{i})",
        )
        for i, prompt in enumerate(prompts)
        for j in range(n)
    ]
    asks = [asyncio.create_task(batcher.ask(one)) for one in turns]
    try:
        assert [done.text for done in await asyncio.gather(*asks)] == [f"{t.token_ids[0]} {t.seed}" for t in turns]
    finally:
        await cancel(asks)


@pytest.mark.parametrize("example", [ServerPool, Batcher])
def test_the_example_in_the_docstring_runs(example: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hocket.client.pool.ServerClient", lambda url, **options: FakeServer(url))
    (test,) = [test for test in doctest.DocTestFinder(recurse=False).find(example) if test.examples]
    results = doctest.DocTestRunner().run(test)
    assert results.failed == 0
    assert results.attempted > 0


async def test_two_servers_get_half_of_the_work_each_and_whole_prompts(servers: Servers, rng: random.Random) -> None:
    prompts = [[i] * rng.randint(1, 60) for i in range(60)]
    async with Pool(servers) as pool:
        await play(pool, prompts, n=2)
        assert [member.in_flight for member in pool.members] == [0, 0]
    (one,), (other,) = (server.requests for server in servers)
    mine = [{prompt[0] for prompt in request.prompts} for request in (one, other)]
    assert not mine[0] & mine[1]
    assert [len(share) for share in mine] == [pytest.approx(30, abs=3)] * 2
    assert {len(seeds) for request in (one, other) for seeds in request.seeds or ()} == {2}
    tokens = [sum(2 * (len(prompts[i]) + 10) for i in share) for share in mine]
    assert abs(tokens[0] - tokens[1]) <= 2 * (60 + 10)  # a prompt, which goes where less is, tips it by itself at most
    async with Pool(servers[:1]) as pool:  # whoever plays it
        await play(pool, prompts, n=2)


async def test_what_is_too_much_for_one_request_goes_in_several(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hocket.client.batcher.MAX_TURNS", 4)
    prompts = [[i] for i in range(1, 4)]
    async with Pool(servers[:1]) as pool:
        await play(pool, prompts, n=3)
    assert sorted(sum(map(len, request.seeds or ())) for request in servers[0].requests) == [1, 4, 4]


@pytest.mark.parametrize("ends_early", [False, True])
async def test_what_a_server_had_not_finished_when_it_was_cut_is_played_elsewhere_once(
    servers: Servers, ends_early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hocket.client.pool.LOST_REST_S", 60.0)  # the cut one stays out, also on a busy machine
    prompts = [[i] for i in range(8)]
    toolbox = Toolbox(parser="hermes", tools=({"type": "function"},))
    # Of its 4 prompts with 3 completions each: in the middle of the second prompt.
    servers[0].cut = 5, None if ends_early else error("cut")
    async with Pool(servers) as pool:
        await play(pool, prompts, n=3, batcher=Batcher(pool, tools=toolbox))
        assert [member.in_flight for member in pool.members] == [0, 0]
    assert [len(server.played) for server in servers] == [5, 12 + 7]
    assert Counter(servers[0].played + servers[1].played).most_common(1)[0][1] == 1
    again = servers[1].requests[1]
    assert sorted(map(len, again.seeds or ())) == [1, 3, 3]  # what is left of a prompt, and two whole ones
    why = f"{servers[0].url}/generate ended 7 completions too early" if ends_early else "it is cut"
    assert pool.said[0] == f"lost server {servers[0].url}: {why}"
    assert [request.tools for server in servers for request in server.requests] == [toolbox] * 3


async def test_a_run_can_tell_what_it_knows_of_each_server(servers: Servers) -> None:
    servers[1].status = "updating"
    async with Pool(servers, trainer="mine") as pool:
        changes: list[list[bool]] = []
        pool.on_change = lambda: changes.append([member.is_up for member in pool.members])
        await pool.wait_up()
        load = {"in_flight": 0, "waiting": None, "kv_use": None, "kv_tokens": fakes.health().kv_tokens}
        waiting = {"state": "waiting", "reason": "it is updating"}
        seen = {"status": "ready", "version": 0, **load}
        assert pool.states() == [
            {"url": servers[0].url, "up": True, "state": "up", "reason": None, **seen},
            {"url": servers[1].url, "up": False, **waiting, **seen, "status": "updating"},
        ]
        for _ in range(2):
            pool.mark_lost(pool.members[0], "it broke")
        assert changes == [[True, False], [False, False]]
        assert [state["reason"] for state in pool.states()] == ["it broke", "it is updating"]


async def test_a_server_that_was_started_again_gets_no_work_until_it_is_brought_up(servers: Servers) -> None:
    well = True

    def check(member: Member) -> None:
        if not well:
            raise SyncError("it can't take the weights")

    async def played() -> int:
        """Plays four prompts and returns how many of all were played by the first server."""
        await play(pool, [[i] for i in range(4)])
        pool.members[0].next_look = 0.0
        return len(servers[0].played)

    async with Pool(servers) as pool:
        brought = bring_up(pool, check)
        await pool.wait_up()
        well = False
        servers[0].session = "s9"  # another process, with other weights, behind the same URL
        assert await played() == 0  # it said 409 to what was for the one before
        assert servers[0].requests[0].session == "s1"
        assert await played() == 0  # it was looked at, and could not be brought up
        assert pool.said[-1] == f"server {servers[0].url} is left out: {pool.members[0].reason}"
        assert (pool.up, pool.members[0].reason) == ([pool.members[1]], "it can't take the weights")
        well = True
        assert await played() == 2
        assert servers[0].requests[-1].session == "s9"
        servers[0].die()
        assert await played() == 2
        servers[0].dead = False
        assert await played() == 4
    sessions = [(servers[0].url, "s1"), (servers[1].url, "s2"), (servers[0].url, "s9"), (servers[0].url, "s9")]
    assert brought == sessions


async def test_a_server_gets_no_turns_until_its_weights_are_checked(servers: Servers) -> None:
    checking, checked = asyncio.Event(), asyncio.Event()

    async def bring(healths: Mapping[Member, Health]) -> None:
        for member, health in healths.items():
            pool.mark_loaded(member, health)
        checking.set()
        await checked.wait()

    async with Pool(servers) as pool:
        checked.set()
        first, second = await pool.wait_up()
        pool.bring_up = bring
        pool.mark_lost(first, "it broke")
        first.next_look = 0.0
        checking.clear()
        checked.clear()
        looking = asyncio.create_task(pool.look_at_all())
        await checking.wait()
        assert (first.state, first.session, pool.up) == (State.CHECKING, "s1", [second])
        await play(pool, [[1], [2], [3], [4]])
        assert (len(servers[0].played), len(servers[1].played)) == (0, 4)
        checked.set()
        await looking
        assert pool.up == [first, second]
        await play(pool, [[1], [2], [3], [4]])
        assert (len(servers[0].played), len(servers[1].played)) == (2, 6)


async def test_a_server_whose_check_is_broken_off_is_brought_up_again_before_it_works(servers: Servers) -> None:
    checking = asyncio.Event()

    async def bring(healths: Mapping[Member, Health]) -> None:
        for member, health in healths.items():
            pool.mark_loaded(member, health)
        checking.set()
        await asyncio.Event().wait()

    async with Pool(servers[:1]) as pool:
        pool.bring_up = bring
        looking = asyncio.create_task(pool.wait_up())
        await checking.wait()
        await cancel([looking])
        assert (pool.up, pool.members[0].state) == ([], State.WAITING)
        brought = bring_up(pool)
        assert await pool.wait_up() == pool.members
        assert brought == [(servers[0].url, "s1")]


@pytest.mark.parametrize("place", [(0, 0), (1, 0), (0, 2), (-1, 0), (0, -1)])  # the first one is there already
async def test_a_server_that_answers_what_nobody_asked_is_lost_and_its_turns_are_played_elsewhere(
    servers: Servers, place: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hocket.client.pool.LOST_REST_S", 60.0)
    generate = servers[0].generate

    async def confused(request: GenerateRequest, *, timeout_s: float) -> AsyncGenerator[StreamLine, None]:
        async for line in generate(request, timeout_s=timeout_s):
            yield line
            yield line.model_copy(update={"prompt": place[0], "index": place[1]})

    servers[0].generate = confused  # type: ignore[method-assign]
    async with Pool(servers) as pool:
        await pool.wait_up()
        await play(pool, [[5]], n=2)
        first = pool.members[0]
        number, index = place
        fact = f"{servers[0].url}/generate answered prompt {number}, sample {index} twice, or unasked"
        assert (first.state, first.reason, first.in_flight) == (State.LOST, fact, 0)
        assert sorted(servers[0].played + servers[1].played) == [f"5 {SEED}", f"5 {SEED + 1}"]


async def test_with_no_server_left_work_waits_for_one_to_return_and_its_deadline_with_it(
    servers: Servers, clock: fakes.Clock
) -> None:
    waited, alone = list[tuple[str, float]](), servers[0]

    def on_wait(what: str, seconds: float) -> None:
        waited.append((what, seconds))
        clock.now += 100.0
        alone.dead = len(waited) < 2

    async with Pool([alone], on_wait=on_wait, start_timeout_s=1000.0) as pool:
        await pool.wait_up()
        alone.go.clear()
        playing = asyncio.create_task(play(pool, [[1], [2]], timeout_s=20.0))
        await until(lambda: alone.requests)
        alone.die()
        clock.now += 1.0
        await playing
    assert waited[1][0].startswith(f"waiting for {alone.url} (nothing answers there yet); if none is starting")
    assert waited[1][1] == 100.0


async def test_turns_that_join_while_no_server_is_up_lose_no_time_either(servers: Servers, clock: fakes.Clock) -> None:
    alone, asks = servers[0], list[asyncio.Task[None]]()

    def on_wait(what: str, seconds: float) -> None:
        if len(asks) < 4:
            asks.append(asyncio.create_task(play(pool, [[len(asks) + 2]], timeout_s=20.0, batcher=batcher)))
        elif seconds > 100.0:
            alone.dead = False
        clock.now += 15.0

    alone.die()
    async with Pool([alone], on_wait=on_wait, start_timeout_s=1000.0) as pool:
        batcher = Batcher(pool)
        await play(pool, [[1]], timeout_s=20.0, batcher=batcher)
        await asyncio.gather(*asks)
    assert sorted(alone.played) == [f"{number} {SEED}" for number in range(1, 6)]


async def test_a_look_that_is_broken_off_leaves_the_server_to_the_next_one(servers: Servers) -> None:
    alone = servers[0]
    alone.mute = True
    async with Pool([alone]) as pool:
        looking = asyncio.create_task(pool.wait_up())
        await until(lambda: alone.looks)
        looking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await looking
        assert pool.members[0].state is State.WAITING
        alone.mute = False
        assert await pool.wait_up() == pool.members


async def test_what_fails_late_on_a_server_that_is_lost_disturbs_no_look_at_it(servers: Servers) -> None:
    """Many requests fail with a server, and some only once another process answers there."""
    alone = servers[0]
    async with Pool([alone]) as pool:
        (member,) = await pool.wait_up()
        pool.mark_lost(member, "the first request failed")
        member.next_look = 0.0
        loading, loaded = asyncio.Event(), asyncio.Event()

        async def load(there: Mapping[Member, Health]) -> None:
            loading.set()
            await loaded.wait()
            for one, health in there.items():
                pool.mark_loaded(one, health)

        pool.bring_up = load
        looking = asyncio.create_task(pool.wait_up())
        await loading.wait()
        assert pool.loses(member, error("cut"))  # its turns are played again
        assert member.state is State.JOINING
        loaded.set()
        assert await looking == [member]


async def test_a_server_that_is_marked_lost_during_a_look_stays_lost_whatever_the_look_finds(servers: Servers) -> None:
    looks, looked = list[Member](), asyncio.Event()

    async def look(member: Member) -> Health:
        looks.append(member)
        await looked.wait()
        raise error("unreachable")

    async with Pool(servers[:1]) as pool:
        pool.look = look
        looking = asyncio.create_task(pool.look_at_all())
        await until(lambda: looks)
        pool.mark_lost(pool.members[0], "an earlier request failed")
        looked.set()
        await looking
        assert (pool.members[0].state, pool.members[0].reason) == (State.LOST, "an earlier request failed")


async def test_waiting_ends_with_every_servers_reason(servers: Servers, clock: fakes.Clock) -> None:
    servers += [make_server(2), make_server(3)]
    servers[0].die()
    servers[1].status = "updating"
    for server, code in zip(servers[2:], ("engine_dead", "reload_failed"), strict=True):
        server.status, server.failure = "failed", ErrorBody(code=code, message=f"it is {code}", hint="")
    passing = lambda what, seconds: setattr(clock, "now", clock.now + 6.0)  # noqa: E731
    async with Pool(servers[:3], on_wait=passing) as pool:
        with pytest.raises(ServerError, match=r"gave up after 12 s of waiting for http.*run\.py serve") as raised:
            await asyncio.wait_for(play(pool, [[1], [2]]), 20)  # every turn that waits is told
    reasons = ("nothing answers there yet", "it is updating", "it failed: it is engine_dead")
    said = " or ".join(f"{server.url} ({reason})" for server, reason in zip(servers, reasons, strict=False))
    assert said in str(raised.value)
    assert raised.value.code == "timeout"
    async with Pool(servers) as pool:  # a failed load may be mended
        assert [member.url for member in await pool.wait_up()] == [servers[3].url]


@pytest.mark.parametrize("code", ["aborted", "asleep"])
async def test_what_was_ended_for_others_to_go_first_is_played_again_by_the_same_server(
    servers: Servers, code: str
) -> None:
    servers[0].cut = 0, error(code)
    async with Pool(servers[:1]) as pool:
        await play(pool, [[1], [2]], n=2)
        assert pool.members[0].in_flight == 0
    assert len(servers[0].requests) == 2
    assert servers[0].looks == 1  # it never was out


@pytest.mark.parametrize("code", ["reload_failed", "not_resumed"])
async def test_a_server_that_a_reload_mends_is_brought_up_and_plays_what_it_had_not_finished(
    servers: Servers, code: str
) -> None:
    alone, found = servers[0], list[str]()

    def mend(member: Member) -> None:
        found.append(alone.status)
        alone.status, alone.failure = "ready", None
        alone.errors.clear()

    async with Pool([alone]) as pool:
        bring_up(pool, mend)
        await pool.wait_up()
        alone.status, alone.errors["generate"] = "failed", error(code, 503)
        alone.failure = ErrorBody(code=code, message="it stands still", hint="")
        await play(pool, [[1], [2]])
    assert found == ["ready", "failed"]


async def test_a_server_that_is_silent_for_too_long_is_lost_but_a_slow_answer_is_waited_for(servers: Servers) -> None:
    async with Pool(servers, silence_s=0.1) as pool:
        await pool.wait_up()
        servers[0].mute = True
        for server in servers:
            server.go.clear()
        prompts = [[i] for i in range(4)]
        playing = asyncio.create_task(play(pool, prompts))
        await until(lambda: len(servers[1].requests) == 2)
        assert pool.said == [f"lost server {servers[0].url}: it has not answered for 0.1 s"]
        looks = servers[1].looks
        await until(lambda: servers[1].looks > looks + 8)  # each after a fourth of the silence
        servers[1].go.set()
        await playing
    assert len(servers[1].requests) == 2


async def test_work_that_is_not_done_in_time_is_an_error(servers: Servers) -> None:
    for server in servers:
        server.go.clear()
    async with Pool(servers) as pool:
        with pytest.raises(ServerError, match="it is timeout"):
            await play(pool, [[1], [2]], timeout_s=0.05)
        assert [member.in_flight for member in pool.members] == [0, 0]
        assert len(pool.up) == 2


@pytest.mark.parametrize(
    "failure",
    [error("unauthorized", 401), error("context_too_long", 422), error("other_trainer", 409), ValueError("no answer")],
)
async def test_a_refusal_is_raised_and_tried_nowhere_else(servers: Servers, failure: Exception) -> None:
    servers[0].errors["generate"] = failure
    async with Pool(servers) as pool:
        with pytest.raises(type(failure), match=str(failure)):
            await play(pool, [[1]])
        assert pool.members[0].in_flight == 0
    assert servers[1].requests == []


async def test_an_answer_that_nobody_asked_for_is_raised_after_three_losses(
    servers: Servers,
) -> None:
    tasks: list[Any] = []

    async def generate(request: GenerateRequest, *, timeout_s: float) -> AsyncGenerator[StreamLine, None]:
        tasks.append(asyncio.current_task())
        try:
            yield StreamLine(prompt=7, index=0, completion=fakes.completion(5, logprobs=(-0.5,)))
        finally:
            tasks.append(asyncio.current_task())

    servers[0].generate = generate  # type: ignore[method-assign]
    async with Pool(servers[:1]) as pool:
        with pytest.raises(ServerError, match=r"Last error: .* answered prompt 7, sample 0 twice, or unasked"):
            await play(pool, [[1]])
    assert len(tasks) == 2 * MAX_LOSSES
    for begun, closed in zip(tasks[::2], tasks[1::2], strict=True):
        assert closed is begun  # by the garbage collector it would be another one, after its deadline perhaps


async def test_leaving_the_pool_ends_all_requests_and_keeps_the_reason(servers: Servers) -> None:
    servers[0].go.clear()
    playing = []
    with pytest.raises(RuntimeError, match="the reason"):  # noqa: PT012 - leaving is what is tested
        async with Pool(servers[:1]) as pool:
            batcher = Batcher(pool)
            playing.append(asyncio.create_task(play(pool, [[1], [2]], batcher=batcher)))
            await until(lambda: servers[0].requests)
            assert pool.members[0].in_flight == 2 * (1 + 10)  # prompt, and the tokens to come at most
            playing.append(asyncio.create_task(play(pool, [[3]], batcher=batcher)))
            await until(lambda: len(servers[0].requests) == 2)
            raise RuntimeError("the reason")
    assert pool.members[0].in_flight == 0
    await cancel(playing)


async def test_looking_at_a_server_that_is_out_costs_those_that_work_a_tenth_of_their_time(
    servers: Servers, clock: fakes.Clock
) -> None:
    def load(member: Member) -> None:
        clock.now += 0.2 if member is pool.members[-1] else 0.0
        if member.url != servers[0].url:
            pool.mark_lost(member, "it does not load")

    for there, rests_s in ((servers[1:], 0.2), (servers, 2.0)):
        async with Pool(there) as pool:
            bring_up(pool, load)
            await pool.look_at_all()
            assert pool.members[-1].next_look - clock.now == pytest.approx(rests_s)


async def test_work_on_which_one_server_after_the_other_is_lost_is_not_played_for_ever(servers: Servers) -> None:
    for server in servers:
        server.errors["generate"] = error("engine_dead", 503)
    says = r"3 servers failed while generating step 1/0/0 \(prompt p0\)\..*see the server logs"
    async with Pool(servers) as pool:
        with pytest.raises(ServerError, match=says):
            await play(pool, [[1]])
        await asyncio.sleep(0.1)
    assert sum(len(server.requests) for server in servers) == 3


async def test_servers_that_come_are_brought_up_and_those_that_have_left_and_are_lost_are_dropped(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = servers
    listing = Listing(servers, monkeypatch)
    listing.servers = [first]
    async with Pool([], find=listing.find) as pool:
        brought = bring_up(pool)
        prompts = [[i] for i in range(8)]
        await play(pool, prompts)  # the first list is waited for
        assert len(first.played) == 8
        listing.servers = [first, second, second]  # named twice
        await listing.followed()
        await play(pool, prompts)
        assert [len(server.played) for server in servers] == [12, 4]
        assert brought == [(first.url, "s1"), (second.url, "s2")]
        listing.servers = [second]
        await listing.followed()
        await play(pool, prompts)  # the first one still works, listed or not
        assert [len(server.played) for server in servers] == [16, 8]
        first.go.clear()
        playing = asyncio.create_task(play(pool, prompts))
        await until(lambda: len(first.requests) == 4)
        first.die()
        await playing  # by the second one, after all
        await listing.followed()
        assert [member.url for member in pool.members] == [second.url]
        assert (first.is_closed, second.is_closed) == (True, False)
        looks = first.looks
        await play(pool, prompts)
        assert first.looks == looks  # nobody looks at it any more
        assert [len(server.played) for server in servers] == [16, 24]
        first.dead, first.session = False, "s9"
        listing.servers = [first, second]  # another process at its address
        await listing.followed()
        await pool.wait_up()
        assert brought[2:] == [(first.url, "s9")]
    lost = f"can't reach {first.url}"
    assert pool.said == [f"lost server {first.url}: {lost}", f"server {first.url} has left: {lost}"]


async def test_a_look_up_that_hangs_or_fails_disturbs_nobody_and_is_reported_once(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    listing = Listing(servers, monkeypatch)
    async with Pool([], find=listing.find) as pool:
        await pool.wait_up()
        for _ in range(2):
            listing.error = ServerError("server.discover=x:1 finds no server: it is down", code="unreachable")
            await listing.followed()
            await listing.followed()
            await play(pool, [[i] for i in range(4)])
            listing.error = None
            await listing.followed()
        listing.servers = [make_server(7)]  # no client can be made of its URL
        await listing.followed()
        listing.servers = servers
        await listing.followed()
        listing.go.clear()
        await play(pool, [[i] for i in range(4)])
    assert [len(server.played) for server in servers] == [6, 6]
    down = "server.discover=x:1 finds no server: it is down. Those known so far are kept"
    assert pool.said == [down, down, "'http://server7'. Those known so far are kept"]


async def test_a_list_that_stays_empty_is_waited_for_and_then_named(
    servers: Servers, clock: fakes.Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    listing, waited = Listing(servers, monkeypatch), list[str]()
    listing.error = ServerError("server.discover=x:1 finds no server: no such name", code="unreachable")
    listing.go.clear()

    def on_wait(what: str, seconds: float) -> None:
        waited.append(what)
        listing.go.set()
        clock.now += 5.0 if listing.count > 1 else 0.0

    async with Pool([], find=listing.find, on_wait=on_wait) as pool:
        with pytest.raises(ServerError, match=r"gave up after 15 s .* no such name.* or server\.discover") as raised:
            await pool.wait_up()
    assert raised.value.code == "timeout"
    assert waited[0] == (
        "waiting for a server (none is found yet); if none is starting, start one: python3 run.py serve CONFIG"
    )
    assert waited[-1].startswith(f"waiting for a server ({listing.error}); ")


async def test_turns_of_one_moment_are_one_request_per_kind_of_sampling_and_deadline(servers: Servers) -> None:
    async with Pool(servers[:1]) as pool:
        batcher, other = Batcher(pool), SamplingParams(max_tokens=3)
        await asyncio.gather(
            play(pool, [[1], [2]], n=2, batcher=batcher),
            play(pool, [[3]], batcher=batcher),
            play(pool, [[4]], batcher=batcher, sampling=other, timeout_s=5.0),
        )
    assert servers[0].requests[0].prompts == [[4]]  # the most urgent one
    sent = sorted((request.sampling.max_tokens, request.prompts, request.seeds) for request in servers[0].requests)
    assert sent == [
        (3, [[4]], [[1000]]),
        (10, [[1], [2]], [[1000, 1001], [1002, 1003]]),  # each prompt once
        (10, [[3]], [[1000]]),  # of another batch
    ]


async def test_turns_of_a_group_stay_on_their_server_until_that_is_busier_by_more_than_they_are(
    servers: Servers,
) -> None:
    async with Pool(servers) as pool:
        batcher, deadline = Batcher(pool), Deadline(10)
        await pool.wait_up()
        first, second = pool.members
        first.in_flight = 1
        await play(pool, [[7] * 30], n=2, batcher=batcher, deadline=deadline)  # 2 x 40 tokens, on the second server
        second.in_flight += 80
        await play(pool, [[7] * 31], batcher=batcher, deadline=deadline)  # its prefix is there
        assert [len(server.requests) for server in servers] == [0, 2]
        second.in_flight += 2
        await play(pool, [[7] * 32], batcher=batcher, deadline=deadline)
        assert [len(server.requests) for server in servers] == [1, 2]


async def test_the_more_requests_are_in_flight_the_longer_turns_wait_for_company(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hocket.client.batcher.time", clock := fakes.Clock())
    async with Pool(servers[:1]) as pool:
        batcher = Batcher(pool)
        batcher._requests[(await pool.wait_up())[0]] = 60  # 2 ms · 2 ** (60 / 8) is 0.362 s
        first = asyncio.create_task(play(pool, [[1]], batcher=batcher))
        await asyncio.sleep(0.05)
        clock.now += 0.36
        others = [asyncio.create_task(play(pool, [[i]], batcher=batcher)) for i in range(2, 6)]
        await asyncio.sleep(0.05)
        assert servers[0].requests == []
        clock.now += 0.01
        await asyncio.gather(first, *others)
        batcher._requests[pool.members[0]] = 10**6
        assert batcher._window_s() < 1.1
    assert len(servers[0].requests) == 5  # of five batches, at the same moment


async def test_turns_wait_for_no_company_where_a_server_has_become_idle_however_busy_others_are(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hocket.client.batcher.time", clock := fakes.Clock())
    monkeypatch.setattr("hocket.client.batcher.REQUESTS_PER_DOUBLING", 1)
    for server in servers:
        server.go.clear()
    kinds = [SamplingParams(max_tokens=10 + number) for number in range(9)]  # a request of each: 2 ms · 2 ** 9
    async with Pool(servers) as pool:
        batcher, asks = Batcher(pool), list[asyncio.Task[None]]()
        for member, server in zip(await pool.wait_up(), servers, strict=True):
            member.in_flight -= 10**6  # all go there
            asks += [asyncio.create_task(play(pool, [[1]], batcher=batcher, sampling=kind)) for kind in kinds]
            await until(lambda: batcher._waiting)
            clock.now += 2.0
            await until(lambda server=server: len(server.requests) == len(kinds))
            member.in_flight += 10**6
        late = asyncio.create_task(play(pool, [[2]], batcher=batcher))
        await until(lambda: batcher._waiting)
        clock.now += 1.0
        await asyncio.sleep(0.05)
        assert [len(server.requests) for server in servers] == [9, 9]
        servers[1].go.set()
        await late
        servers[0].go.set()
        await asyncio.gather(*asks)


@pytest.mark.parametrize("other", [error("other_model"), error("unauthorized", 401)])
async def test_a_discovered_server_of_another_model_or_token_is_left_out_and_a_listed_one_ends_the_run(
    servers: Servers, monkeypatch: pytest.MonkeyPatch, other: ServerError
) -> None:
    listing = Listing(servers, monkeypatch)

    def check(member: Member) -> None:
        if member.url == servers[1].url:
            raise other

    async with Pool([], find=listing.find) as pool:
        bring_up(pool, check)
        listing.servers = [servers[1]]  # first it is the only one
        waiting = asyncio.create_task(play(pool, [[1], [2]]))
        await until(lambda: servers[1].looks > 2)
        listing.servers = [*servers]
        await waiting
        pool.members[0].next_look = 0.0
        await play(pool, [[1], [2]])
        assert [member.url for member in pool.up] == [servers[0].url]
    assert sum("is left out" in line for line in pool.said) == 1
    assert f"server {servers[1].url} is left out: " in pool.said[0]
    assert str(other) in pool.said[0]
    async with Pool(servers) as pool:
        bring_up(pool, check)
        with pytest.raises(ServerError, match=str(other)):
            await pool.wait_up()


@pytest.mark.parametrize(("status", "ends"), [(404, True), (None, True), (502, False)])  # 502: a proxy's
async def test_another_program_is_left_out_and_said_and_where_it_is_all_that_is_listed_ends_the_run(
    servers: Servers, clock: fakes.Clock, status: int | None, ends: bool
) -> None:
    other = error("protocol", status)

    def passing(what: str, seconds: float) -> None:
        clock.now += 6.0

    servers[1].errors["health"] = other
    async with Pool(servers) as pool:
        assert [member.url for member in await pool.wait_up()] == [servers[0].url]
        await play(pool, [[1], [2]])
        assert pool.said == [f"server {servers[1].url} is left out: {other}"]
    async with Pool(servers[1:], on_wait=passing) as pool:
        with pytest.raises(ServerError) as raised:
            await pool.wait_up()
        assert (raised.value is other) == ends
        assert str(other) in str(raised.value)


async def test_a_server_under_two_names_counts_once_and_where_one_name_fails_the_other_is_used(
    servers: Servers,
) -> None:
    servers[1].session = servers[0].session
    async with Pool(servers, trainer="mine") as pool:
        for up, out in ((0, 1), (1, 0)):
            await pool.wait_up()
            assert pool.up == [pool.members[up]]
            line = f"server {servers[out].url} is left out: it is {servers[up].url} under another name"
            assert pool.said.count(line) == 1
            servers[up].dead = True
            pool.mark_lost(pool.members[up], "it died")
            for member in pool.members:
                member.next_look = 0.0
            await pool.wait_up()
            servers[up].dead = False
            pool.members[up].next_look = 0.0


async def test_a_trainer_waits_for_the_server_of_another_and_says_so_or_takes_it_once(servers: Servers) -> None:
    waited: list[str] = []

    def on_wait(what: str, seconds: float) -> None:
        waited.append(what)
        if len(waited) == 3:
            servers[0].works_for = None  # the other one has ended

    servers[0].works_for = "other"
    async with Pool(servers[:1], trainer="mine", on_wait=on_wait) as pool:
        await play(pool, [[5]])
        assert servers[0].beats == [(False, False)] * 4
        await pool.release()
        assert servers[0].beats[-1] == (False, True)
    assert "other_trainer" in waited[0]

    servers[1].works_for = "other"
    async with Pool(servers[1:], trainer="mine", take_over=True) as pool:
        await play(pool, [[5]])
        servers[1].works_for = "a third, which has taken it over"
        pool.mark_lost(pool.members[0], "for some reason")
        await until(lambda: time.monotonic() >= pool.members[0].next_look)
        await pool.look_at_all()
        assert (pool.up, servers[1].beats) == ([], [(True, False), (False, False)])


async def test_a_trainer_that_fails_at_the_start_frees_each_server_that_it_may_have_claimed(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hocket.client.take_over.LOOK_S", 0.1)
    monkeypatch.setattr("hocket.client.take_over.BEAT_S", 0.01)
    servers[1].mute = True  # it may have taken the heartbeat all the same

    async def load(there: Mapping[Member, Health]) -> None:
        raise SyncError("it refused weight version 1")

    async with Pool(servers, trainer="mine") as pool:
        pool.bring_up = load
        with pytest.raises(SyncError, match="refused"):
            await pool.wait_up()
        assert [member.state for member in pool.members] == [State.LEFT_OUT, State.WAITING]
        await pool.release()
        assert [server.beats[-1] for server in servers] == [(False, True)] * 2


async def test_no_heartbeat_follows_the_one_that_frees_a_server(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hocket.client.take_over.LOOK_S", 0.2)
    monkeypatch.setattr("hocket.client.take_over.BEAT_S", 0.01)
    async with Pool(servers, trainer="mine") as pool:
        await pool.wait_up()
        servers[1].mute = True  # to free it takes a while
        await pool.release()
        await asyncio.sleep(0.05)
        assert [server.beats[-1] for server in servers] == [(False, True)] * 2


async def test_a_trainer_that_asks_for_nothing_is_heard_of_all_the_same(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hocket.client.take_over.BEAT_S", 0.01)
    monkeypatch.setattr("hocket.client.take_over.LOOK_S", 0.2)
    loaded = asyncio.Event()

    async def load(there: Mapping[Member, Health]) -> None:
        await loaded.wait()
        for member, health in there.items():
            pool.mark_loaded(member, health)

    async with Pool(servers, trainer="mine") as pool:
        pool.bring_up = load
        looking = asyncio.create_task(pool.wait_up())
        await until(lambda: min(len(server.beats) for server in servers) > 5)  # weights may load for minutes
        loaded.set()
        await looking
        servers[0].mute = True
        beats = len(servers[1].beats)
        await until(lambda: len(servers[1].beats) > beats + 5)  # one that is silent keeps the others waiting a little
    async with Pool(servers) as pool:  # as `run.py eval` has it
        servers[0].beats.clear()
        await play(pool, [[5]])
        assert servers[0].beats == []


async def test_a_heartbeat_that_fails_is_said_once_for_each_server_and_the_run_goes_on(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hocket.client.take_over.BEAT_S", 0.01)
    async with Pool(servers, trainer="mine") as pool:
        await pool.wait_up()
        servers[0].works_for = "other"  # it was taken over
        beats = len(servers[0].beats)
        await until(lambda: len(servers[0].beats) > beats + 5)
        assert [line for line in pool.said if "heartbeat" in line] == [
            f"server {servers[0].url} took no heartbeat (after a minute without heartbeats another trainer may have "
            f"it): it is other_trainer"
        ]
        assert len(pool.up) == 2
        beats = len(servers[1].beats)
        await until(lambda: len(servers[1].beats) > beats)
