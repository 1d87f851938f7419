"""Agents against fake sessions, whose calls are what the agents ask there; no HTTP."""

import asyncio
import contextlib
import itertools
import math
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from tests.extras.agents.servers import FakeServers, FakeSession

from hocket.algorithm.samples import shape
from hocket.common.tasks import seed_of
from hocket.config import AlgorithmConfig
from hocket.envs import Task
from hocket.errors import ServerError
from hocket.extras.agents.play import join
from hocket.protocol import AgentCall, SessionRequest
from hocket.types import Group, Prompt
from support import fakes
from support.batches import SAMPLING, gathered, own_reward
from support.episodes import until, with_seed


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that is lost is looked at again at once."""
    monkeypatch.setattr("hocket.client.pool.LOST_REST_S", 0.0)
    monkeypatch.setattr("hocket.client.pool.POLL_S", 0.0)


THINK = 99
"""A token that opens a thought."""
Plays = Callable[[Task, FakeSession], Awaitable[float | str | None]]


async def played(
    plays: Plays,
    servers: FakeServers,
    *,
    num_prompts: int = 1,
    group_size: int = 1,
    timeout_s: float = 30.0,
    first: int = 0,
    most_s: float = 5.0,
    concurrency: int = 64,
    budget: int = 0,
    seed: int = 77,
) -> list[Group]:
    decode = lambda token_ids: " ".join(map(str, token_ids)).replace(str(THINK), "<think>\n")  # noqa: E731
    agents = servers.agents(plays, timeout_s=most_s, concurrency=concurrency, decode=decode, budget=budget)
    prompts = [
        Prompt(id=f"p{i}", token_ids=(i, i + 1), messages=({"content": f"{i}"},), answer=f"{i}", meta={"hints": [i]})
        for i in range(first, first + num_prompts)
    ]
    play = lambda prompt, slot: agents.play(prompt, with_seed(slot, seed))  # noqa: E731
    return (await gathered(prompts, play, own_reward, group_size=group_size, timeout_s=timeout_s)).groups


async def returns(task: Task, session: FakeSession) -> float:
    """Ends soon, after one call."""
    session.ask(5)
    await asyncio.sleep(0.001)
    return 1.0


async def test_an_agent_gets_its_task_and_its_calls_become_the_rollout() -> None:
    servers, given = FakeServers(), []

    async def plays(task: Task, session: FakeSession) -> float:
        given.append(task)
        so_far = session.ask(5, 6)
        session.ask(*so_far, 7)
        session.ask(5, 9)  # forgets all of it
        return 0.75

    (group,) = await played(plays, servers, first=3)
    (task,) = given
    assert (task.text, task.answer, task.messages[0]["content"]) == ("", "3", "3")
    assert (task.base_url, task.api_key, task.model) == ("http://a/sessions/0/v1", "key 0", "the model")
    (session,) = servers.sessions.values()
    sampling = SAMPLING.model_copy(update={"seed": seed_of(77, 0)})
    bounds = {"max_length": 64, "max_calls": 6, "idle_timeout_s": 65.0}
    assert session.request == SessionRequest(sampling=sampling, session="http://a", **bounds)
    done = [call.completion.token_ids for call in session.calls if call.completion]
    (rollout,), (score,) = group.rollouts, group.scores
    assert (rollout.id, score.total, rollout.reward) == ("s/0/0", 0.75, 0.75)
    assert rollout.sequence_ids == ("s/0/0.0", "s/0/0")
    other, last = rollout.sequences
    assert (tuple(last.token_ids), last.mask) == ((5, 9, *done[2]), (False, False, True, True, True))
    assert (other.version_min, other.version_max, last.version_min) == (2, 3, 4)
    assert (other.turns, last.turns, rollout.text, rollout.num_sampled) == (2, 1, "said 2", 9)
    assert tuple(other.token_ids) == (5, 6, *done[0], 7, *done[1])
    assert other.mask == (False, False, True, True, True, False, True, True, True)
    assert [said["content"] for said in other.dialogue] == ["said 0", "7", "said 1"]


async def test_an_agent_gives_its_calls_rewards_of_their_own() -> None:
    servers = FakeServers()

    async def plays(task: Task, session: FakeSession) -> float:
        session.ask(*session.ask(5, 6), 7)
        session.ask(5, 9)
        task.reward(0.5, "answer 2")
        task.reward(0.25, "answer 0")
        task.reward(0.25, "answer 0")
        if task.seed % 2:
            task.reward(1.0, "of another")
        return 2.0

    (group,) = await played(plays, servers, group_size=8)
    wrong = [rollout for rollout in group.rollouts if rollout.error]
    assert 0 < len(wrong) < 8
    assert wrong[0].error == "agent: it gave a reward to 'of another', which is the id of none of its answers"
    good = next(rollout for rollout in group.rollouts if not rollout.error)
    assert good.reward == 3.0
    turns = [[(turn.number, turn.reward) for turn in one.turn_rewards] for one in good.sequences]
    assert turns == [[(0, 0.5), (1, 0.0)], [(2, 0.5)]]


REFUSED = ValueError("400: this session has made its 6 calls")


@pytest.mark.parametrize(
    ("result", "cut_off", "error", "reward", "reason"),
    [
        (0.0, False, None, 0.0, "stop"),
        ("my answer", False, None, None, "stop"),
        ("said 0\n", False, None, None, "stop"),  # as the model said it
        (None, False, None, None, "stop"),
        (0.75, True, None, 0.75, "stop"),  # it copes with the limit
        (REFUSED, True, None, 0.0, "length"),
        (REFUSED, False, f"agent: it raised ValueError: {REFUSED}", None, "stop"),
    ],
)
async def test_a_number_is_the_reward_text_is_scored_and_whom_a_limit_cut_off_has_not_failed(
    result: Any, cut_off: bool, error: str | None, reward: float | None, reason: str
) -> None:
    async def plays(task: Task, session: FakeSession) -> float | str | None:
        session.ask(5, THINK)
        session.cut_off = cut_off
        if isinstance(result, Exception):
            raise result
        return result

    (group,) = await played(plays, FakeServers())
    (rollout,), (score,), (sequence,) = group.rollouts, group.scores, group.rollouts[0].sequences
    assert (score.error, rollout.reward, rollout.finish_reason) == (error, reward, reason)
    assert error or score.total == (1.0 if reward is None else reward)
    assert rollout.text == (result if isinstance(result, str) else "said 0")
    # What a call's prompt ends with stands before the model's text, whoever hands it on, not before the agent's own.
    assert sequence.opening == ("" if result == "my answer" else "<think>\n")
    assert (rollout.num_sampled, sequence.turns) == (3, 1)


SILENT = "agent: it ended without a token of the model, as "
UNASKED = f"{SILENT}no call of its reached the server: have it raise what its client raises, and ask task.base_url"


@pytest.mark.parametrize(
    ("result", "cut_off", "broken_off", "error"),
    [
        (0.0, False, 0, UNASKED),  # it took its client's error for a bad answer
        (1.0, False, 0, UNASKED),
        ("my answer", False, 0, UNASKED),
        (None, False, 0, UNASKED),
        (0.0, False, 2, f"{SILENT}none of its 2 calls was answered: have it wait for the answer"),
        (
            0.0,
            True,
            0,
            f"{SILENT}its prompt leaves no room for one in model.max_length: have it say less, or raise that",
        ),
        (REFUSED, True, 0, f"agent: it raised ValueError: {REFUSED}"),
        (REFUSED, False, 0, f"agent: it raised ValueError: {REFUSED}"),
    ],
)
async def test_an_episode_in_which_the_model_said_nothing_has_no_score_and_does_not_count_in_its_group(
    result: Any, cut_off: bool, broken_off: int, error: str
) -> None:
    began = itertools.count()

    async def plays(task: Task, session: FakeSession) -> float | str | None:
        if next(began) % 2:
            session.ask(5)
            return 1.0
        session.cut_off = cut_off
        session.calls += [AgentCall(id="", prompt_token_ids=(5,), seed=1, completion=None)] * broken_off
        if isinstance(result, Exception):
            raise result
        return result

    (group,) = await played(plays, FakeServers(), group_size=4)
    assert [score.error for score in group.scores] == [error, None] * 2
    assert (tuple(group.rollouts[0].sequences[0].token_ids), group.rollouts[0].num_sampled) == ((0, 1), 0)
    shaped = shape(group, AlgorithmConfig(), 16)
    assert ([one.reward for one in shaped.scored], shaped.reason) == ([1.0, 1.0], "every reward is 1")


async def test_the_answer_to_an_earlier_call_has_that_calls_opening() -> None:
    async def plays(task: Task, session: FakeSession) -> str:
        session.ask(*session.ask(5, THINK), 7)
        return "said 0"

    (group,) = await played(plays, FakeServers())
    (sequence,) = group.rollouts[0].sequences
    assert (sequence.text, sequence.opening) == ("said 0", "<think>\n")


async def test_three_hundred_agents_with_failures_hangs_and_cancellations_are_all_accounted_for(
    seed: int,
) -> None:
    servers = FakeServers()

    async def plays(task: Task, session: FakeSession) -> float | str | None:
        rng = random.Random(task.seed)
        session.ask(5)
        assert task.messages[0]["content"] == str(task.meta["hints"].pop())  # others play the prompt, too
        task.messages[0]["content"] = "something else"
        await asyncio.sleep(rng.random() / 100)
        raises = [KeyError("a bug"), asyncio.CancelledError(), TimeoutError("its own"), SystemExit(2), StopIteration()]
        trouble = rng.choice([*raises, "hang", *[None] * 6])
        if trouble == "hang":
            await asyncio.sleep(3600)
        if isinstance(trouble, BaseException):
            raise trouble
        return 1.0

    groups = await played(plays, servers, num_prompts=75, group_size=4, most_s=0.5, seed=seed)
    ids = [rollout.id for group in groups for rollout in group.rollouts]
    assert ids == [f"s/{i}/{j}" for i in range(75) for j in range(4)]
    errors = Counter(score.error for group in groups for score in group.scores)
    assert set(errors) == {  # each by a draw of 11: one is missing for one seed in 10^11
        None,
        "agent: it raised KeyError: 'a bug'",
        "agent: it raised TimeoutError: its own",
        "agent: it was not done when env.timeout_s=0.5 had passed",
        "agent: it was cancelled",
        "agent: it raised SystemExit: 2",
        "agent: it raised RuntimeError: coroutine raised StopIteration",
    }
    assert sum(errors.values()) == 300
    for rollout, score in ((r, s) for g in groups for r, s in zip(g.rollouts, g.scores, strict=True)):
        assert rollout.num_sampled == 3  # what was said before the trouble is there to be looked at
        assert (score.error is None) == math.isfinite(score.total)
    assert servers.open == []
    assert asyncio.all_tasks() == {asyncio.current_task()}


LOST = "what the model said is lost: can't reach http://a"
AGAIN = "it was played again, as what the model had said was lost: can't reach http://a"
LATE = "agent: it was not done when rollout.timeout_s had passed"


@pytest.mark.parametrize(
    ("lost", "raises", "hangs_in", "sessions", "error"),
    [
        (2, False, None, 3, None),  # played again, and all is well
        (99, True, None, 3, f"agent: it raised ConnectionError: refused; {AGAIN}; {LOST}"),
        (99, False, None, 3, f"agent: {LOST}"),
        (99, False, 1, 1, f"{LATE}; {LOST}"),  # until the batch's end: it is not played again
        (1, False, 2, 2, f"{LATE}; {AGAIN}"),
    ],
)
async def test_an_episode_whose_server_is_lost_is_played_again_with_the_same_random_numbers_or_says_so(
    monkeypatch: pytest.MonkeyPatch, lost: int, raises: bool, hangs_in: int | None, sessions: int, error: str | None
) -> None:
    clock, servers = fakes.Clock(), FakeServers()
    monkeypatch.setattr("hocket.client.pool.time", clock)
    servers.lost, seeds = lost, list[int]()

    async def plays(task: Task, session: FakeSession) -> float:
        seeds.append(task.seed)
        if raises:
            raise ConnectionError("refused")
        if len(servers.sessions) == hangs_in:
            try:
                await asyncio.sleep(3600)
            finally:
                clock.now += 100.0
        session.ask(5)
        return 1.0

    (group,) = await played(plays, servers, timeout_s=0.1 if hangs_in else 30.0)
    assert (group.scores[0].error, servers.open) == (error, [])
    assert servers.said == ["lost server http://a: can't reach http://a"] * min(lost, sessions)
    assert seeds == [seeds[0]] * sessions
    assert [session.request.sampling.seed for session in servers.sessions.values()] == [seed_of(77, 0)] * sessions


async def test_the_time_without_any_server_is_not_that_of_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, servers = fakes.Clock(), FakeServers()
    monkeypatch.setattr("hocket.client.pool.time", clock)
    servers.lost, servers.down = 2, lambda: setattr(clock, "now", clock.now + 100.0)

    groups = await played(returns, servers, num_prompts=4, concurrency=2, timeout_s=30.0)
    assert [group.scores[0].error for group in groups] == [None] * 4  # also of those who began after the loss
    assert len(servers.sessions) == 6


def test_no_agent_keeps_the_process_from_ending() -> None:
    code = """
