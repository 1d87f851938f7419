import asyncio
import contextlib
import math
import re
import sqlite3
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hocket.config import RewardsConfig
from hocket.errors import ConfigError, RewardError
from hocket.extras import judge
from hocket.extras.judge import ranking_in, score_in
from hocket.rewards import runners
from hocket.types import Rollout, Score
from support.batches import scorer_of_all
from support.episodes import Scorers, Scores, make_rollout
from support.service import (
    LIES,
    WRONG_RANKINGS,
    Answer,
    FakeJudge,
    Headers,
    Saying,
    Service,
    completion,
    functions,
    ranked,
    shown,
)

QUIET = FakeJudge()


@pytest.mark.long
@pytest.mark.parametrize("name", ["judge", "judge_ranking"])
async def test_no_score_is_lost_no_limit_is_passed_and_the_second_run_needs_no_call(
    scorer_of: Scorers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, seed: int
) -> None:
    monkeypatch.setattr(runners, "BACK_OFF_S", 0.1)
    limits = {"max_concurrent": 16, "cache": str(tmp_path / "cache.db")}
    limits |= {"timeout_s": 2.0, "retries": 20}  # one of 8 calls has no verdict, or more where the machine is busy
    size = 1 if name == "judge" else 4
    groups = [[make_rollout(str(group * size + i)) for i in range(size)] for group in range(120)]
    values = [i % 11 / 10 for i in range(120)] if name == "judge" else [0, 1 / 3, 2 / 3, 1] * 120
    async with Service(FakeJudge(errors=0.05, stalls=0.02, lies=0.05, seed=seed)).open() as service:
        for _ in range(2):
            rewards = scorer_of(functions(service, name, **limits), timeout_s=0.01)
            scores = sum(await asyncio.gather(*map(rewards.score_group, groups)), ())
            assert [score.error for score in scores if score.error] == []
            assert [score.total for score in scores] == pytest.approx(values)
    assert len(service.arrivals) > 120
    assert sum(score.parts[f"{name}/calls"] for score in scores) == 0
    assert service.most <= 16


async def test_a_call_that_is_refused_for_now_is_made_again_when_the_endpoint_says(scores_of: Scores) -> None:
    busy = (429, {"retry-after": "1"}, "slow down")
    async with Saying(busy, completion('{"score": 7}')).open() as service:
        (score,) = await scores_of(functions(service, retries=1), "x")
    assert (score.total, score.parts["judge/calls"], score.parts["judge/tokens"]) == (0.7, 2, 120)
    first, second = service.arrivals
    assert second - first >= 1


