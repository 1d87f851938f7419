"""The verification that servers compute with the trainer's weights, with fake transports and servers in memory."""

import asyncio
import dataclasses
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import hocket
from hocket.errors import ServerError, SyncError
from hocket.extras.checks.verify import UNDECIDED, Scored, Verification, missing_share
from hocket.types import Prompt
from support import fakes, publishing
from support.publishing import METRICS, NOT_HELD, SLOW, UNABLE, A, B, C
from support.servers import until


@dataclasses.dataclass
class World(publishing.World):
    alarmed: bool = False

    def __post_init__(self) -> None:
        self.verification = Verification(
            publisher=self.sync,
            prompts=[Prompt(id="p", token_ids=(1, 2, 3)), Prompt(id="q", token_ids=(4,))],
            trainer=self.trainer,  # type: ignore[arg-type]
            rollout=self.config.rollout,
            sync=self.config.sync,
            alarmed=lambda: self.alarmed,
        )
        self.sync.parts = [self.verification]


def make(*settings: str, **options: Any) -> World:
    made = publishing.make(*settings, **options)
    return World(**{field.name: getattr(made, field.name) for field in dataclasses.fields(made)})


async def make_up(*settings: str, **options: Any) -> World:
    """Makes a world whose servers are up: they hold version 5."""
    world = make(*settings, **options)
    await world.pool.wait_up()
    return world


async def test_all_servers_are_checked_at_once_and_one_version_at_a_time() -> None:
    world = make(version=4)
    for server in world.servers:
        server.go.clear()
    assert world.sync.versions.current == 0
    looks = [asyncio.create_task(world.pool.wait_up()) for _ in range(2)]  # FakeTransport looks for an overlap
    async with asyncio.timeout(60):  # they are verified at the same time
        await until(lambda: all(server.requests for server in world.servers))
    for server in world.servers:
        server.go.set()
    await asyncio.gather(*looks)
    assert world.sync.versions.current == 5
    assert [member.session for member in world.pool.members] == ["s1 http://a", "s1 http://b"]
    assert f"server {A} holds version 5: float32, 3.0 MiB in 0.75 s, parameters compared" in world.said[0]
    assert (await world.sync.publish()).items() >= (METRICS | {"sync/servers": 2.0}).items()
    assert world.disk.sent == world.disk.compared == [(5, [A, B]), (6, [A, B])]


async def test_of_servers_that_are_brought_up_together_the_one_that_holds_something_else_is_left_out() -> None:
    world = make(servers=3)
    world.disk.found[B] = NOT_HELD
    await world.pool.wait_up()
    assert world.up == [A, C]
    assert [urls for _, urls in world.disk.sent] == [[A, B, C], [A], [B], [C]]
    assert world.disk.compared[-1] == (5, [C])
    assert sum("http://b is left out: http://b" in line for line in world.said) == 1
    assert [line.partition(" holds version 5")[0] for line in world.said if " holds " in line] == [
        f"server {A}",
        f"server {C}",
    ]


async def test_the_trainer_scores_the_servers_own_completions_as_they_were_sampled() -> None:
    world = await make_up(servers=1)
    (request,) = world.servers[0].requests
    assert request.prompts == [[1, 2, 3], [4]]
    assert (request.sampling.temperature, request.sampling.max_tokens, request.session) == (0.7, 8, "s1 http://a")
    no, yes = False, True
    scored = [sample.sequence for sample in world.trainer.scored[0]]
    assert [(list(one.token_ids), one.mask, list(one.logprobs)) for one in scored] == [
        ([1, 2, 3, 7, 8], (no, no, no, yes, yes), [0.0, 0.0, 0.0, -0.5, -0.25]),
        ([4, 7, 8], (no, yes, yes), [0.0, -0.5, -0.25]),
    ]


async def test_a_server_is_checked_at_its_first_two_versions_and_every_so_many_and_the_one_after() -> None:
    world = await make_up("sync.check_every=5", servers=1, version=0)
    for _ in range(11):  # versions 2 to 12
        await world.sync.publish()
    assert [version for version, _ in world.disk.compared] == [1, 2, 5, 6, 10, 11]
    assert len(world.trainer.scored) == 6
    world.pool.mark_lost(world.pool.members[0], "it was started again")
    world.servers[0].session = "s2"
    await world.look_again()
    await world.sync.publish()
    await world.sync.publish()
    assert [version for version, _ in world.disk.compared[6:]] == [12, 13]


