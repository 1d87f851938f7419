"""The collector against a fake server and fake rewards: order, token-exactness, scoring, failure."""

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest

from hocket.config import RolloutConfig
from hocket.errors import ServerError
from hocket.protocol import Completion, SamplingParams
from hocket.rollout.collect import in_order, play, sampling_params, to_rollout
from hocket.rollout.played import Wave
from hocket.types import Group, Prompt, Rollout, Score

PROMPTS = [Prompt(id="p0", token_ids=(1, 2)), Prompt(id="p1", token_ids=(3,))]


def completion(token: int, version: int = 5) -> Completion:
    return Completion(
        token_ids=(token, 99), logprobs=(-0.1, -0.2), finish_reason="stop", versions=((version, 0, 2),), text=str(token)
    )


class FakeServer:
    """Answers in the given order of (prompt, sample); raises at the end where told to."""

    kv_tokens = 4096

    def __init__(self, order: Sequence[tuple[int, int]], error: Exception | None = None) -> None:
        self.order, self.error = order, error

    async def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams,
        *,
        n: int = 1,
        timeout_s: float,
        seeds: Sequence[Sequence[int]],
    ) -> AsyncIterator[tuple[int, int, Completion]]:
        self.asked = (prompts, sampling, n, timeout_s)
        for prompt, sample in self.order:
            await asyncio.sleep(0.01)  # a network's pause, in which scoring goes on
            yield prompt, sample, completion(10 * prompt + sample)
        if self.error:
            raise self.error


class FakeScorer:
    """Scores by text; counts what is being scored at the same time."""

    def __init__(self, slow: str = "") -> None:
        self.slow, self.cancelled = slow, 0

    async def score(self, rollout: Rollout) -> Score:
        try:
            await asyncio.sleep(30 if rollout.text == self.slow else 0)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return Score(total=float(rollout.text))


async def played(server: FakeServer, scorer: FakeScorer) -> list[Group]:
    sampling = SamplingParams(max_tokens=4)
    return [
        group
        async for group in play(
            Wave(prompts=PROMPTS, sampling=sampling, group_size=2, label="step 1", timeout_s=9),
            server=server,
            scorer=scorer,
        )
    ]


async def test_groups_hold_their_rollouts_in_order_whatever_order_the_server_answers_in() -> None:
    server = FakeServer([(1, 1), (0, 1), (1, 0), (0, 0)])
    groups = {group.id: group for group in await played(server, FakeScorer())}
    assert sorted(groups) == ["step 1/0", "step 1/1"]
    assert [r.text for r in groups["step 1/0"].rollouts] == ["0", "1"]
    assert [s.total for s in groups["step 1/1"].scores] == [10.0, 11.0]
    assert [r.id for r in groups["step 1/1"].rollouts] == ["step 1/1/0", "step 1/1/1"]
    assert server.asked == ([(1, 2), (3,)], SamplingParams(max_tokens=4), 2, 9)


async def test_the_end_of_generation_is_told_while_scores_are_missing() -> None:
    told = asyncio.Event()

    async def consume() -> None:
        groups = play(
            Wave(prompts=PROMPTS, sampling=SamplingParams(), group_size=1, label="s", timeout_s=9),
            server=FakeServer([(0, 0), (1, 0)]),
            scorer=FakeScorer(slow="10"),  # the second one's score takes half a minute
            on_generated=told.set,
        )
        async for _ in groups:
            pass

    consumer = asyncio.create_task(consume())
    await asyncio.wait_for(told.wait(), 9)
    assert not consumer.done()
    consumer.cancel()
    await asyncio.wait({consumer})
    assert consumer.cancelled()


async def test_a_group_leaves_while_others_are_still_being_generated() -> None:
    # Prompt 1 is complete after two answers; the server's error comes after its third.
    server = FakeServer([(1, 0), (1, 1), (0, 0)], error=ServerError("cut", code="cut"))
    seen: list[str] = []

    async def consume() -> None:
        async for group in play(
            Wave(prompts=PROMPTS, sampling=SamplingParams(), group_size=2, label="s", timeout_s=9),
            server=server,
            scorer=FakeScorer(),
        ):
            seen.append(group.id)  # noqa: PERF401 - what was seen before the error is the point

    with pytest.raises(ServerError, match="cut"):
        await consume()
    assert seen == ["s/1"]


async def test_what_is_not_sampled_in_time_has_failed_and_the_rest_is_whole() -> None:
    server = FakeServer([(1, 0), (0, 1), (1, 1)], error=ServerError("did not finish", code="timeout"))
    wave = Wave(prompts=PROMPTS, sampling=SamplingParams(), group_size=2, label="s", timeout_s=0.0)
    late, whole = in_order([group async for group in play(wave, server=server, scorer=FakeScorer())])
    assert [score.total for score in whole.scores] == [10.0, 11.0]
    assert [score.error for score in late.scores] == [
        "it was not sampled within 0 s (rollout.timeout_s): did not finish",
        None,
    ]
    assert [rollout.num_sampled for rollout in late.rollouts] == [0, 2]
    assert late.rollouts[0].sequences[0].token_ids == PROMPTS[0].token_ids


async def test_a_failing_server_cancels_the_scoring_that_is_left() -> None:
    scorer = FakeScorer(slow="10")
    with pytest.raises(ServerError, match="gone"):
        await played(FakeServer([(1, 0), (0, 0)], error=ServerError("gone", code="unreachable")), scorer)
    await asyncio.sleep(0)
    assert scorer.cancelled == 1


def test_a_rollout_is_the_prompt_and_exactly_the_sampled_tokens() -> None:
    two_versions = Completion(
        token_ids=(7, 8, 2),
        logprobs=(-1.0, -2.0, -3.0),
        finish_reason="length",
        versions=((4, 0, 1), (5, 1, 3)),
        text="x",
    )
    rollout = to_rollout(PROMPTS[0], two_versions, "g/3")
    (sequence,) = rollout.sequences
    assert sequence.token_ids == (1, 2, 7, 8, 2)
    assert sequence.mask == (False, False, True, True, True)
    assert sequence.logprobs == (0.0, 0.0, -1.0, -2.0, -3.0)
    assert (sequence.version_min, sequence.version_max, sequence.finish_reason, rollout.id) == (4, 5, "length", "g/3")
    assert rollout.num_sampled == 3


def test_a_completion_without_tokens_is_an_error() -> None:
    empty = Completion(token_ids=(), logprobs=(), finish_reason="abort", versions=(), text="")
    with pytest.raises(ServerError, match="without tokens"):
        to_rollout(PROMPTS[0], empty, "g/0")


def test_the_sampling_seed_depends_on_seed_and_step_alone() -> None:
    config = RolloutConfig(max_tokens=7, temperature=0.5)
    one = sampling_params(config, seed=0, step=1)
    assert one == sampling_params(config, seed=0, step=1)
    assert len({sampling_params(config, seed=s, step=t).seed for s in range(3) for t in range(5)}) == 15
    assert (one.temperature, one.max_tokens) == (0.5, 7)
    assert sampling_params(config, seed=0, step=1, temperature=0.0).temperature == 0.0


def test_groups_are_ordered_by_number_not_by_name_or_completion() -> None:
    groups = [Group(id=f"step 1/{i}", rollouts=(), scores=()) for i in (10, 2, 0)]
    assert [group.id for group in in_order(groups)] == ["step 1/0", "step 1/2", "step 1/10"]
