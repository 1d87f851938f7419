"""One batch with made-up episodes and rewards: order, scoring, replacements, failure."""

import asyncio
import random
from array import array

import pytest

from hocket.client.pool import Deadline
from hocket.errors import ServerError
from hocket.rollout.collect import Plan, Slot, collect
from hocket.types import Prompt, Rollout, Score
from support.batches import SAMPLING, drawing, gathered, ids, played, scoring

PROMPTS = [Prompt(id=f"p{i}", token_ids=array("I", (i,))) for i in range(40)]


async def at_once(prompt: Prompt, slot: Slot) -> Rollout:
    return played(prompt, slot.id, str(slot.number))


async def score_of(rollout: Rollout) -> Score:
    return Score(total=float(rollout.text))


async def test_each_rollout_is_scored_as_it_ends_while_others_are_played_and_stands_in_its_place() -> None:
    scored, go_on = [], asyncio.Event()

    async def play(prompt: Prompt, slot: Slot) -> Rollout:
        if slot.number == 0:
            await go_on.wait()
        return await at_once(prompt, slot)

    async def score(rollout: Rollout) -> Score:
        scored.append(rollout.id)
        if len(scored) == 3:
            go_on.set()
        return await score_of(rollout)

    batch = await gathered(PROMPTS[:2], play, score, group_size=2)
    assert scored == ["s/0/1", "s/1/0", "s/1/1", "s/0/0"]
    assert [[rollout.id for rollout in group.rollouts] for group in batch.groups] == [
        ["s/0/0", "s/0/1"],
        ["s/1/0", "s/1/1"],
    ]
    assert [[score.total for score in group.scores] for group in batch.groups] == [[0.0, 1.0], [2.0, 3.0]]
    assert batch.started < batch.generated


@pytest.mark.parametrize("trial", range(20))
async def test_the_batch_is_the_shortest_beginning_of_the_stream_that_has_enough_whatever_is_fast(
    trial: int, seed: int
) -> None:
    draw = random.Random(f"{seed}: {trial}")
    dull = {prompt.id for prompt in PROMPTS if draw.random() < trial / 20}  # up to nearly all
    delays = [draw.random() / 200 for _ in PROMPTS]

    async def play(prompt: Prompt, slot: Slot) -> Rollout:
        await asyncio.sleep(delays[prompt.token_ids[0]])
        return await at_once(prompt, slot)

    plan = planned(5, at_most=20)
    batch = await collect(
        plan,
        drawing(PROMPTS),
        play,
        scoring(score_of),
        has_signal=lambda group: group.rollouts[0].prompt.id not in dull,
    )
    enough = next((n for n in range(5, 20) if sum(p.id not in dull for p in PROMPTS[:n]) == 5), 20)
    assert ids(batch) == [prompt.id for prompt in PROMPTS[:enough]]
    assert [(group.id, group.draw) for group in batch.groups] == [(f"s/{i}", i) for i in range(enough)]


async def test_every_group_counts_where_nobody_says_what_has_a_signal() -> None:
    batch = await collect(planned(3, at_most=9), drawing(PROMPTS), at_once, scoring(score_of))
    assert ids(batch) == [prompt.id for prompt in PROMPTS[:3]]


async def test_a_stream_that_ends_gives_a_smaller_batch_or_an_empty_one() -> None:
    for prompts in PROMPTS[:2], []:
        batch = await collect(planned(3, at_most=9), drawing(prompts), at_once, scoring(score_of))
        assert ids(batch) == [prompt.id for prompt in prompts]


@pytest.mark.parametrize("cancelled", [False, True])
async def test_a_failure_or_leaving_ends_all_episodes_and_scores(cancelled: bool) -> None:
    under_way, go_on = 0, asyncio.Event()

    async def play(prompt: Prompt, slot: Slot) -> Rollout:
        if slot.number in (2, 5):
            await go_on.wait()
            raise ServerError("gone", code="unreachable")
        return await at_once(prompt, slot)

    async def score(rollout: Rollout) -> Score:
        nonlocal under_way
        under_way += 1
        try:
            await asyncio.sleep(60)
        finally:
            under_way -= 1
        return Score(total=0.0)

    task = asyncio.create_task(gathered(PROMPTS[:4], play, score, group_size=2))
    while under_way < 6:
        await asyncio.sleep(0)
    if cancelled:
        task.cancel()
    go_on.set()
    await asyncio.wait({task})
    assert task.cancelled() if cancelled else isinstance(task.exception(), ServerError)
    assert under_way == 0
    assert asyncio.all_tasks() == {asyncio.current_task()}


def planned(wanted: int, at_most: int) -> Plan:
    deadline = Deadline(60)
    return Plan(label="s", sampling=SAMPLING, group_size=1, wanted=wanted, at_most=at_most, deadline=deadline)