async def test_without_a_schedule_the_first_two_versions_are_checked_and_those_after_an_alarm() -> None:
    world = await make_up("sync.check_every=0", servers=1, version=0)
    checked = []
    for version in range(2, 10):
        world.alarmed = version == 6  # in the step before
        checked += [version] if "sync/logprob_gap" in await world.sync.publish() else []
    assert checked == [2, 6, 7]


async def test_the_largest_gap_is_the_metric_and_a_server_that_dies_under_the_check_is_taken_out() -> None:
    world = await make_up("sync.check_every=1", "sync.max_logprob_gap=0.2")
    world.verification._noises = [0.04]
    world.trainer.gaps = [0.02, 0.03]
    metrics = await world.sync.publish()
    assert metrics["sync/logprob_gap"] == pytest.approx(0.03)
    world.servers[0].die()
    metrics = await world.sync.publish()
    assert (world.up, metrics["sync/servers"], metrics["sync/logprob_gap"]) == ([B], 1.0, pytest.approx(1e-6))
    world.servers[1].cut = 1, None
    assert (await world.sync.publish())["sync/servers"] == 0.0
    assert "lost server http://b: http://b/generate gave 1 of 2 completions" in world.said


@pytest.mark.parametrize("gap", [1.1e-4, float("nan")])
async def test_a_gap_beyond_rounding_stops_the_run_with_server_figure_and_likely_cause(gap: float) -> None:
    world = make(servers=1)
    world.trainer.gaps = [gap]
    with pytest.raises(SyncError, match=rf"http://a and the trainer disagree on version 5: .* {gap:.3g} is more") as e:
        await world.pool.wait_up()  # at once, not at the end of server.start_timeout_s
    assert "more than 0.0001, the most that rounding in float32 explains" in str(e.value)
    assert "Compare model.dtype on both sides" in str(e.value)


@pytest.mark.parametrize(
    ("gaps", "bound"),  # of versions 5 to 7; 3e-5 may always be rounding, 1e-4 never is
    [([2e-5, 7.9e-5, 8.1e-5], 8e-5), ([1e-7, 2.9e-5, 3.1e-5], 3e-5), ([9e-5, 9.9e-5, 1.1e-4], 1e-4)],
)
async def test_a_gap_may_be_four_times_that_of_the_first_version(gaps: list[float], bound: float) -> None:
    world = make("sync.check_every=1", servers=1)
    world.trainer.gaps = gaps
    await world.pool.wait_up()
    assert (await world.sync.publish())["sync/max_gap"] == pytest.approx(bound)
    with pytest.raises(SyncError, match=f"version 7: .* is more than {bound:g}"):
        await world.sync.publish()


async def test_a_user_may_set_another_highest_gap_and_a_stop_may_be_a_warning() -> None:
    world = make("sync.max_logprob_gap=0.2", "sync.on_mismatch=warn", servers=1)
    world.trainer.gaps = [0.19]
    await world.pool.wait_up()
    assert not any("WARNING" in line for line in world.said)
    world.trainer.gaps = [0.21]
    metrics = await world.sync.publish()
    assert (metrics["sync/logprob_gap"], metrics["sync/servers"]) == (pytest.approx(0.21), 1.0)
    assert world.said[-1].startswith("WARNING: http://a and the trainer disagree on version 6")


async def test_a_first_gap_that_is_warned_of_does_not_raise_the_bound_for_others() -> None:
    world = make("sync.on_mismatch=warn", "sync.check_every=1")
    world.servers[1].session = "s2"
    world.trainer.gaps = [1e-5, 9e-5]
    await world.pool.wait_up()
    assert (await world.sync.publish())["sync/max_gap"] == pytest.approx(4e-5)


@pytest.mark.parametrize("policy", ["stop", "warn"])
async def test_parameters_that_differ_stop_the_run_or_are_loaded_again_with_a_warning(policy: str) -> None:
    world = await make_up(f"sync.on_mismatch={policy}")
    world.disk.found = {B: NOT_HELD}
    said = "http://b does not hold weight version 6: layers.1.mlp.down_proj differs"
    if policy == "stop":
        with pytest.raises(SyncError, match=said):
            await world.sync.publish()
    else:
        assert (await world.sync.publish())["sync/servers"] == 2.0
        assert world.disk.sent[-2:] == [(6, [A, B])] * 2
        assert f"WARNING: {said}" in world.said


