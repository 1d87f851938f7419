"""What a reward may be: a function or a class, of one rollout or of a group; how many at once, again, and composed."""

import asyncio
import contextlib
import dataclasses
import gc
import math
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy
import psutil
import pytest

from hocket.config import RewardsConfig, RewardSpec
from hocket.errors import ConfigError, RewardError
from hocket.rewards import RetryError, RewardCalls, RewardScorer, base
from hocket.rewards.base import REWARDS, bind
from hocket.rewards.runners import clock, clocked
from hocket.rewards.scores import as_score, compose
from hocket.rewards.workers import Workers
from hocket.types import Score, TokenSequence
from support import fakes
from support.episodes import Register, Scorers, Scores, make_rollout
from support.examples import plugged, shown
from support.processes import wait_for

pytestmark = pytest.mark.usefixtures("plugin")

PLUGIN = """
import os, subprocess, sys, time
from hocket.rewards import reward

@reward("lexicon")
class Lexicon:
    def __init__(self, log="/dev/null", words=(), hangs_in=""):
        self.log, self.words, self.hangs_in, self.calls = log, set(words), hangs_in, 0
        self.write("made")

    def __enter__(self):
        self.write("set up")
        return self

    def __exit__(self, *exc_info):
        subprocess.Popen(["sleep", "600"])
        self.write(f"torn down after {self.calls}")

    def write(self, does):
        with open(self.log, "a") as file:
            print(os.getpid(), does, file=file)
        if self.hangs_in and does.startswith(self.hangs_in):
            time.sleep(600) if does != "set up" else sys.exit(3)

    def __call__(self, completion):
        self.calls += 1
        return sum(word in self.words for word in completion.split())

@reward("longest")
def longest(completions, answer):
    if answer == "raise":
        raise KeyError("no such word")
    return eval(answer) if answer else [float(one == max(completions, key=len)) for one in completions]
"""


def test_a_function_gets_only_what_it_names(register: Register) -> None:
    register("few", lambda meta, completion, share=0.5: share)
    register("all", lambda completion, prompt, messages, answer, token_ids, finish_reason, rollout: 0.0)
    register("open", lambda completion, **options: options)
    rollout = make_rollout("abdc")
    few, opened, every = bind("few", RewardSpec(share=0.25)), bind("open", RewardSpec(any=1)), bind("all", RewardSpec())
    assert few.arguments([rollout]) == {"meta": {"level": 2}, "completion": "abdc"}
    assert few.make()(**few.arguments([rollout])) == 0.25
    assert opened.make()(**opened.arguments([rollout])) == {"any": 1}
    assert every.arguments([rollout]) == {
        "completion": "abdc",
        "prompt": "Sort: dbca",
        "messages": ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Sort: dbca"}),
        "answer": "abcd",
        "token_ids": (10, 11, 12),
        "finish_reason": "stop",
        "rollout": rollout,
    }
    other = TokenSequence(token_ids=(7, 8, 9), mask=(False, True, True), logprobs=(0.0,) * 3)
    both = dataclasses.replace(rollout, sequences=(other, *rollout.sequences))
    assert every.arguments([both])["token_ids"] == (8, 9, 10, 11, 12)


@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        (lambda completion, target: 0.0, {}, "needs the option 'target': set rewards.functions.mine.target"),
        (lambda completion: 0.0, {"completion": "x"}, "'completion' comes from the rollout"),
        (lambda completion, /, answer: 0.0, {}, r"mine\(completion, answer\) gets its arguments by name: remove the /"),
        (lambda completions, completion: [0.0], {}, "takes a batch, but here .* or rollouts, and return a list"),
        (lambda completion, clip=1: 0.0, {}, "'clip' is a key of every reward's section; rename the argument"),
        (lambda completion, retries=1: 0.0, {}, "'retries' is a key of every reward's section; rename the argument"),
        (lambda completion: 0.0, {"max_concurrent": 2}, "'mine' is not async: leave its max_concurrent out"),
        (lambda completion: 0.0, {"retries": 2}, "'mine' is not async: leave its retries out"),
        (None, {"log": "", "word": ["a"]}, r"lexicon\(log, words, hangs_in\) has no option 'word' \(did you mean"),
    ],
)
def test_wrong_arguments_and_options_are_answered_with_the_fix(
    register: Register, function: Callable[..., Any] | None, options: dict[str, Any], message: str
) -> None:
    if function is not None:
        register("mine", function)
    with pytest.raises(ConfigError, match=message):
        bind("mine" if function else "lexicon", RewardSpec.model_validate(options))
    register("needy", len, imports=("no_such_package",))
    with pytest.raises(ConfigError, match=r"reward needy needs the package no_such_package: .*pip install no_such_p"):
        bind("needy", RewardSpec())


