"""Versions, checksums, fall-backs and bring-up, with fake transports and servers in memory."""

import asyncio
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import pytest

from hocket.client.member import Member, State
from hocket.errors import ServerError, SyncError, TrainerError
from hocket.protocol import Health
from hocket.types import Metrics, Prompt, Rollout, TokenSequence
from support import fakes
from support.publishing import BROKEN, GONE, METRICS, REFUSED, STALLED, URLS, A, B, C, make, make_up


async def test_the_first_version_is_one_above_the_servers_and_each_goes_to_all_at_once() -> None:
    world = make(version=4)
    assert world.sync.versions.current == 0
    looks = [asyncio.create_task(world.pool.wait_up()) for _ in range(2)]  # FakeTransport looks for an overlap
    async with asyncio.timeout(60):
        await asyncio.gather(*looks)
    assert world.sync.versions.current == 5
    assert [member.session for member in world.pool.members] == ["s1 http://a", "s1 http://b"]
    assert f"server {A} holds version 5: float32, 3.0 MiB in 0.75 s" in world.said[0]
    assert (await world.sync.publish()).items() >= (METRICS | {"sync/servers": 2.0}).items()
    assert world.disk.sent == [(5, [A, B]), (6, [A, B])]


def sampled_by(*versions: int) -> Rollout:
    sequences = []
    for version in versions:
        sequence = TokenSequence(token_ids=(1, 2), mask=(False, True), logprobs=(0.0, -0.5))
        sequences.append(dataclasses.replace(sequence, version_min=version, version_max=5))
    nothing = TokenSequence(token_ids=(1,), mask=(False,), logprobs=(0.0,), version_min=0)
    return Rollout(id="r", prompt=Prompt(id="p", token_ids=(1,)), sequences=(*sequences, nothing))


@pytest.mark.parametrize(
    ("dtypes", "setting", "expected"),
    [
        (["float32", "float32"], "sync.timeout_s=300", 1e-4),
        (["float32", "float16"], "sync.timeout_s=300", 0.02),
        (["float32", "a new one"], "sync.timeout_s=300", 0.1),
        (["float32", "bfloat16"], "sync.max_logprob_gap=0.5", 0.5),
    ],
)
async def test_the_gap_of_fresh_rollouts_is_bounded_by_the_engines_lowest_precision_or_the_users_bound(
    dtypes: list[str], setting: str, expected: float
) -> None:
    world = await make_up(setting)
    for member, dtype in zip(world.pool.members, dtypes, strict=True):
        member.health = fakes.health(dtype=dtype)
    assert world.sync.max_gap([sampled_by(5), sampled_by(5, 5)]) == expected
    assert world.sync.max_gap([sampled_by(5), sampled_by(5, 4)]) == math.inf


async def test_of_servers_that_are_brought_up_together_the_one_that_fails_is_left_out() -> None:
    world = make(servers=3)
    world.disk.answers[B] = REFUSED
    await world.pool.wait_up()
    assert world.up == [A, C]
    assert [urls for _, urls in world.disk.sent] == [[A, B, C], [A], [B], [C]]
    assert sum("http://b is left out: http://b" in line for line in world.said) == 1
    assert [line.partition(" holds version 5")[0] for line in world.said if " holds " in line] == [
        f"server {A}",
        f"server {C}",
    ]


@pytest.mark.parametrize(("held", "expected"), [([0], 8), ([9], 10), ([4, 9], 10), ([], 8)])
async def test_a_run_that_goes_on_numbers_its_versions_on_above_its_own_and_every_servers(
    held: list[int], expected: int
) -> None:
    world = make(servers=len(held))
    for server, version in zip(world.servers, held, strict=True):
        server.version = version  # it was started again, or has taken versions 8 and 9 meanwhile
    world.sync.versions.restore({"version": 7})
    await (world.pool.wait_up() if held else world.sync.publish())
    assert world.disk.sent == [(expected, list(URLS[: len(held)]))]
    assert world.sync.versions.state() == {"version": expected}


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (fakes.reloaded(6, "beef", "s1"), "holds version 6 with checksum beef, but version 6 with checksum disk"),
        (fakes.reloaded(9, "disk", "s1"), "holds version 9 with checksum disk, but version 6"),
        (REFUSED, "refused weight version 6: tensor a has another shape"),
    ],
)
@pytest.mark.parametrize("collective", [False, True])  # which falls back to the disk
async def test_what_landed_as_something_else_or_was_refused_stops_the_run(
    answer: Any, said: str, collective: bool
) -> None:
    world = await make_up(collective=collective)
    world.collective.answers[A], world.disk.answers[A] = BROKEN, answer
    with pytest.raises(SyncError, match=f"http://a {said}"):
        await world.sync.publish()


@pytest.mark.parametrize("failure", [GONE, BROKEN, STALLED])
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


async def test_a_discovered_server_that_another_runs_has_replaced_is_lost_and_a_listed_one_stops_the_run() -> None:
    world = await make_up()
    world.disk.answers[A] = ServerError("http://a answered 401: it wants a token", code="unauthorized", status=401)

    world.pool.is_listed = False
    await world.sync.publish()
    assert world.up == [B]
    world.pool.is_listed, world.disk.answers = True, {B: world.disk.answers[A]}
    with pytest.raises(SyncError, match="401"):
        await world.sync.publish()


