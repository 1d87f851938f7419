"""Versions, checksums, fall-backs, bring-up and the canary, with fake transports and servers in memory."""

import asyncio
import dataclasses
import functools
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import fakes
from hocket import config as config_module
from hocket.errors import HocketError, ServerError, SyncError, TrainerError
from hocket.pool import ServerPool
from hocket.protocol import GenerateRequest, Health, ReloadResponse, StreamLine
from hocket.sync.bring_up import Canary, bring_up
from hocket.sync.disk import Versions
from hocket.sync.gpu_sharing import own_gpu
from hocket.sync.publish import Delivery, Publisher
from hocket.sync.transports import WithFallback
from hocket.types import Prompt, TokenSequence, TrainSample

A, B = URLS = ("http://a", "http://b")
GONE = ServerError("can't reach it", code="unreachable")
BROKEN = ServerError("it broke", code="reload_failed", status=500)
REFUSED = ServerError("tensor a has another shape", code="bad_version", status=409)
METRICS = {"sync/mebibytes": 3.0, "sync/prepare_s": 0.5, "sync/transfer_s": 0.25}


class FakeServer:
    """Answers /health and the canary's /generate; what it holds, the transports say."""

    def __init__(self, url: str, version: int) -> None:
        self.url, self.version, self.session = url, version, "s1"
        self.error: ServerError | None = None
        self.asked: list[GenerateRequest] = []

    async def health(self, *, timeout_s: float = 10.0) -> Health:
        if self.error is not None:
            raise self.error
        return fakes.health(version=self.version, session=self.session)

    async def generate(self, request: GenerateRequest, *, timeout_s: float) -> AsyncIterator[StreamLine]:
        self.asked.append(request)
        if self.error is not None:
            raise self.error
        for i in reversed(range(len(request.prompts))):
            yield StreamLine(prompt=i, index=0, completion=fakes.completion(7, 8, logprobs=(-0.5, -0.25)))


class FakeTrainer:
    """Tells the gap that it is given for each version scored."""

    def __init__(self) -> None:
        self.gaps: list[float] = []
        self.scored: list[Sequence[TrainSample]] = []
        self.other_model = False

    def check_same_model(self, health: Health) -> None:
        if self.other_model:
            raise TrainerError("the server serves another model")

    def logprob_gap(self, samples: Sequence[TrainSample]) -> float:
        self.scored.append(samples)
        return self.gaps.pop(0) if self.gaps else 1e-6


class FakeTransport:
    """Delivers at once: `answers` by URL are of servers that do not take a version, `sent` is (version, urls)."""

    def __init__(self, checksum: str) -> None:
        self.checksum = checksum
        self.answers: dict[str, HocketError | ReloadResponse] = {}
        self.sent: list[tuple[int, list[str]]] = []
        self.running = 0

    async def deliver(self, version: int, servers: Sequence[Any], *, compare: bool = False) -> Delivery:
        self.sent.append((version, [server.url for server in servers]))
        self.running += 1
        assert self.running == 1, "there is one trainer, which sends one version at a time"
        await asyncio.sleep(0.01)
        self.running -= 1
        held = {server: fakes.reloaded(version, self.checksum, server.session) for server in servers}
        answers = {server: (self.checksum, self.answers.get(server.url, held[server])) for server in servers}
        return Delivery(answers, {**METRICS})


@dataclasses.dataclass
class World:
    sync: Publisher
    pool: ServerPool
    servers: list[FakeServer]
    trainer: FakeTrainer
    disk: FakeTransport
    collective: FakeTransport
    said: list[str]

    @property
    def up(self) -> list[str]:
        return [member.url for member in self.pool.up]

    async def look_again(self) -> None:
        """Has the pool look at every server that is out with its next chance, as if time had passed."""
        for member in self.pool.members:
            member.next_look = 0.0
        await self.pool.wait_up()


def make(*settings: str, servers: int = 2, collective: bool = False, version: int = 4, start_s: float = 5.0) -> World:
    config = config_module.load(None, ["rollout.max_tokens=8", "rollout.temperature=0.7", *settings])
    said: list[str] = []
    pool = ServerPool(URLS[:servers], start_timeout_s=start_s, say=said.append)
    fakes = [FakeServer(url, version) for url in URLS[:servers]]
    for member, fake in zip(pool.members, fakes, strict=True):
        member.server = fake  # type: ignore[assignment]
    trainer, disk, fast = FakeTrainer(), FakeTransport("disk"), FakeTransport("fast")
    prompts = [Prompt(id="p", token_ids=(1, 2, 3)), Prompt(id="q", token_ids=(4,))]
    canary = Canary(prompts, trainer, config.rollout, config.sync, own_gpu)  # type: ignore[arg-type]
    sync = Publisher(
        versions=Versions(Path("/nowhere"), trainer, config.sync),  # type: ignore[arg-type]
        pool=pool,
        transport=WithFallback(fast, disk, said.append) if collective else disk,
        check=canary.check,
        check_every=config.sync.canary_every,
        trainer_turn=own_gpu,
    )
    pool.bring_up = functools.partial(bring_up, sync, trainer.check_same_model, said.append)
    return World(sync, pool, fakes, trainer, disk, fast, said)