def test_numbers_of_any_kind_are_values_and_a_dict_adds_up_and_a_score_has_its_total() -> None:
    for number in (1, True, numpy.float32(1), numpy.int64(1)):
        assert as_score(number) == Score(total=1.0)
    assert as_score({"style": 0.25, "sense": 1}) == Score(total=1.25, parts={"style": 0.25, "sense": 1.0})
    assert as_score(Score(total=3.0, parts={"style": 0.5})) == Score(total=3.0, parts={"style": 0.5})
    assert as_score(Score(total=math.nan, error="the judge refused")).error == "the judge refused"


@pytest.mark.usefixtures("one_worker")
async def test_a_class_is_set_up_once_in_a_worker_with_its_options_and_again_in_the_next_and_torn_down_at_the_end(
    scorer_of: Scorers, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    scorer = scorer_of({"lexicon": {"log": str(log), "words": ["a", "b"]}}, timeout_s=60)
    assert [(await scorer.score(make_rollout(text))).total for text in ("a c b", "c", "a")] == [2, 0, 1]
    (worker,) = scorer._calls._runners["worker"]._by_thread.values()
    worker.kill()
    assert (await scorer.score(make_rollout("a a"))).total == 2
    scorer._calls.__exit__()
    did = [line.split(maxsplit=1) for line in log.read_text().splitlines()]
    assert [what for _, what in did] == ["made", "set up"] * 2 + ["torn down after 1"]
    assert did[0][0] == did[1][0] != did[2][0] == did[4][0] != str(os.getpid())


@pytest.mark.parametrize(
    ("where", "error"),
    [
        ("made", "lexicon: no result within 0.5 s; its worker process was ended"),
        ("set up", "lexicon: SystemExit: 3"),
        ("torn down", ""),
    ],
)
@pytest.mark.usefixtures("one_worker")
async def test_a_class_that_hangs_or_exits_in_set_up_or_tear_down_costs_its_score_and_leaves_nothing(
    scorer_of: Scorers, monkeypatch: pytest.MonkeyPatch, where: str, error: str
) -> None:
    monkeypatch.setattr("hocket.rewards.workers.TEAR_DOWN_S", 0.5)
    before = set(psutil.Process().children(recursive=True))
    scorer = scorer_of({"lexicon": {"hangs_in": where}}, timeout_s=0.5 if where == "made" else 60)
    score = await scorer.score(make_rollout())
    assert (score.error or "").startswith(error)
    scorer._calls.__exit__()
    wait_for(lambda: set(psutil.Process().children(recursive=True)) <= before, "no process is left", 60)


async def test_the_reward_that_the_decorator_shows_works_as_it_stands(scorer_of: Scorers, tmp_path: Path) -> None:
    with plugged(tmp_path, shown(base, "from hocket.rewards import reward"), (REWARDS, "letter_share")):
        score = await scorer_of({"letter_share": {"letter": "a"}}).score(make_rollout("abba"))
    assert score.total == 0.5


class Judge:
    """Says when it is set up, called and torn down; `fails`: what set-up does instead."""

    seen: ClassVar[list[str]] = []

    def __init__(self, share: float = 1.0, fails: str = "") -> None:
        self.share, self.fails = share, fails

    async def __aenter__(self) -> "Judge":
        if self.fails == "hangs":
            await asyncio.sleep(3600)
        if self.fails:
            raise OSError(self.fails)
        self.seen.append("set up")
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await asyncio.sleep(0)
        self.seen.append("torn down")

    async def __call__(self, completion: str) -> float:
        self.seen.append(completion)
        return self.share * len(completion)


def test_an_async_class_lives_as_long_as_its_event_loop(scorer_of: Scorers, register: Register) -> None:
    register("grader", Judge)
    scorer = scorer_of({"grader": {"share": 0.5}})

    async def both() -> list[float]:
        return [(await scorer.score(make_rollout(text))).total for text in ("ab", "c")]

    Judge.seen.clear()
    for _ in range(2):
        assert asyncio.run(both()) == [1.0, 0.5]
    assert Judge.seen == ["set up", "ab", "c", "torn down"] * 2


def test_an_async_class_whose_scorer_was_dropped_is_torn_down_with_its_event_loop(register: Register) -> None:
    register("grader", Judge)
    config = RewardsConfig.model_validate({"functions": {"grader": 1.0}})
    reports: list[dict[str, Any]] = []

    async def drop() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, report: reports.append(report))
        with RewardCalls(config, ["grader"]) as calls:
            await calls.set_up()
        del calls
        gc.collect()
        assert Judge.seen == ["set up"]

    Judge.seen.clear()
    asyncio.run(drop())
    assert (Judge.seen, reports) == (["set up", "torn down"], [])


