"""The pipeline with a fake server: when a batch begins, what is in it, what takes the place of what teaches nothing."""

import asyncio
import functools
from array import array
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from hocket import config as config_module
from hocket.common.tasks import seed_of
from hocket.config import Config
from hocket.data.curriculum import Shuffle
from hocket.data.stream import PromptStream
from hocket.errors import ServerError
from hocket.rollout.collect import Slot, collect
from hocket.rollout.pipeline import Pipeline, plan_step, sampling_params
from hocket.types import Group, Prompt, Prompts, Rollout
from support import fakes
from support.batches import ids, own_reward, played, scoring

PROMPTS = Prompts(Prompt(id=f"p{i}", token_ids=array("I", (i,))) for i in range(40))


class FakePlayer:
    """Plays episodes whose text is the seed of their first turn; `wait` may hold one up, by its prompt's token."""

    def __init__(self, wait: Callable[[int], Awaitable[object]] = lambda token: asyncio.sleep(0)) -> None:
        self.wait = wait
        self.begun: list[str] = []
        self.ended = self.cancelled = 0

    async def play(self, prompt: Prompt, slot: Slot) -> Rollout:
        if slot.group.rpartition("/")[0] not in self.begun:
            self.begun.append(slot.group.rpartition("/")[0])
        try:
            await self.wait(prompt.token_ids[0])
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        self.ended += 1
        return played(prompt, slot.id, str(seed_of(slot.sampling.seed, slot.number, 1)))


def settings(*overrides: str) -> Config:
    return config_module.load(
        None, ["rollout.prompts_per_step=3", "rollout.group_size=2", "pipeline.max_staleness=0", *overrides]
    )


def pipeline(config: Config, player: FakePlayer, has_signal: Callable[[Group], bool] = lambda group: True) -> Pipeline:
    take, max_staleness = PromptStream(PROMPTS, Shuffle(), seed=0).take, int(config.pipeline.max_staleness)
    settings: dict[str, Any] = {"oversampling": config.algorithm.oversampling, "max_staleness": max_staleness}
    return Pipeline(
        lambda plan: collect(plan, take, player.play, scoring(own_reward), has_signal=has_signal),
        functools.partial(plan_step, config=config.rollout, seed=5, **settings),
        steps=4,
        max_staleness=max_staleness,
    )


def order() -> list[str]:
    return [prompt.id for prompt in PromptStream(PROMPTS, Shuffle(), seed=0).take(len(PROMPTS)).values()]


async def settled() -> None:
    """Returns when nothing happens any more that waits for no time to pass."""
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.mark.parametrize(("max_staleness", "begun"), [(0, [1, 2, 3, 4]), (1, [2, 3, 4, 4]), (2, [3, 4, 4, 4])])
async def test_so_many_batches_are_begun_ahead_and_never_one_that_no_step_needs(
    max_staleness: int, begun: list[int]
) -> None:
    player, seen = FakePlayer(), []
    async with pipeline(settings(f"pipeline.max_staleness={max_staleness}"), player) as batches:
        for step in range(1, 5):
            assert ids(await batches.batch(step)) == order()[3 * step - 3 : 3 * step]
            await settled()  # the trainer works
            seen.append(len(player.begun))
    assert seen == begun


@pytest.mark.parametrize(("early", "begun"), [(True, 2), (False, 1)])
async def test_a_batch_begins_early_unless_the_trainer_may_need_the_servers_gpu(early: bool, begun: int) -> None:
    player = FakePlayer()
    async with pipeline(settings(), player) as batches:
        batches.early = early
        await batches.batch(1)
        batches.begin_early(2)
        await settled()
        assert len(player.begun) == begun
        batches.begin_early(5)  # there are four steps
        assert ids(await batches.batch(2)) == order()[3:6]
        await settled()
    assert len(player.begun) == 2


async def test_what_is_slow_is_waited_for_and_not_replaced_by_what_is_fast() -> None:
    slow = int(order()[0][1:])

    async def wait(token: int) -> None:
        while token == slow and player.ended < 4 * 3 * 2 - 2:
            await asyncio.sleep(0)
        await settled()  # until the others are scored

    player = FakePlayer(wait)
    async with pipeline(settings("pipeline.max_staleness=3"), player) as batches:
        first = await batches.batch(1)
        assert ids(first) == order()[:3]
        second = await batches.batch(2)
    assert ids(second) == order()[3:6]
    assert first.metrics["pipeline/queued_groups"] == 0
    assert second.metrics["pipeline/queued_groups"] == 9  # of three batches
    assert second.metrics["pipeline/wait_for_policy"] > 0
    assert second.metrics["time/generate"] == 0
    assert first.metrics["time/batch"] > 0