@pytest.mark.parametrize("failure", [UNABLE, SLOW])
async def test_a_comparison_that_breaks_off_is_said_and_counted_and_the_server_works_on(failure: ServerError) -> None:
    world = await make_up("sync.check_every=1")
    world.disk.found = {B: failure}
    metrics = await world.sync.publish()
    assert (metrics["sync/servers"], metrics["sync/mismatches"], world.up) == (2.0, 1.0, [A, B])
    assert world.said[-1] == f"WARNING: http://b can't say whether it holds version 6: {failure}"
    assert len(world.trainer.scored) == 4  # of both, as their log-probs still say something


@pytest.mark.parametrize("code", UNDECIDED)
def test_the_codes_of_comparisons_that_break_off_are_the_server_s(code: str) -> None:
    server = Path(hocket.__file__).parent / "server"
    assert any(f'"{code}"' in path.read_text(encoding="utf-8") for path in server.glob("*.py"))


def rows(tokens: Sequence[int], server: Sequence[float], trainer: Sequence[float]) -> list[list[Scored]]:
    return [[Scored(*row) for row in zip(tokens, server, trainer, strict=True)]]


def test_the_missing_share_is_0_on_a_server_that_follows_and_1_and_more_on_one_that_is_a_version_behind(
    rng: random.Random,
) -> None:
    size = 1600
    tokens, start = range(size), [-rng.expovariate(1) for _ in range(size)]
    versions = [start]  # log-probs of the trainer, which change by 0.1 or so, each time in another direction
    for _ in range(3):
        versions.append([value + rng.gauss(0, 0.1) for value in versions[-1]])
    follows = missing_share(rows(tokens, versions[2], versions[2]), rows(tokens, versions[3], versions[3]), 0.0)
    assert follows == (0.0, 0.0)
    behind = rows(tokens, versions[1], versions[2]), rows(tokens, versions[2], versions[3])
    share, error = missing_share(*behind, 0.0)
    assert share == pytest.approx(1, abs=6 * error)  # six standard errors: one seed in 5e8 shows more
    assert 0.02 < error < 0.05
    never = rows(tokens, start, start), rows(tokens, start, versions[1])
    # Sums of 1600 numbers of 1 and less are off by 1600 * 2^-53 of their size at most.
    assert missing_share(*never, 0.03) == (pytest.approx(1, abs=1e-12), pytest.approx(0, abs=1e-12))
    assert missing_share(*never, 0.05) == (0.0, math.inf)  # 0.08 ± 0.0015 on average: such rounding hides it


def test_rounding_on_both_sides_leaves_the_missing_share_0_within_its_error(rng: random.Random) -> None:
    squares = []
    for _ in range(500):
        old = [-rng.expovariate(1) for _ in range(200)]
        new = [value + rng.gauss(0, 0.01) for value in old]

        def rounded(values: list[float]) -> list[float]:
            return [value + rng.gauss(0, 0.01) for value in values]

        before, now = (rows(range(200), rounded(values), rounded(values)) for values in (old, new))
        share, error = missing_share(before, now, 0.0)
        assert error < 0.2
        squares.append((share / error) ** 2)
    # Squares of standard errors have mean 1 and variance 2: of 500 the mean is off by 0.063 on average.
    assert sum(squares) / 500 == pytest.approx(1, abs=0.4)


def test_only_what_both_versions_sampled_behind_the_same_tokens_is_compared() -> None:
    before = rows([*range(10), 99, 11], [-1.0] * 12, [-1.0] * 12)
    now = rows(range(12), [-1.5] * 10 + [-9.0] * 2, [-1.5] * 12)
    assert missing_share(before, now, 0.0) == (0.0, 0.0)
    assert missing_share(rows(range(9), [-1.0] * 9, [-1.0] * 9), now, 0.0) == (0.0, math.inf)  # nine say nothing,
    one = rows(range(12), [-1.0] * 12, [-9.0] + [-1.5] * 11)
    assert missing_share(rows(range(12), [-1.0] * 12, [-1.5] * 12), one, 0.0) == (0.0, math.inf)  # nor does one alone,
    assert missing_share(before, before, 0.0) == (0.0, math.inf)  # nor a step that changed nothing


def test_a_verification_takes_the_prompts_whose_images_have_room_in_one_request() -> None:
    prompts = [Prompt(id="p", token_ids=(9,), images=(fakes.image(bytes(15 << 20)),)) for _ in range(4)]
    parts: dict[str, Any] = dict.fromkeys(("publisher", "trainer", "rollout", "sync", "alarmed"))
    assert [*Verification(prompts=[Prompt(id="t", token_ids=(1,)), *prompts], **parts).prompts[1:]] == prompts[:2]