@pytest.mark.parametrize(
    ("fails", "error"), [("no route", "can't be set up: OSError: no route"), ("hangs", "no result within 0.2 s")]
)
async def test_an_async_class_that_hangs_or_fails_in_set_up_costs_its_score_alone(
    scores_of: Scores, register: Register, fails: str, error: str
) -> None:
    register("grader", Judge)
    for score in await scores_of({"grader": {"fails": fails}, "exact_match": 1.0}, "abcd", "abcd", timeout_s=0.2):
        assert (score.error, score.parts) == (f"grader: {error}", {"exact_match": 1.0})


@pytest.mark.parametrize("own_deadline", [False, True])
async def test_an_async_class_has_a_deadline_for_its_set_up_unless_it_sees_to_that_itself(
    register: Register, monkeypatch: pytest.MonkeyPatch, own_deadline: bool
) -> None:
    class Slow:
        async def __aenter__(self) -> "Slow":
            for _ in range(9):
                await asyncio.sleep(0)
            return self

        async def __aexit__(self, *exc_info: object) -> None: ...

        async def __call__(self, completion: str) -> float:
            return 1.0

    monkeypatch.setattr("hocket.rewards.runners.START_TIMEOUT_S", 0.0)
    register("slow", Slow, own_deadline=own_deadline)
    config = RewardsConfig.model_validate({"functions": {"slow": 1.0}})
    message = "reward 'slow' can't be set up: its __aenter__ has not ended within 0 s; look whether what it waits for"
    ends = contextlib.nullcontext() if own_deadline else pytest.raises(RewardError, match=message)
    with RewardCalls(config, ["slow"]) as calls, ends:
        await calls.set_up()


async def test_training_and_evaluation_share_calls_and_each_counts_its_own_rewards(register: Register) -> None:
    register("grader", Judge)
    config = RewardsConfig.model_validate({"functions": {"grader": {"weight": 0.5}, "exact_match": 1.0}})
    Judge.seen.clear()
    with RewardCalls(config, [*config.functions, "think_format"]) as calls:
        training, judged, other = (
            RewardScorer(calls, names) for names in (config.functions, ["grader"], ["think_format"])
        )
        assert (await training.score(make_rollout())).parts == {"grader": 4.0, "exact_match": 1.0}
        assert (await judged.score(make_rollout())).total == 2.0
        assert (await other.score(make_rollout())).parts == {"think_format": 0.0}
    assert Judge.seen == ["set up", "abcd", "abcd"]


async def test_a_group_is_ranked_in_one_call_without_the_rollouts_that_failed(
    scorer_of: Scorers, register: Register
) -> None:
    asked = list[str]()
    register("asked", lambda completion: asked.append(completion) or 0.0)
    scorer = scorer_of({"longest": 2.0, "asked": 1.0}, timeout_s=60)
    failed = dataclasses.replace(make_rollout("lost"), error="no server")
    first, lost, second = await scorer.score_group([make_rollout("ab", answer=""), failed, make_rollout("abc")])
    assert (first.total, dict(first.parts)) == (0.0, {"longest": 0.0, "asked": 0.0})
    assert (second.total, lost.error, asked) == (2.0, "no server", ["ab", "abc"])