@pytest.mark.parametrize("answers", [True, False])
async def test_a_proxy_between_a_judge_and_this_machine_is_named_in_what_goes_wrong(
    scores_of: Scores, monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    for name in ("NO_PROXY", "no_proxy", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    judge = {"base_url": "http://judge.example/v1", "model": "m", "rubric": "r", "retries": 0, "key_env": None}
    async with Saying((502, {}, "no such host")).open() as proxy:
        monkeypatch.setenv("HTTP_PROXY", proxy.url.replace("//", "//me:word@") if answers else "http://127.0.0.1:9")
        (score,) = await scores_of({"judge": judge}, "abcd")
    through = f"through the proxy HTTP_PROXY={proxy.url if answers else 'http://127.0.0.1:9'}: "
    assert through in (score.error or "")
    assert "; if the proxy does not reach that host, set NO_PROXY=judge.example" in (score.error or "")
    assert "word" not in (score.error or "")


async def test_an_answer_in_the_cache_that_is_no_verdict_is_asked_for_again(scores_of: Scores, tmp_path: Path) -> None:
    verdicts = [f'{{"score": {number}}}' for number in (1, 2, 3, 4)]
    path = tmp_path / "cache.db"
    async with Saying(*map(completion, verdicts)).open() as service, asyncio.timeout(30):
        for number, garbage in enumerate((b"{", b"\xff", b"7", b""), 1):
            (score,) = await scores_of(functions(service, cache=str(path)), "4")
            assert (score.error, score.total) == (None, pytest.approx(number / 10))
            with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as cache:
                spoil = "UPDATE answers SET value = CAST(? AS TEXT) WHERE value = ?"
                assert cache.execute(spoil, (garbage, verdicts[number - 1])).rowcount == 1


async def test_several_judges_are_averaged_and_a_retry_asks_only_the_one_that_lied(
    scores_of: Scores, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runners, "BACK_OFF_S", 0.01)
    for variable in ("OPENAI_API_KEY", "OPENAI_ORG_ID", "OPENAI_PROJECT_ID"):
        monkeypatch.setenv(variable, "of another endpoint")
    monkeypatch.setenv("OPENAI_CUSTOM_HEADERS", "X-Secret: 1")
    monkeypatch.setenv("MY_KEY", "hush-hush")
    options = {"model": ["a", "b", "a"], "key_env": "MY_KEY", "request": {"temperature": 0}, "price": [1.0, 10.0]}
    verdict = 'Here it is: {{"reason": "so", "score": {}}}'.format
    async with Saying(*(completion(verdict(said)) for said in (8, True, 6, 2))).open() as service:
        (score,) = await scores_of(functions(service, **options), "so [it] {is}", answer=None)
    assert score.total == pytest.approx((0.8 + 0.6 + 0.2) / 3)
    paid = {"judge/calls": 4, "judge/tokens": 4 * 120, "judge/dollars": 4 * (100 * 1 + 20 * 10) / 1e6}
    assert score.parts == pytest.approx({"judge": score.total, "judge/1": 0.8, "judge/2": 0.6, "judge/3": 0.2} | paid)
    assert score.note == "judge: so\nso\nso"
    assert [body["model"] for body in service.bodies] == ["a", "b", "b", "a"]
    body, *_ = service.bodies
    schema = body.pop("response_format")["json_schema"]["schema"]["properties"]["score"]
    content = body.pop("messages")[0]["content"]
    assert schema == {"type": "number", "minimum": 0.0, "maximum": 10.0}
    assert body == {"model": "a", "temperature": 0, "max_completion_tokens": 512}
    assert re.search(r"<answer ([0-9a-f]{8})>\nso \[it\] {is}\n</answer \1>", content)  # no answer can know its mark
    for part in ("Sort: dbca", "<reference>\nnone\n", "Is it sorted?", "from 0 to 10"):
        assert part in content
    assert service.headers["authorization"] == "Bearer hush-hush"
    assert not {"openai-organization", "openai-project", "x-secret"} & service.headers.keys()


async def test_a_key_that_a_judge_echoes_is_in_no_error_note_or_cache(
    scores_of: Scores, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MY_KEY", "sk-hush-hush")
    options = {"key_env": "MY_KEY", "retries": 0, "cache": str(tmp_path / "cache.db")}
    verdict = '{"reason": "sk-hush-hush", "score": 7}'
    for answer in (
        completion(verdict),
        completion("sk-hush-hush"),
        (401, {}, "sk-hush-hush"),
        (200, {}, "sk-hush-hush"),
    ):
        async with Saying(answer).open() as service:
            (score,) = await scores_of(functions(service, **options), "x")
        assert "sk-hush" not in f"{score.error} {score.note}"
        assert "[secret]" in f"{score.error} {score.note}"
    assert b"sk-hush" not in (tmp_path / "cache.db").read_bytes()


async def test_the_same_completion_is_asked_for_once_even_while_it_is_asked_for(scores_of: Scores) -> None:
    async with Service(QUIET).open() as service:
        scores = await scores_of(functions(service), "7", "7", "9", "7")
    assert [score.total for score in scores] == [0.7, 0.7, 0.9, 0.7]
    assert sorted(score.parts["judge/calls"] for score in scores) == [0, 0, 1, 1]


async def test_tokens_are_counted_as_the_endpoint_does_or_estimated(scorer_of: Scorers) -> None:
    usage = [(100, 100), (500, 100), (-(10**9), 10**9), (float("nan"), "many"), (None, 1)]
    options = {"template": "{completion}", "max_tokens": 500}
    tokens = []
    async with Saying(*(completion('{"score": 10}', *counts) for counts in usage)).open() as service:
        rewards = scorer_of(functions(service, **options))
        for number in range(5):
            score = await rewards.score(make_rollout(str(number) * 200))
            tokens.append(score.parts["judge/tokens"])
    assert tokens == [200, 600, 600, 600, 600]  # without a count, 200 bytes are 100 tokens and all 500 are written


async def test_a_ranking_gives_each_place_its_value_and_shares_the_cost(scorer_of: Scorers) -> None:
    bodies = []

    async def answer(headers: Headers, body: Any) -> Answer:
        bodies.append(body)
        return completion(ranked(shown(body)) if len(bodies) > 1 else '{"ranking": [1, 2]}')

    def rollouts(*texts: str) -> list[Rollout]:
        return [make_rollout(text, answer=None) for text in texts]

    async with Service(answer).open() as service:
        rewards = scorer_of(functions(service, "judge_ranking", price=[1.0, 10.0], retries=9))
        scores = await rewards.score_group(rollouts("7", "3", "7", "11"))
        again = await rewards.score_group(rollouts("11", "7", "3"))
        (alone,) = await rewards.score_group(rollouts("3"))
    assert [score.total for score in scores] == [0.5, 0.0, 0.5, 1.0]
    paid = {"calls": 2 / 4, "tokens": 2 * 120 / 4, "dollars": 2 * (100 * 1 + 20 * 10) / 1e6 / 4}
    parts = {"judge_ranking": 1.0, "judge_ranking/1": 1.0} | {f"judge_ranking/{name}": it for name, it in paid.items()}
    assert scores[3].parts == pytest.approx(parts)  # the first answer ranked two of three
    assert [(one.total, one.parts["judge_ranking/calls"]) for one in again] == [(1, 0), (0.5, 0), (0, 0)]
    assert (alone.total, len(bodies)) == (0.5, 2)
    assert scores[3].note == f"judge_ranking: as answer {shown(bodies[1]).index(11) + 1}: so"
    content, form = bodies[0]["messages"][0]["content"], bodies[0]["response_format"]["json_schema"]["schema"]
    three = {"type": "array", "items": {"type": "integer"}, "minItems": 3, "maxItems": 3}
    assert form["properties"]["ranking"] == three
    for part in ("Sort: dbca", "<reference>\nnone\n", "Is it sorted?", "Rank the 3 answers", "all answers, 1 to 3"):
        assert part in content


async def test_where_an_answer_stands_is_drawn_by_content_and_turned_round_for_the_next_judge(
    scorer_of: Scorers,
) -> None:
    async with Saying(completion('{"ranking": [1, 2, 3, 4, 5]}')).open() as service:
        rewards = scorer_of(functions(service, "judge_ranking", model=["m", "m"]))
        for group in range(40):
            scores = await rewards.score_group([make_rollout(str(10 * group + i)) for i in range(5)])
            assert [score.total for score in scores] == [0.5] * 5
    orders = list(map(shown, service.bodies))
    assert all(orders[i] == orders[i + 1][::-1] for i in range(0, 80, 2))
    assert {order[0] % 10 for order in orders[::2]} == {0, 1, 2, 3, 4}


def counting(folder: Path) -> dict[str, Any]:
    return {"template": "{completion}", "max_tokens": 1, "price": [1e6, 1e6], "cache": str(folder / "cache.db")}


def counted(folder: Path) -> float:
    with contextlib.closing(sqlite3.connect(folder / "cache.db")) as cache:
        return float(cache.execute("SELECT value FROM answers WHERE key = 'dollars'").fetchone()[0])


async def test_a_spent_budget_ends_the_run_and_counts_on_after_it(scorer_of: Scorers, tmp_path: Path) -> None:
    """A call costs a dollar."""
    options: dict[str, Any] = {"price": [0.0, 1e6], "cache": str(tmp_path / "cache.db")}
    async with Saying(completion('{"score": 10}', 1000, 1)).open() as service:
        for budget, enough in ((2, "ab"), (3, "c"), (3.5, "d")):
            rewards = scorer_of(functions(service, budget=budget, **options))
            for text in enough:
                assert (await rewards.score(make_rollout(text))).total == 1.0
            cost = math.ceil(budget)
            spent = f"has cost {cost}.00 dollars .*cache.db.*, its budget is {budget}: raise"
            with pytest.raises(RewardError, match=spent):
                await rewards.score_group([make_rollout(enough[0]), make_rollout("x")])
            assert counted(tmp_path) == len(service.arrivals) == cost
        rewards = scorer_of(functions(service, budget=4, **options))
        assert (await rewards.score(make_rollout("a"))).total == 1.0  # from the cache


@pytest.mark.parametrize("limit", [{}, {"max_concurrent": 3}])
async def test_calls_that_are_made_at_once_do_not_exceed_the_budget_together(
    scorer_of: Scorers, tmp_path: Path, limit: dict[str, Any]
) -> None:
    """A call costs a dollar, and might cost 512: the most tokens of an answer."""
    options: dict[str, Any] = {"price": [0.0, 1e6], "cache": str(tmp_path / "cache.db"), "budget": 11}
    async with Saying(completion('{"score": 10}', 1000, 1)).open() as service:
        rewards = scorer_of(functions(service, **limit, **options))
        calls = (rewards.score(make_rollout(str(number))) for number in range(40))
        scores = await asyncio.gather(*calls, return_exceptions=True)
    made = len(service.arrivals)
    assert made == 11
    assert len([score for score in scores if isinstance(score, RewardError)]) == 40 - made
    assert counted(tmp_path) == made


async def test_calls_whose_costs_fit_into_the_budget_together_do_not_wait(scorer_of: Scorers, tmp_path: Path) -> None:
    """Four calls that may cost 2 dollars each are made at once; each is answered as all are there."""
    all_there = asyncio.Barrier(4)

    async def answer(headers: Any, body: Any) -> Any:
        await all_there.wait()
        return completion('{"score": 10}', 1000, 1)

    options: dict[str, Any] = {"price": [0.0, 1e6], "max_tokens": 2, "budget": 11}
    async with Service(answer).open() as service, asyncio.timeout(60):
        rewards = scorer_of(functions(service, cache=str(tmp_path / "cache.db"), **options))
        await asyncio.gather(*(rewards.score(make_rollout(str(number))) for number in range(4)))
        assert len(service.arrivals) == 4


def ask_many(url: str, folder: Path) -> None:
    """Has a run of its own score 50 completions, of which another run may have some."""

    async def ask() -> None:
        options = {"base_url": url, "model": "m", "rubric": "r", "key_env": None, "max_concurrent": 8}
        specs = {"judge": options | {"price": [1e6, 1e6], "cache": str(folder / "cache.db")}}
        with scorer_of_all(RewardsConfig.model_validate({"functions": specs})) as rewards:
            scores = await asyncio.gather(*(rewards.score(make_rollout(str(number))) for number in range(50)))
        assert [score.total for score in scores] == [number % 11 / 10 for number in range(50)]

    asyncio.run(ask())


async def test_two_runs_that_share_a_cache_at_once_lose_no_answer_and_no_dollar(tmp_path: Path) -> None:
    async with Service(FakeJudge(latency_s=0.01)).open() as service:
        runs = [asyncio.to_thread(ask_many, f"{service.url}/v1", tmp_path) for _ in range(2)]
        await asyncio.gather(*runs)
        calls = len(service.arrivals)
        await asyncio.to_thread(ask_many, f"{service.url}/v1", tmp_path)
    assert 50 <= calls <= 100
    assert len(service.arrivals) == calls
    assert counted(tmp_path) == 120 * calls
    with contextlib.closing(sqlite3.connect(tmp_path / "cache.db")) as cache:
        assert cache.execute("SELECT count(*) FROM answers").fetchone() == (51,)


@pytest.mark.parametrize(
    ("answer", "dollars"),  # a prompt of one byte and one token to write are 1.5 tokens, a dollar for each
    [
        (None, 1.5),
        ((200, {}, {"choices": [], "usage": {"prompt_tokens": 1000, "completion_tokens": 0}}), 1000),
        ((200, {}, "<html>"), 1.5),
        (completion("a clear 8", 7, 1), 8),
        ((401, {}, ""), 0),
        ((503, {}, ""), 0),
    ],
)
def test_a_call_without_a_verdict_is_counted_as_the_endpoint_counts_it_or_as_it_was_estimated(
    scores_of: Scores, tmp_path: Path, answer: Answer | None, dollars: float
) -> None:
    async def ask() -> Score:
        async with Saying(answer).open() as service:
            late_s = 0.3 if answer is None else 60
            (score,) = await scores_of(functions(service, **counting(tmp_path), retries=0, timeout_s=late_s), "x")
            return score

    assert asyncio.run(ask()).error
    assert counted(tmp_path) == dollars


def test_a_cancelled_call_is_counted_though_the_event_loop_ends_with_it(scores_of: Scores, tmp_path: Path) -> None:
    async def ask() -> None:
        async with Saying(None).open() as service:
            task = asyncio.ensure_future(scores_of(functions(service, **counting(tmp_path)), "x"))
            while not service.bodies:
                await asyncio.sleep(0.01)
            assert not task.done()

    asyncio.run(ask())
    assert counted(tmp_path) == 1.5


async def test_a_locked_cache_loses_no_answer_repeats_no_call_and_holds_nothing_else_up(
    scorer_of: Scorers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def scoring(**options: Any) -> Callable[[str], Awaitable[Score]]:
        scorer = scorer_of(functions(service, **counting(tmp_path) | options))
        return lambda text: scorer.score(make_rollout(text))

    path = tmp_path / "cache.db"
    async with Saying(completion('{"score": 7}')).open() as service:
        score = scoring()
        await score("1")
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            waiting = [asyncio.ensure_future(score("7")) for _ in range(2)]
            done, _ = await asyncio.wait(waiting, timeout=0.1)  # the event loop goes on
            assert not done
            other.execute("COMMIT")
        assert [(await one).total for one in waiting] == [0.7, 0.7]
        assert (len(service.arrivals), counted(tmp_path)) == (2, 240)
        monkeypatch.setattr(judge, "LOCKED_S", 0.1)
        score = scoring()
        await score("1")
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(RewardError, match=r"cache .*cache.db can't be used: database is locked"):
                await score("9")
            for cache in (path, tmp_path, tmp_path / "no" / "such.db"):
                error = str((await scoring(cache=str(cache))("9")).error)
                assert f"can't be set up: RewardError: the judge's cache {cache} can't be used" in error
                assert "it must be a file that no other process holds, in a folder that is there" in error


async def test_the_next_rollout_with_a_text_whose_calls_have_failed_does_not_pay_for_them(scorer_of: Scorers) -> None:
    async with Saying(completion("no"), completion('{"score": 7}')).open() as service:
        rewards = scorer_of(functions(service, retries=0))
        assert (await rewards.score(make_rollout("x"))).error
        assert (await rewards.score(make_rollout("x"))).parts["judge/calls"] == 1


@pytest.mark.parametrize(
    ("answer", "calls", "error"),
    [
        (completion(LIES[1]), 2, 'RetryError: m wrote \'{"reason": "so", "score": "8"}\': its score must be a number'),
        (completion(None), 2, "m wrote '': it must hold one score"),  # and is counted, as it was paid
        ((200, {}, "<html>"), 2, "URL/v1 answered no chat completion: '<html>'"),
        ((500, {}, "oops"), 2, "RefusedError: URL/v1/chat/completions answered 500: oops"),
        ((401, {}, {"error": "who are you?"}), 1, 'answered 401: {"error": "who are you?"}'),
    ],
)
async def test_what_an_endpoint_answers_instead_of_a_score_is_the_error_of_the_sample(
    scores_of: Scores, monkeypatch: pytest.MonkeyPatch, answer: Answer, calls: int, error: str
) -> None:
    monkeypatch.setattr(runners, "BACK_OFF_S", 0.01)
    async with Saying(answer).open() as service:
        (score,) = await scores_of(functions(service, retries=1), "abcd")
    assert error.replace("URL", service.url) in str(score.error)
    assert len(service.arrivals) == calls


@pytest.mark.parametrize("read", [partial(score_in, low=0, high=10), partial(ranking_in, count=4)])
@pytest.mark.parametrize("text", LIES + WRONG_RANKINGS)
def test_a_lie_is_no_verdict(read: Callable[[str], Any], text: str) -> None:
    with pytest.raises(ValueError, match=r"score|ranking|delimiter|value|string"):
        read(text)


@pytest.mark.parametrize(
    ("text", "score"),
    [('{"score": 0}', 0.0), ('```json\n{"score": 7.5, "reason": "{so}"}\n```', 0.75), ('Well: {"score": 1e1}.', 1.0)],
)
def test_words_around_the_object_do_not_matter(text: str, score: float) -> None:
    assert score_in(text, 0, 10)[0] == score
    assert ranking_in('Well: {"ranking": [2, 1, 3], "reason": "so"}.', 3) == ([2, 1, 3], "so")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale": [1, 1]}, "lowest, highest"),
        ({"budget": 5.0}, "a budget needs the price"),
        ({"budget": 5.0, "price": [1.0, 1.0]}, "a budget needs .*, and a cache"),
        ({"key_env": "OPENAI_API_KEY"}, "OPENAI_API_KEY is not set"),
        ({"template": "{compleshun}"}, "template: 'compleshun'; its fields are {completion}, {rubric}"),
        ({"template": "{rubric}"}, "template: it lacks {completion}"),
        ({"template": '{completion} {"score": 1}'}, "any other brace is written twice"),
        ({"model": ["m", ""]}, "judge.model.1: String should have at least 1 character"),
        ({"base_url": "127.0.0.1:1"}, r"judge.base_url: must begin with http:// or https:// and a host"),
        ({"requests_per_minute": 600}, "requests_per_minute and tokens_per_minute were removed: set max_concurrent"),
        ({"tokens_per_minute": 512}, r"is asked again after its Retry-After; change the section .*judge"),
        ({"price": [1, -1]}, "judge.price.1: Input should be greater than or equal to 0"),
    ],
)
def test_options_that_can_not_work_are_refused(
    scorer_of: Scorers, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], message: str
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    options = {"base_url": "http://127.0.0.1:1/v1", "model": "m", "rubric": "r", "key_env": None} | options
    with pytest.raises(ConfigError, match=message):
        scorer_of({"judge": options})
    del options["key_env"]
    with pytest.raises(ConfigError, match="needs the option 'key_env': set rewards"):
        scorer_of({"judge": options})