async def test_servers_without_work_between_two_steps_have_waited_for_the_policy_all_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def wait(token: int) -> None:
        clock.now += 1.0  # six episodes in each batch

    clock = fakes.Clock()
    monkeypatch.setattr("hocket.rollout.pipeline.time", clock)
    async with pipeline(settings(), FakePlayer(wait)) as batches:
        first, second = await batches.batch(1), await batches.batch(2)
        clock.now += 4.0  # the trainer works
        third = await batches.batch(3)
        clock.now += 4.0
        batches.begin_early(4)
        await settled()
        clock.now += 2.0  # the last rewards of an evaluation
        fourth = await batches.batch(4)
    assert "pipeline/wait_for_policy" not in first.metrics
    assert second.metrics["pipeline/wait_for_policy"] == 0.0
    assert third.metrics["pipeline/wait_for_policy"] == 4 / (6 + 4)
    assert fourth.metrics["pipeline/wait_for_policy"] == (4 + 2) / (6 + 4 + 6 + 2)


async def test_the_rollouts_of_a_step_depend_on_seed_and_step_alone_however_early_they_begin() -> None:
    texts = []
    for max_staleness in (0, 2):
        config = settings(f"pipeline.max_staleness={max_staleness}")
        async with pipeline(config, FakePlayer()) as batches:
            groups = [(await batches.batch(step)).groups for step in range(1, 5)]
        texts.append([[(r.id, r.text) for g in step for r in g.rollouts] for step in groups])
    assert texts[0] == texts[1]
    seeds = {sampling_params(config.rollout, seed=s, step=t).seed for s in range(3) for t in range(5)}
    assert len(seeds) == 15
    assert sampling_params(config.rollout, seed=5, step=2, temperature=0.0).temperature == 0.0
    seed = sampling_params(config.rollout, seed=5, step=2).seed or 0
    assert texts[0][1] == [(f"step 2/{i}/{j}", str(seed_of(seed, 2 * i + j, 1))) for i in range(3) for j in range(2)]


async def test_groups_that_teach_nothing_are_replaced_by_the_next_prompts_of_the_stream() -> None:
    dull = {order()[1], order()[3]}
    player = FakePlayer()
    config = settings("algorithm.oversampling=3")
    has_signal = lambda group: group.rollouts[0].prompt.id not in dull  # noqa: E731
    async with pipeline(config, player, has_signal) as batches:
        first, second = await batches.batch(1), await batches.batch(2)
    assert ids(first) == order()[:5]  # one of the first three is dull, and so is the first that takes its place
    assert ids(second) == order()[5:8]
    assert [group.id for group in first.groups] == [f"step 1/{i}" for i in range(5)]
    assert first.metrics["rollout/oversampling"] == pytest.approx(5 / 3)
    assert second.metrics["rollout/oversampling"] == 1


@pytest.mark.parametrize(("prompts", "times", "most"), [(100, 1.15, 115), (3, 1.5, 4)])
def test_oversampling_counts_prompts_as_it_is_written(prompts: int, times: float, most: int) -> None:
    config = settings(f"rollout.prompts_per_step={prompts}").rollout
    assert plan_step(1, config, seed=0, oversampling=times, max_staleness=0).at_most == most


async def test_a_failure_is_raised_where_its_batch_is_asked_for_and_leaving_ends_the_others() -> None:
    first, broken = int(order()[0][1:]), int(order()[4][1:])

    async def breaks(token: int) -> None:
        if token == broken:
            raise ServerError("it broke", code="unreachable")

    async with pipeline(settings("pipeline.max_staleness=3"), FakePlayer(breaks)) as batches:
        await batches.batch(1)
        with pytest.raises(ServerError, match="it broke"):
            await batches.batch(2)
    slow = FakePlayer(lambda token: asyncio.sleep(0 if token == first else 60.0))
    async with pipeline(settings("pipeline.max_staleness=3", "rollout.prompts_per_step=1"), slow) as batches:
        await batches.batch(1)
    assert slow.cancelled == 3 * 2
    assert asyncio.all_tasks() == {asyncio.current_task()}