async def test_a_group_may_say_more_than_a_rollout(scores_of: Scores) -> None:
    texts = list(map(str, range(100)))  # 2 kB each, in more than twice the 64 kB of one
    for score in await scores_of({"longest": 1.0}, *texts, answer="[{'a' * 1000: 0.5, 'b' * 1000: 0.5}] * 100"):
        assert (score.error, score.total) == (None, 1.0)


@pytest.mark.parametrize(
    ("returns", "errors"),
    [
        ("raise", ["KeyError: 'no such word'"] * 2),
        ("[1.0]", ["returned 1 results for 2 completions"] * 2),
        ("None", ["returned None instead of a list of 2 results, one per completion"] * 2),
        ("'ab'", ["returned str instead of a list of 2"] * 2),
        ("{0.0, 1.0}", ["returned set instead of a list of 2"] * 2),  # whose order is anybody's
        ("[float('nan'), {'good': 2}]", ["returned nan, which is not a finite number", None]),
        ("[3, None]", [None, "returned None instead of a number"]),
        ("os._exit(3)", ["its worker process ended with exit code 3"] * 2),
    ],
)
async def test_what_a_group_does_not_get_is_the_error_of_each_that_lacks_it(
    scores_of: Scores, returns: str, errors: list[str | None]
) -> None:
    for score, error in zip(await scores_of({"longest": 1.0}, "a", "b", answer=returns), errors, strict=True):
        assert (score.error or "").startswith(f"longest: {error}" if error else ""), score
        assert math.isnan(score.total) == (error is not None)


async def test_at_most_max_concurrent_calls_run_and_the_refused_are_made_again(
    scores_of: Scores, register: Register
) -> None:
    running, most, refused = 0, 0, set[str]()

    async def judge(completion: str) -> float:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        if len(refused) < 5 and completion not in refused:
            refused.add(completion)
            raise RetryError("429", retry_after=0.0)
        return float(completion)

    register("limited", judge)
    scores = await scores_of({"limited": {"max_concurrent": 3}}, *map(str, range(40)))
    assert [score.total for score in scores] == list(range(40))
    assert (most, len(refused)) == (3, 5)


@pytest.mark.parametrize(("text", "waited"), [("", [1, 2, 4, 8]), ("7", [7, 7, 7, 7]), ("1e9", [])])
async def test_the_back_off_doubles_up_to_the_last_retry_and_a_wait_that_is_too_long_is_an_error(
    scores_of: Scores, register: Register, monkeypatch: pytest.MonkeyPatch, text: str, waited: list[float]
) -> None:
    waits: list[float] = []

    async def wait(seconds: float) -> None:
        waits.append(seconds)

    async def refuses(completion: str) -> float:
        raise RetryError("overloaded", retry_after=float(completion) if completion else None)

    monkeypatch.setattr("hocket.rewards.runners.asyncio.sleep", wait)
    monkeypatch.setattr("hocket.rewards.runners._JITTER.uniform", lambda low, high: high)
    register("refuses", refuses)
    (score,) = await scores_of({"refuses": {"retries": 4}}, text)
    assert str(score.error).startswith("refuses: RetryError: overloaded")
    assert waits == waited


@pytest.mark.usefixtures("one_worker")
async def test_what_a_call_takes_is_told_without_queues_and_back_offs(
    scorer_of: Scorers, register: Register, monkeypatch: pytest.MonkeyPatch
) -> None:
    time, refused = fakes.Clock(), list[str]()

    def passes(seconds: float) -> float:
        time.now += seconds
        return 1.0

    async def wait(seconds: float) -> None:
        passes(1000.0)

    async def refuses_once(completion: str) -> float:
        passes(2.0)
        if not refused:
            refused.append(completion)
            raise RetryError("overloaded")
        return 1.0

    class Queues:
        def __init__(self) -> None:
            self.call_seconds = clock()

        async def __call__(self, completion: str) -> float:
            passes(100.0)  # it waits for others
            with clocked(self.call_seconds):
                return passes(5.0)

    monkeypatch.setattr("hocket.rewards.runners.time", time)
    monkeypatch.setattr("hocket.rewards.runners.asyncio.sleep", wait)
    asks = lambda *_: passes(3.0) and [Score(total=1.0)]  # noqa: E731
    monkeypatch.setattr(Workers, "_worker", lambda workers: SimpleNamespace(ask=asks))
    register("refuses_once", refuses_once)
    register("queues", Queues)
    register("inline", lambda completion: passes(4.0))
    functions = {"refuses_once": {"max_concurrent": 1}, "queues": 1.0, "inline": 1.0, "lexicon": 1.0}
    scorer = scorer_of(functions)
    assert [one.error for one in await scorer.score_group([make_rollout()] * 3)] == [None] * 3
    taken = {name: list(seconds) for name, seconds in scorer._calls.seconds.items()}
    assert taken == {"refuses_once": [2.0] * 4, "queues": [5.0] * 3, "inline": [4.0] * 3, "lexicon": [3.0] * 3}


