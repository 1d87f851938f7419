import asyncio
import contextlib
import gc
import logging
import math
import os
from pathlib import Path

import psutil
import pytest

from hocket.common.registry import load_plugins
from hocket.errors import ConfigError, RewardError
from hocket.rewards import RetryError
from hocket.rewards.scorer import refuse_failing
from hocket.rewards.workers import NUM_WORKERS
from hocket.types import Group, Score
from support import fakes
from support.episodes import Register, Scorers, Scores, make_rollout, until
from support.processes import wait_for

pytestmark = pytest.mark.usefixtures("plugin")

PLUGIN = """
import asyncio
import json
import os
import subprocess
import sys
import time

from hocket.errors import RewardError
from hocket.rewards import reward

@reward("vowels")
def vowels(completion, share=1.0):
    print("counting", completion)
    return share * sum(letter in "aeiou" for letter in completion)

@reward("pid")
def pid(completion):
    return os.getpid()

@reward("picky")
def picky(completion, meta):
    if completion == "raise":
        raise KeyError("no such word")
    if completion == "child":
        subprocess.run([sys.executable, "-c", "import time; time.sleep(3600)  # " + __file__])
    return {"good": 0.5, "better": 0.25}

@reward("forger")
def forger(completion):
    frame = sys._getframe()
    while "answers" not in frame.f_locals:
        frame = frame.f_back
    totals, _, more = completion.partition(" ")
    answer = [{"total": total} for total in json.loads(f"[{totals}]")]
    frame.f_locals["answers"].send_bytes(json.dumps(answer).encode() + more.encode())
    time.sleep(3600)

@reward("sleepy")
def sleepy(completion):
    time.sleep(3600 if completion == "hang" else 0)
    return 0.75

@reward("slow_judge")
async def slow_judge(completion):
    await asyncio.sleep(3600 if completion == "hang" else 0)
    return 0.75

@reward("spent")
async def spent(completion):
    try:
        await asyncio.sleep(3600)
    finally:
        raise RewardError("the budget is spent")

@reward("stubborn")
async def stubborn(completion):
    for _ in range(2):
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            await asyncio.sleep(0)
    return 1.0
"""


def test_workers_start_before_the_first_score_which_need_not_wait_for_them(scorer_of: Scorers) -> None:
    before = psutil.Process().children()
    scorer_of({"length": {"target": 3}})  # an inline reward needs none
    assert psutil.Process().children() == before
    scorer = scorer_of({"vowels": 1})
    wait_for(lambda: len(psutil.Process().children()) == len(before) + NUM_WORKERS, "all workers", 60)
    scorer._calls.__exit__()
    wait_for(lambda: psutil.Process().children() == before, "no worker is left", 60)


async def test_the_total_is_weighted_and_the_parts_are_not(scorer_of: Scorers) -> None:
    functions = {"exact_match": 2.0, "length": {"weight": 0.5, "target": 4}, "picky": 0.1, "slow_judge": 1.0}
    score = await scorer_of(functions).score(make_rollout("abcd", num_sampled=3))
    # 2·1 + 0.5·(−1/4) + 0.1·(0.5 + 0.25) + 0.75
    assert score.total == pytest.approx(2.7)
    parts = {"exact_match": 1.0, "length": -0.25, "picky": 0.75, "picky/good": 0.5, "picky/better": 0.25}
    assert (score.parts, score.error) == (parts | {"slow_judge": 0.75}, None)


async def test_a_failing_reward_is_an_error_and_never_zero(scorer_of: Scorers, plugin: Path) -> None:
    scorer = scorer_of({"exact_match": 1.0, "picky": 1.0}, timeout_s=60)
    unpicklable = make_rollout("b", answer="b")
    unpicklable.prompt.meta["of"] = lambda: None  # type: ignore[index]
    line = PLUGIN[: PLUGIN.index("raise KeyError")].count("\n") + 1
    for rollout, error in (
        (make_rollout("raise", answer="raise"), f"picky: KeyError: 'no such word' ({plugin}:{line})"),
        (unpicklable, "picky: AttributeError: Can't pickle local object"),
    ):
        score = await scorer.score(rollout)
        assert str(score.error).startswith(error)
        assert math.isnan(score.total)
        assert score.parts == {"exact_match": 1.0}  # the result of the other one is still there
        assert (await scorer.score(make_rollout("fine"))).error is None


@pytest.mark.usefixtures("one_worker")
@pytest.mark.parametrize(
    ("forged", "error"),
    [
        ('"lots"', "returned str"),
        ("NaN", "returned nan"),
        ("1.0", ""),
        ("1.0,1.0", "its worker process answered with something else"),  # scores of two
        ("1.0 [", "its worker process answered with something else"),  # and more behind it
    ],
)
async def test_an_answer_that_a_reward_forges_is_read_like_a_result(scores_of: Scores, forged: str, error: str) -> None:
    (score,) = await scores_of({"forger": 1.0}, forged)
    assert str(score.error).startswith(f"forger: {error}" if error else "None")


