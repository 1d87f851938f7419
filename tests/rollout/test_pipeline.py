"""The pipeline with a fake server: when a batch begins, what is in it, what takes the place of what teaches nothing."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest

from hocket import config as config_module
from hocket.config import Config
from hocket.data import PromptStream
from hocket.errors import ServerError
from hocket.protocol import Completion, SamplingParams
from hocket.rollout.collect import sampling_params
from hocket.rollout.pipeline import Batch, Pipeline
from hocket.system import seed_of
from hocket.types import Group, Prompt, Rollout, Score

PROMPTS = [Prompt(id=f"p{i}", token_ids=(i,)) for i in range(40)]


class FakeServer:
    """Answers after `delay_s` of a prompt's first token, and says which requests it got."""

    kv_tokens = 4096

    def __init__(self, delay_s: Callable[[int], float] = lambda token: 0.0) -> None:
        self.delay_s = delay_s
        self.requests: list[tuple[list[int], int]] = []
        self.cancelled = 0

    async def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams,
        *,
        n: int = 1,
        timeout_s: float,
        seeds: Sequence[Sequence[int]],
    ) -> AsyncIterator[tuple[int, int, Completion]]:
        assert sampling.seed is not None
        self.requests.append(([prompt[0] for prompt in prompts], sampling.seed))
        try:
            for i in sorted(range(len(prompts)), key=lambda i: self.delay_s(prompts[i][0])):
                await asyncio.sleep(self.delay_s(prompts[i][0]))
                if self.delay_s(prompts[i][0]) < 0:
                    raise ServerError("it broke", code="unreachable")
                for j in range(n):
                    yield (
                        i,
                        j,
                        Completion(
                            token_ids=(7,),
                            logprobs=(-0.1,),
                            finish_reason="stop",
                            versions=((1, 0, 1),),
                            text=str(seeds[i][j]),
                        ),
                    )
        except asyncio.CancelledError:
            self.cancelled += 1
            raise


class Scorer:
    async def score(self, rollout: Rollout) -> Score:
        return Score(total=1.0)


def settings(*overrides: str) -> Config:
    return config_module.load(
        None, ["rollout.prompts_per_step=3", "rollout.group_size=2", "trainer.steps=4", "trainer.seed=5", *overrides]
    )


def pipeline(config: Config, server: FakeServer, informative: Callable[[Group], bool] = lambda group: True) -> Pipeline:
    stream = PromptStream(PROMPTS, seed=0)
    return Pipeline(config, stream, server=server, scorer=Scorer(), informative=informative)  # type: ignore[arg-type]


def order() -> list[str]:
    return [prompt.id for prompt in PromptStream(PROMPTS, seed=0).take(len(PROMPTS)).values()]


def ids(batch: Batch) -> list[str]:
    assert [group.rollouts[0].prompt for group in batch.groups] == list(batch.draws.values())
    return [prompt.id for prompt in batch.draws.values()]


@pytest.mark.parametrize(("max_staleness", "begun"), [(0, [1, 2, 3, 4]), (1, [2, 3, 4, 4]), (2, [3, 4, 4, 4])])
async def test_so_many_batches_are_begun_ahead_and_never_one_that_no_step_needs(
    max_staleness: int, begun: list[int]
) -> None:
    server, seen = FakeServer(), []
    async with pipeline(settings(f"pipeline.max_staleness={max_staleness}"), server) as batches:
        for step in range(1, 5):
            assert ids(await batches.batch(step)) == order()[3 * step - 3 : 3 * step]
            await asyncio.sleep(0.01)  # the trainer works
            seen.append(len(server.requests))
    assert seen == begun


async def test_what_is_slow_is_waited_for_and_not_replaced_by_what_is_fast() -> None:
    slow = int(order()[0][1:])
    server = FakeServer(lambda token: 0.2 if token == slow else 0.001)
    async with pipeline(settings("pipeline.max_staleness=3"), server) as batches:
        first = await batches.batch(1)
        assert ids(first) == order()[:3]
        second = await batches.batch(2)
    assert ids(second) == order()[3:6]
    assert first.metrics["pipeline/queued_groups"] == 0
    assert second.metrics["pipeline/queued_groups"] == 9  # of three batches
    assert second.metrics["pipeline/wait_for_policy"] > 0
    assert second.metrics["time/generate"] == 0
    assert first.metrics["time/batch"] >= 0.2