@pytest.mark.parametrize(
    ("specs", "totals"),
    [
        # values: right 1 0 0 1, long 0.5 3 −1 0
        ({"right": 1.0, "long": 1.0}, [1.5, 3.0, -1.0, 1.0]),
        ({"right": {"gate": True}, "long": 1.0}, [0.5, 0.0, -1.0, 0.0]),  # only unlocks; what costs still costs
        ({"right": {"gate": True, "weight": 2}, "long": 1.0}, [2.5, 0.0, -1.0, 2.0]),
        ({"right": 1.0, "long": {"clip": [0, 1]}}, [1.5, 1.0, 0.0, 1.0]),
        # mean 0.625, deviation √(8.6875 / 3) = 1.7017
        ({"right": 0.0, "long": {"normalize": True, "weight": 2}}, [-0.1469, 2.7913, -1.9098, -0.7345]),
    ],
)
async def test_gates_limits_and_normalized_values(
    scores_of: Scores, register: Register, specs: dict[str, Any], totals: list[float]
) -> None:
    register("right", lambda completion: float(completion.split()[0]))
    register("long", lambda completion: float(completion.split()[1]))
    scores = await scores_of(specs, "1 0.5", "0 3", "0 -1", "1 0")
    assert [score.total for score in scores] == pytest.approx(totals, abs=6e-5)  # as they are rounded here
    assert [score.parts["long"] for score in scores] == [0.5, 3.0, -1.0, 0.0]  # as they were returned


@pytest.mark.parametrize(
    ("texts", "spec", "error"),
    [
        (["0.1"] * 3, {"normalize": True}, ""),
        (["5"], {"normalize": True}, ""),
        (["1e308"] * 2, {"normalize": True}, "the weighted sum is "),
        (["1e308"], {}, "the weighted sum is 1e+308, and neither it nor a value may be beyond ±1e+30"),
        (["1e308"], {"weight": 0.0}, "the weighted sum is 0.0, and neither it nor a value may be beyond ±1e+30"),
    ],
)
async def test_equal_values_and_too_large_ones_are_no_accident_of_normalizing(
    scores_of: Scores, register: Register, texts: list[str], spec: dict[str, Any], error: str
) -> None:
    register("value", lambda completion: float(completion))
    no_value = pytest.approx(0.0, abs=1e-9)  # an ulp of 0.1 over 1e-6 is 1.4e-11
    for one in await scores_of({"value": spec}, *texts):
        assert str(one.error).startswith(error) if error else one.total == no_value


async def test_a_value_that_is_too_large_spoils_no_other_one_of_its_group(
    scores_of: Scores, register: Register
) -> None:
    register("value", lambda completion: float(completion))
    spoiled, *others = await scores_of({"value": {"normalize": True}}, "1e308", "1", "3")
    assert "±1e+30" in str(spoiled.error)
    high = 1 / (2**0.5 + 1e-6)  # of mean 2, deviation √2
    assert [one.total for one in others] == pytest.approx([-high, high], rel=1e-12)


def test_a_score_has_no_endless_parts() -> None:
    parts = {f"part {number}": 0.0 for number in range(1000)}
    (score,) = compose({"mine": RewardSpec()}, {"mine": [Score(total=1.0, parts=parts)]})
    assert score.error == "its rewards have 1,001 parts, more than 1,000: name fewer"