async def test_a_reward_that_hangs_ends_at_the_deadline_with_all_that_it_started_and_others_go_on(
    scorer_of: Scorers, plugin: Path
) -> None:
    scorer = scorer_of({"picky": 1.0}, timeout_s=3)
    hanging = asyncio.create_task(scorer.score(make_rollout("child")))  # it waits for a program of its own
    await until(lambda: _sleeps(plugin))
    scorer._calls._timeout_s = 60  # of the others, which are not about the speed of the machine
    others = await scorer.score_group([make_rollout("fine")] * 60)
    assert {(score.total, score.error) for score in others} == {(0.75, None)}
    assert (await hanging).error == "picky: no result within 3 s; its worker process was ended"
    await until(lambda: not _sleeps(plugin))


async def test_closing_ends_workers_that_are_busy(scorer_of: Scorers, plugin: Path) -> None:
    scorer = scorer_of({"picky": 1.0}, timeout_s=3600)
    score = asyncio.create_task(scorer.score(make_rollout("child")))
    await until(lambda: _sleeps(plugin))
    await asyncio.to_thread(scorer._calls.__exit__)
    assert (await score).error is not None
    await until(lambda: not _sleeps(plugin))
    assert "closed" in str((await scorer.score(make_rollout("fine"))).error)


async def test_an_async_reward_that_hangs_is_cancelled_and_one_that_ignores_that_holds_nothing_up(
    scorer_of: Scorers,
) -> None:
    reported = list[object]()
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: reported.append(context))
    for name in ("slow_judge", "stubborn", "spent"):
        scorer = scorer_of({name: 1.0}, timeout_s=0.2)
        assert (await scorer.score(make_rollout("hang"))).error == f"{name}: no result within 0.2 s"
    await until(lambda: not _tasks_of("slow_judge"))
    for task in _tasks_of("stubborn"):
        task.cancel()
    score = asyncio.create_task(scorer_of({"slow_judge": 1.0}, timeout_s=3600).score(make_rollout("hang")))
    await until(lambda: bool(_tasks_of("slow_judge")))
    score.cancel()
    with pytest.raises(asyncio.CancelledError):
        await score
    await until(lambda: not _tasks_of("slow_judge"))
    gc.collect()
    assert reported == []  # nor what one raises that nobody waits for


def test_a_hundred_at_once_each_get_their_own_score_in_any_event_loop_after_cancelled_ones(scorer_of: Scorers) -> None:
    functions = {"exact_match": 1.0, "vowels": {"share": 0.5}, "slow_judge": 1.0, "pid": 1.0}
    scorer = scorer_of(functions, timeout_s=60)
    rollouts = [make_rollout("a" * i, answer="a" * 30) for i in range(100)]

    async def scores() -> list[Score]:
        cancelled = [asyncio.create_task(scorer.score(make_rollout("aaa" * 100))) for _ in range(8)]
        for _ in range(2):  # then each has asked a worker
            await asyncio.sleep(0)
        for task in cancelled:
            task.cancel()
        return await asyncio.gather(*map(scorer.score, rollouts))

    for _ in range(2):
        for i, score in enumerate(asyncio.run(scores())):
            parts = dict(score.parts)
            assert parts.pop("pid") != os.getpid()
            assert parts == {"exact_match": float(i == 30), "vowels": i / 2, "slow_judge": 0.75}


def test_a_worker_reward_that_no_other_process_can_reach_is_refused(scorer_of: Scorers, register: Register) -> None:
    register("local", lambda completion: 0.0, inline=False)
    typed = lambda completion: 0.0  # noqa: E731 - as at a prompt
    typed.__module__, typed.__qualname__ = "__main__", "typed"
    register("typed", typed, inline=False)
    for name in ("local", "typed"):
        with pytest.raises(ConfigError, match="define it at the top level of a Python file named under plugins"):
            scorer_of({name: 1.0})


async def test_an_inline_reward_of_one_s_own_needs_no_worker(scores_of: Scores, register: Register) -> None:
    register("own", lambda completion: os.getpid() / int(completion))
    here, failed = await scores_of({"own": 1.0}, "1", "0")
    assert (here.total, "ZeroDivisionError" in str(failed.error)) == (os.getpid(), True)