import asyncio, contextlib
from hocket.common import processes, tasks
from hocket.extras.agents import play as agents

agents.CANCEL_S = tasks.END_S = 0.05

async def stubborn():
    while True:
        with contextlib.suppress(BaseException):
            await asyncio.sleep(3600)

async def main():
    running = asyncio.create_task(stubborn())
    await asyncio.sleep(0)
    print("ended:", await agents._cancel(running))

processes.exit_with(lambda arguments: tasks.run(main()) or 0)
"""
    environment = {**os.environ, "PYTHONPATH": "src"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ended: False\n", "")


async def test_an_agent_that_will_not_be_cancelled_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hocket.extras.agents.play.CANCEL_S", 0.05)
    ended, left = asyncio.Event(), list[Any]()

    async def plays(task: Task, session: FakeSession) -> float:
        left.append(asyncio.current_task())
        while not ended.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await ended.wait()
        raise ValueError("too late for anybody to be told")

    (group,) = await asyncio.wait_for(played(plays, FakeServers(), most_s=0.1), 10)
    assert group.scores[0].error == (
        "agent: it was not done when env.timeout_s=0.1 had passed; nor had it 0.05 s after it was cancelled: "
        "it was left behind"
    )
    ended.set()
    await asyncio.wait(left)  # asyncio would report an error that nobody takes


# 2 tokens of each prompt and 8 of an answer: three fit
@pytest.mark.parametrize(("budget", "most"), [(0, 5), (39, 3)])
async def test_no_more_agents_run_at_the_same_time_than_are_wanted(budget: int, most: int) -> None:
    servers = FakeServers()
    await played(returns, servers, num_prompts=40, concurrency=5, budget=budget)
    assert (len(servers.sessions), servers.most_open) == (40, most)


async def test_what_is_not_over_when_the_batch_must_be_has_failed_and_names_the_setting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, servers, third = fakes.Clock(), FakeServers(), asyncio.Event()
    monkeypatch.setattr("hocket.client.pool.time", clock)

    async def plays(task: Task, session: FakeSession) -> float:
        session.ask(5)
        if task.answer == "0":
            return 1.0
        if task.answer == "2":
            third.set()
        try:
            await asyncio.sleep(3600)
        finally:
            await third.wait()  # it begins in the place of the first one: only then may the time be over
            clock.now += 100.0
        return 1.0

    groups = await played(plays, servers, num_prompts=9, concurrency=2, timeout_s=0.1, most_s=100.0)
    assert Counter(group.scores[0].error for group in groups) == {
        None: 1,
        LATE: 2,
        "agent: it could not begin within 0.1 s (rollout.timeout_s): raise that, or env.concurrency": 6,
    }
    assert servers.open == []
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_leaving_early_ends_agents_and_sessions() -> None:
    servers, ended = FakeServers(), 0

    async def plays(task: Task, session: FakeSession) -> float:
        nonlocal ended
        try:
            await asyncio.sleep(3600)
        finally:
            ended += 1
        return 1.0

    task = asyncio.create_task(played(plays, servers, num_prompts=10))
    await until(lambda: len(servers.open) == 10)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (servers.open, ended) == ([], 10)
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_an_episode_that_is_cancelled_while_its_session_opens_holds_no_tokens() -> None:
    servers = FakeServers()
    servers.opens.clear()
    task = asyncio.create_task(played(returns, servers))
    await until(lambda: servers.open)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert servers.pool.members[0].in_flight == 0


async def test_sessions_go_to_the_server_with_the_fewest_tokens_and_elsewhere_where_it_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hocket.client.pool.LOST_REST_S", 60.0)

    async def plays(task: Task, session: FakeSession) -> float:
        while len(servers.open) < 6:
            await asyncio.sleep(0)
        session.ask(5)
        return 1.0

    for names, num_each in (("abc", 2), ("bc", 3)):
        servers = FakeServers(3)
        await servers.pool.wait_up()
        if "a" not in names:
            servers.fails = {"http://a": ServerError("its engine has ended", code="engine_dead", status=503)}
        groups = await played(plays, servers, num_prompts=6)
        assert [group.scores[0].error for group in groups] == [None] * 6
        counts = Counter(url.partition("/sessions")[0] for url in servers.sessions)
        assert counts == {f"http://{name}": num_each for name in names}
        assert [member.in_flight for member in servers.pool.members] == [0, 0, 0]
    servers.pool.members[0].next_look = 0.0
    servers.fails = {"http://a": ServerError("no more sessions", code="too_many_sessions", status=429)}
    with pytest.raises(ServerError, match="no more sessions"):
        await played(plays, servers)


def call(asked: list[int], *sampled: int) -> AgentCall:
    logprobs = tuple(-i / 1024 for i in sampled)
    done = fakes.completion(*sampled, logprobs=logprobs, text=f"<{sampled[0]}>")
    return AgentCall(prompt_token_ids=tuple(asked), completion=done)


def test_a_thousand_agents_lose_no_sampled_token_and_train_none_twice(rng: random.Random) -> None:
    seen = set()
    for _ in range(1000):
        fresh = iter(range(1000, 100_000))  # every sampled token is another one
        told = lambda: [rng.randrange(4) for _ in range(rng.randint(0, 3))]  # noqa: E731
        histories = [[rng.randrange(4)]]
        calls: list[AgentCall] = []
        ends: list[list[int]] = []  # of sequences, with the tokens of the agent's own
        for _ in range(rng.randint(1, 8)):
            asked = list(rng.choice(histories)) + told()
            if rng.random() < 0.2:
                del asked[rng.randrange(len(asked))]  # the agent rewrites what was said
                asked = asked or [0]
            if rng.random() < 0.1:
                calls.append(AgentCall(prompt_token_ids=tuple(asked), completion=None))
                continue
            sampled = [next(fresh) for _ in range(rng.randint(1, 4))]
            calls.append(call(asked, *sampled))
            histories.append(asked + sampled)
            before = [end for end in ends if asked[: len(end)] == end]
            if before:
                ends.remove(max(before, key=len))
            ends.append(asked + sampled)
        sequences = join(calls, str)
        assert [list(one.token_ids) for one in sequences] == ends
        trained = [i for one in sequences for i, own in zip(one.token_ids, one.mask, strict=True) if own]
        completions = [done.completion for done in calls if done.completion is not None]
        assert sorted(trained) == sorted(i for done in completions for i in done.token_ids)
        for one in sequences:
            assert len(one.token_ids) == len(one.mask) == len(one.logprobs)
            expected = [-i / 1024 if own else 0.0 for i, own in zip(one.token_ids, one.mask, strict=True)]
            assert list(one.logprobs) == expected
            assert not one.mask[0]
            assert one.mask[-1]
        assert sum(len(one.turn_rewards) for one in sequences) == len(completions)
        for done in calls:  # the model saw, before what it sampled, just what stands before it in a sequence
            if done.completion is not None:
                first = done.completion.token_ids[0]
                (mine,) = [one for one in sequences if (first, True) in zip(one.token_ids, one.mask, strict=True)]
                assert tuple(mine.token_ids[: mine.token_ids.index(first)]) == done.prompt_token_ids
        seen.add(len(sequences))
    assert seen >= {0, 1, 2, 3, 4}