async def make_up(*settings: str, **options: Any) -> World:
    """Makes a world whose servers are up: they hold version 5."""
    world = make(*settings, **options)
    await world.pool.wait_up()
    return world


async def test_the_first_version_is_one_above_the_servers_and_the_next_ones_go_to_all_at_once() -> None:
    world = make(version=4)
    assert world.sync.versions.current == 0
    await asyncio.gather(world.pool.wait_up(), world.pool.wait_up())  # FakeTransport looks for an overlap
    assert world.sync.versions.current == 5
    assert [member.session for member in world.pool.members] == ["s1", "s1"]
    assert f"server {A} holds version 5: float32, 3.0 MiB in 0.75 s, checksums agree" in world.said[0]
    assert await world.sync.publish() == METRICS | {"sync/servers": 2.0}
    assert world.disk.sent == [(5, [A]), (5, [B]), (6, [A, B])]


@pytest.mark.parametrize(("servers", "held", "expected"), [(1, 0, 8), (1, 9, 10), (0, 0, 8)])
async def test_a_run_that_goes_on_numbers_its_versions_on_above_its_own_and_the_servers(
    servers: int, held: int, expected: int
) -> None:
    world = make(version=held, servers=servers)  # one that was started again, or has taken versions 8 and 9 meanwhile
    world.sync.versions.restore({"version": 7})
    await (world.pool.wait_up() if servers else world.sync.publish())
    assert world.disk.sent == [(expected, list(URLS[:servers]))]
    assert world.sync.versions.state() == {"version": expected}
    assert len(world.trainer.scored) == servers  # the canary is asked


async def test_the_canary_scores_the_servers_own_completions_as_they_were_sampled() -> None:
    world = await make_up(servers=1)
    (request,) = world.servers[0].asked
    assert request.prompts == [[1, 2, 3], [4]]
    assert (request.sampling.temperature, request.sampling.max_tokens, request.session) == (0.7, 8, "s1")
    no, yes = False, True
    assert [sample.sequence for sample in world.trainer.scored[0]] == [
        TokenSequence(token_ids=(4, 7, 8), mask=(no, yes, yes), logprobs=(0.0, -0.5, -0.25)),
        TokenSequence(token_ids=(1, 2, 3, 7, 8), mask=(no, no, no, yes, yes), logprobs=(0.0, 0.0, 0.0, -0.5, -0.25)),
    ]


async def test_the_canary_is_asked_at_the_first_version_at_a_return_and_every_so_many() -> None:
    world = await make_up("sync.canary_every=3", servers=1, version=0)
    assert len(world.trainer.scored) == 1
    gaps = [(await world.sync.publish()).get("sync/canary_gap") for _ in range(5)]  # versions 2 to 6
    assert gaps == [None, 1e-6, None, None, 1e-6]
    world.pool.members[0].mark_out("it was started again")
    await world.look_again()
    assert len(world.trainer.scored) == 4
    world = await make_up("sync.canary_every=0", servers=1)
    assert [await world.sync.publish() for _ in range(2)] == [METRICS | {"sync/servers": 1.0}] * 2
    assert len(world.trainer.scored) == 1


async def test_the_largest_gap_is_the_metric_and_a_server_that_dies_under_the_canary_is_taken_out() -> None:
    world = await make_up("sync.canary_every=1")
    world.trainer.gaps = [0.02, 0.03]
    assert (await world.sync.publish())["sync/canary_gap"] == 0.03
    world.servers[0].error = GONE
    metrics = await world.sync.publish()
    assert (world.up, metrics["sync/servers"], metrics["sync/canary_gap"]) == ([B], 1.0, 1e-6)