async def test_a_plugin_that_only_loads_here_says_so(scores_of: Scores, tmp_path: Path) -> None:
    file = tmp_path / "vanishing.py"
    file.write_text('from hocket.rewards import reward\n@reward("vanishing")\ndef f(completion): return 1.0\n')
    load_plugins([str(file)])
    file.unlink()
    for score in await scores_of({"vanishing": 1.0}, "a", "b"):
        assert "can't load it" in str(score.error)


async def test_a_plugin_that_takes_for_ever_to_load_says_so(scores_of: Scores, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hocket.rewards.workers.START_TIMEOUT_S", 1e-3)
    (score,) = await scores_of({"vowels": 1.0}, "a")
    assert str(score.error).startswith("vowels: its worker process can't load it: no result within 0.001 s")


@pytest.mark.parametrize(("error", "ends"), [(RetryError("busy"), True), (ValueError("wrong"), False)])
async def test_refusals_call_after_call_end_the_run_and_errors_never_do(
    scores_of: Scores, register: Register, monkeypatch: pytest.MonkeyPatch, error: Exception, ends: bool
) -> None:
    monkeypatch.setattr("hocket.rewards.scorer.FIRST_LATE", 3)
    monkeypatch.setattr("hocket.rewards.scorer.MOST_LATE", 3)

    async def raises(completion: str) -> float:
        raise error

    register("raises", raises)
    functions = {"raises": {"retries": 0}}
    assert all(one.error for one in await scores_of(functions, "a", "b"))
    with pytest.raises(RewardError, match="gives no results, call after call") if ends else contextlib.nullcontext():
        assert all(one.error for one in await scores_of(functions, "a", "b", "c"))


def test_silence_is_said_once_a_while_and_only_where_no_call_has_ended(
    scorer_of: Scorers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    clock = fakes.Clock()
    monkeypatch.setattr("hocket.rewards.scorer.time", clock)
    scorer = scorer_of({"exact_match": 1.0})
    asyncio.run(scorer.score(make_rollout()))  # a call ends now
    said = []
    for seconds in (9.0, 1.0, 9.0, 1.0):
        clock.now += seconds
        scorer._calls._warn_if_silent("exact_match")
        said.append(caplog.text.count("no call has ended for 10 s"))
    assert said == [0, 1, 1, 2]


@pytest.mark.parametrize("reward", ["slow_judge", "sleepy"])  # async, in a worker
async def test_a_reward_that_gives_no_result_is_said_while_it_is_waited_for_and_soon_ends_the_run(
    scorer_of: Scorers,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    reward: str,
) -> None:
    caplog.set_level(logging.WARNING)  # which another test may have raised
    monkeypatch.setattr("hocket.rewards.scorer.PATIENCE_S", 0.1)
    monkeypatch.setattr("hocket.rewards.scorer.FIRST_LATE", 2)
    monkeypatch.setattr("hocket.rewards.scorer.MOST_LATE", 3)
    hangs = [make_rollout("hang")] * 2
    scorer = scorer_of({reward: 1.0}, timeout_s=0.3)
    late = "no result within 0.3 s"
    with pytest.raises(RewardError, match=f"reward '{reward}' gives no results, call after call: {late}"):
        await scorer.score_group(hangs)
    assert caplog.text.count(f"reward '{reward}': no call has ended for ") == 1
    scorer = scorer_of({reward: 1.0}, timeout_s=60)
    assert (await scorer.score(make_rollout("well"))).total == 0.75
    monkeypatch.setattr(scorer._calls, "_timeout_s", 0.3)
    assert all(late in str(one.error) for one in await scorer.score_group(hangs))
    with pytest.raises(RewardError, match="go on without its scores"):
        await scorer.score(hangs[0])
    scorer = scorer_of({reward: 1.0}, timeout_s=0.3, max_error_rate=1)
    assert all(late in str(one.error) for one in await scorer.score_group(hangs * 2))


def test_too_many_failed_scores_stop_the_run_with_the_first_cause() -> None:
    scores = (Score(total=1.0), Score(total=0.0, error="math: hung"), Score(total=0.0, error="math: raised"))
    group = Group(id="g", rollouts=(make_rollout(),) * 3, scores=scores)
    refuse_failing([group], 2 / 3)
    with pytest.raises(RewardError, match=r"2 of 3 scores failed.*math: hung"):
        refuse_failing([group], 0.6)


def _sleeps(plugin: Path) -> bool:
    """Return whether a process that the plugin's reward started is on this machine."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if f"# {plugin}" in path.read_text():
                return True
    return False


def _tasks_of(name: str) -> "list[asyncio.Task[object]]":
    awaited = {task: getattr(task.get_coro(), "cr_await", None) for task in asyncio.all_tasks()}
    return [task for task, coroutine in awaited.items() if getattr(coroutine, "__name__", "") == name]