async def test_servers_without_work_between_two_steps_have_waited_for_the_policy_all_the_time() -> None:
    async with pipeline(settings(), FakeServer(lambda token: 0.02)) as batches:
        first = await batches.batch(1)
        second = await batches.batch(2)
        await asyncio.sleep(0.3)  # the trainer works
        third = await batches.batch(3)
    assert "pipeline/wait_for_policy" not in first.metrics
    assert second.metrics["pipeline/wait_for_policy"] < 0.5
    assert third.metrics["pipeline/wait_for_policy"] > 0.5


async def test_the_rollouts_of_a_step_depend_on_seed_and_step_alone_however_early_they_begin() -> None:
    texts = []
    for max_staleness in (0, 2):
        config = settings(f"pipeline.max_staleness={max_staleness}")
        async with pipeline(config, FakeServer()) as batches:
            played = [(await batches.batch(step)).groups for step in range(1, 5)]
        texts.append([[(r.id, r.text) for g in groups for r in g.rollouts] for groups in played])
    assert texts[0] == texts[1]
    seed = sampling_params(config.rollout, seed=5, step=2).seed
    assert seed is not None
    assert texts[0][1] == [(f"step 2/{i}/{j}", str(seed_of(seed, 2 * i + j, 1))) for i in range(3) for j in range(2)]


async def test_groups_that_teach_nothing_are_replaced_by_the_next_prompts_of_the_stream() -> None:
    dull = {order()[1], order()[3]}
    server = FakeServer()
    config = settings("algorithm.oversampling=3")
    informative = lambda group: group.rollouts[0].prompt.id not in dull  # noqa: E731
    async with pipeline(config, server, informative) as batches:
        first, second = await batches.batch(1), await batches.batch(2)
    assert ids(first) == order()[:5]  # one of the first three is dull, and so is the first that takes its place
    assert ids(second) == order()[5:8]
    assert [group.id for group in first.groups] == [f"step 1/{i}" for i in range(5)]
    assert first.metrics["rollout/oversampling"] == pytest.approx(5 / 3)
    assert second.metrics["rollout/oversampling"] == 1


async def test_replacing_ends_at_its_bound() -> None:
    server = FakeServer()
    async with pipeline(settings("algorithm.oversampling=2.5"), server, lambda group: False) as batches:
        first = await batches.batch(1)
    assert ids(first) == order()[:7]  # 2.5 · 3, rounded down
    async with pipeline(settings(), server, lambda group: False) as batches:
        assert len(ids(await batches.batch(1))) == 3  # by default nothing is replaced


@pytest.mark.parametrize("trial", range(20))
async def test_which_prompts_are_played_does_not_depend_on_who_is_fast(trial: int) -> None:
    draw = random.Random(trial)
    dull = {prompt.id for prompt in PROMPTS if draw.random() < 0.5}
    informative = lambda group: group.rollouts[0].prompt.id not in dull  # noqa: E731
    config = settings("algorithm.oversampling=4", "rollout.prompts_per_step=5", "trainer.steps=1")
    delays = [draw.random() / 200 for _ in PROMPTS]
    async with pipeline(config, FakeServer(delays.__getitem__), informative) as batches:
        played = ids(await batches.batch(1))
    # The shortest beginning of the stream with five that teach something.
    enough = next(n for n in range(5, 41) if sum(p not in dull for p in order()[:n]) == 5)
    assert played == order()[: min(enough, 20)]


async def test_a_failure_is_raised_where_its_batch_is_asked_for_and_leaving_ends_the_others() -> None:
    broken = int(order()[4][1:])
    server = FakeServer(lambda token: -1 if token == broken else 0.0)
    async with pipeline(settings("pipeline.max_staleness=3"), server) as batches:
        await batches.batch(1)
        with pytest.raises(ServerError, match="it broke"):
            await batches.batch(2)
    slow: Any = FakeServer(lambda token: 60.0 if token != int(order()[0][1:]) else 0.0)
    async with pipeline(settings("pipeline.max_staleness=3", "rollout.prompts_per_step=1"), slow) as batches:
        await batches.batch(1)
    assert slow.cancelled == 3
    assert not [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