@pytest.mark.parametrize("gap", [0.11, float("nan")])
async def test_a_gap_beyond_the_bound_stops_the_run_with_figure_and_likely_cause(gap: float) -> None:
    world = make("sync.canary_every=1", servers=1)
    world.trainer.gaps = [gap]
    with pytest.raises(SyncError, match=rf"http://a and the trainer disagree on version 5: .* {gap:.3g} is more") as e:
        await world.pool.wait_up()  # at once, not at the end of server.start_timeout_s
    assert "sync.max_logprob_gap=0.1" in str(e.value)
    assert "tied output head" in str(e.value)
    world = make("sync.canary_every=1", "sync.max_logprob_gap=0.2", servers=1)
    world.trainer.gaps = [0.19, gap + 0.1]
    await world.pool.wait_up()
    with pytest.raises(SyncError, match="version 6"):
        await world.sync.publish()


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (
            fakes.reloaded(6, "beef", "s1"),
            "http://a holds version 6 with checksum beef, but version 6 with checksum disk",
        ),
        (fakes.reloaded(9, "disk", "s1"), "http://a holds version 9 with checksum disk, but version 6"),
        (REFUSED, "weight version 6 was refused: tensor a has another shape"),
    ],
)
@pytest.mark.parametrize("collective", [False, True])  # which falls back to the disk
async def test_what_landed_as_something_else_or_was_refused_stops_the_run(
    answer: Any, said: str, collective: bool
) -> None:
    world = await make_up(collective=collective)
    world.collective.answers[A], world.disk.answers[A] = BROKEN, answer
    with pytest.raises(SyncError, match=said):
        await world.sync.publish()


@pytest.mark.parametrize("failure", [GONE, BROKEN])
async def test_a_lost_server_is_taken_out_and_later_brought_up_with_the_version_of_then(failure: ServerError) -> None:
    world = await make_up()
    world.disk.answers[A] = failure
    assert (await world.sync.publish())["sync/servers"] == 1.0
    assert world.up == [B]
    assert any(line.startswith("lost server http://a") for line in world.said)
    await world.sync.publish()
    assert world.disk.sent[-1] == (7, [B])
    world.disk.answers.clear()
    world.servers[0].session = "s2"
    await world.look_again()
    assert world.disk.sent[-1] == (7, [A])
    assert world.pool.members[0].session == "s2"
    assert world.sync.versions.current == 7


async def test_a_server_that_the_first_version_does_not_reach_is_waited_for_and_one_with_another_model_refused() -> (
    None
):
    world = make(servers=1, start_s=0.3)
    world.disk.answers[A] = GONE
    with pytest.raises(ServerError, match=r"gave up after .* \(http://a: can't reach it\)"):
        await world.pool.wait_up()
    world = make(servers=1)
    world.trainer.other_model = True
    with pytest.raises(TrainerError, match="another model"):
        await world.pool.wait_up()
    assert world.disk.sent == []


async def test_nobody_is_brought_up_while_the_trainer_works_unless_nobody_else_plays() -> None:
    world = await make_up()
    first, second = world.pool.members
    async with world.sync.training(publishes=True):
        world.pool.mark_lost(second, "it was restarted")
        second.next_look = 0.0
        assert await world.pool.wait_up() == [first]
        assert second.out == "the trainer is at work"
        world.pool.mark_lost(first, "it was restarted, too")
        for member in (first, second):
            member.next_look = 0.0
        waiting = asyncio.create_task(world.pool.wait_up())
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await world.sync.publish()
    assert await asyncio.wait_for(waiting, 10) == [first, second]
    assert [version for version, _ in world.disk.sent[-2:]] == [6, 6]  # not what was there when they came


async def test_who_can_not_be_reached_directly_gets_the_version_by_disk_which_is_said_and_counted() -> None:
    world = await make_up(collective=True)
    assert (await world.sync.publish())["sync/fallbacks"] == 0.0
    assert world.disk.sent == []
    world.collective.answers[B] = SyncError("server http://b did not take bucket 3/7")
    metrics = await world.sync.publish()
    assert (world.collective.sent[-1], world.disk.sent) == ((7, [A, B]), [(7, [B])])
    assert (metrics["sync/fallbacks"], metrics["sync/servers"]) == (1.0, 2.0)
    assert metrics["sync/transfer_s"] > 0.25
    assert world.said[-1] == "version 7 goes to http://b by disk instead: server http://b did not take bucket 3/7"


@pytest.mark.parametrize(("failure", "fallbacks"), [(BROKEN, 1.0), (GONE, 0.0)])
async def test_who_can_not_be_reached_by_disk_either_or_answers_nothing_is_lost(
    failure: ServerError, fallbacks: float
) -> None:
    world = await make_up(collective=True)
    world.collective.answers[B], world.disk.answers[B] = failure, GONE
    metrics = await world.sync.publish()
    assert (metrics["sync/fallbacks"], metrics["sync/servers"], len(world.disk.sent)) == (fallbacks, 1.0, fallbacks)
    assert world.pool.members[1].out == "can't reach it"


async def test_a_server_that_was_started_again_unnoticed_is_brought_up_as_one_that_comes_back() -> None:
    world = await make_up()
    world.servers[0].session = "another"
    assert (await world.sync.publish())["sync/servers"] == 1.0
    assert world.pool.members[0].out == "it was started again"  # no model check, no canary: no work