async def test_a_server_that_the_first_version_does_not_reach_is_waited_for_and_one_with_another_model_refused() -> (
    None
):
    world = make(servers=1, start_s=0.3)
    world.disk.answers[A] = GONE
    with pytest.raises(ServerError, match=r"gave up after .* waiting for http://a \(can't reach it\)"):
        await world.pool.wait_up()
    world = make(servers=1)
    world.other_model = True
    with pytest.raises(TrainerError, match="another model"):
        await world.pool.wait_up()
    assert world.disk.sent == []


async def test_nobody_is_brought_up_while_the_trainer_works_unless_nobody_else_plays() -> None:
    world = await make_up(start_s=0.0)  # as for a step that takes longer than servers have to start
    first, second = world.pool.members
    async with asyncio.timeout(60), world.sync.training(publishes=True):
        world.pool.mark_lost(second, "it was restarted")
        second.next_look = 0.0
        assert await world.pool.wait_up() == [first]
        assert second.reason == "the trainer is at work"
        world.pool.mark_lost(first, "it was restarted, too")
        for member in (first, second):
            member.next_look = 0.0
        waiting = asyncio.create_task(world.pool.wait_up())
        while not waiting.done() and [first.state, second.state] != [State.JOINING] * 2:
            await asyncio.sleep(0)  # until both are there
        await world.sync.publish()
    assert await asyncio.wait_for(waiting, 60) == [first, second]
    assert [version for version, _ in world.disk.sent[-2:]] == [6, 6]  # not what was there when they came


@pytest.mark.parametrize("failure", [None, GONE])
@pytest.mark.parametrize("servers", [1, 2])
async def test_an_answer_to_an_update_neither_brings_up_nor_loses_a_server_that_was_lost_meanwhile_and_is_joining(
    servers: int, failure: ServerError | None
) -> None:
    world = await make_up(servers=servers)
    member, came = world.pool.members[0], list[list[str]]()
    well, look = asyncio.Event(), world.pool.look

    async def slow_look(member: Member) -> Health:
        await well.wait()
        return await look(member)

    class Checks:
        async def published(self, members: Sequence[Member], joins: bool) -> Metrics:
            if joins:
                came.append([member.url for member in members])
            return {}

    world.sync.parts = [Checks()]
    if servers == 2:
        world.pool.look = slow_look
    if failure is not None:
        world.disk.answers[A] = failure
    async with asyncio.timeout(60):
        async with world.sync.training(publishes=True):
            publishing = asyncio.create_task(world.sync.publish())
            await asyncio.sleep(0)  # the version is on its way
            world.pool.mark_lost(member, "its connection broke")
            member.next_look = 0.0
            looking = asyncio.create_task(world.pool.wait_up())
            await publishing
            assert member.state is State.JOINING
            assert came == []
        world.disk.answers.clear()
        well.set()
        await looking
    assert (world.up[0], came) == (A, [[A]])
    assert world.disk.sent[-2:] == [(6, world.up), (6, [A])]


async def test_a_server_works_only_once_the_parts_of_the_run_have_checked_it() -> None:
    world = make()
    seen: list[tuple[list[str], list[str]]] = []  # servers to check, and those at work

    class Checks:
        async def published(self, members: Sequence[Member], came: bool) -> Metrics:
            seen.append(([member.url for member in members], world.up))
            if came and len(members) > 1:
                raise SyncError("one of them computes with other weights")
            return {}

    world.sync.parts = [Checks()]
    await world.pool.wait_up()
    assert seen == [([A, B], []), ([A], []), ([B], [A])]
    await world.sync.publish()
    assert seen[-1] == ([A, B], [A, B])


async def test_who_can_not_be_reached_directly_gets_the_version_by_disk_which_is_said_and_counted() -> None:
    world = await make_up(collective=True)
    assert (await world.sync.publish())["sync/fallbacks"] == 0.0
    assert world.disk.sent == []
    world.collective.answers[B] = SyncError("server http://b did not take bucket 3/7")
    metrics = await world.sync.publish()
    assert (world.collective.sent[-1], world.disk.sent) == ((7, [A, B]), [(7, [B])])
    assert (metrics["sync/fallbacks"], metrics["sync/servers"]) == (1.0, 2.0)
    assert metrics["sync/transfer_s"] > 0.25
    assert metrics["sync/mebibytes"] == 3.0 + 3.0 / 2  # one of two servers got it twice
    assert world.said[-1] == "version 7 goes to http://b by disk instead: server http://b did not take bucket 3/7"


@pytest.mark.parametrize(("failure", "fallbacks"), [(BROKEN, 1.0), (GONE, 0.0)])
async def test_who_can_not_be_reached_by_disk_either_or_answers_nothing_is_lost(
    failure: ServerError, fallbacks: float
) -> None:
    world = await make_up(collective=True)
    world.collective.answers[B], world.disk.answers[B] = failure, GONE
    metrics = await world.sync.publish()
    assert (metrics["sync/fallbacks"], metrics["sync/servers"], len(world.disk.sent)) == (fallbacks, 1.0, fallbacks)
    assert world.pool.members[1].reason == "can't reach it"


async def test_a_server_that_was_started_again_unnoticed_is_brought_up_as_one_that_comes_back() -> None:
    world = await make_up()
    world.servers[0].session = "another"
    assert (await world.sync.publish())["sync/servers"] == 1.0
    assert world.pool.members[0].reason == "it was started again"  # no model check, no proof: no work
