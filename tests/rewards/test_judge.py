import asyncio
import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hocket.errors import ConfigError, RewardError
from hocket.rewards import RewardScorer, judge, scorer
from hocket.rewards.judge import verdict
from hocket.types import Rollout
from service import Answer, Headers, Service

Make = Callable[..., Rollout]
Scorers = Callable[..., RewardScorer]

LIES = (  # what a judge writes
    '{"reason": "cut o',
    '{"reason": "so", "score": "8"}',
    '{"reason": "so", "score": 11}',
    '{"reason": "so", "score": NaN}',
    '{"reason": "so", "score": true}',
    '{"score": 9} is what the answer asks for; {"score": 2}',
    '{"reason": "it says "{"score": 9}" but", "points": 2}',
    "a clear 8 out of 10",
    "",
)


def completion(text: Any, prompt_tokens: Any = 100, completion_tokens: Any = 20) -> Answer:
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
    return 200, {}, {"choices": [{"message": {"role": "assistant", "content": text}}], "usage": usage}


def functions(service: Service, **options: Any) -> dict[str, Any]:
    options = {"base_url": f"{service.url}/v1", "model": "m", "rubric": "Is it sorted?", "key_env": None} | options
    return {"judge": options}


class FakeJudge:
    """Gives each completion, a number, that number as its score; errs, stalls and lies as often as it is told."""

    def __init__(self, errors: float, stalls: float, lies: float, latency_s: float) -> None:
        self.random, self.latency_s = random.Random(0), latency_s
        self.errors, self.stalls, self.lies = errors, errors + stalls, errors + stalls + lies

    async def __call__(self, headers: Headers, body: Any) -> Answer | None:
        chance = self.random.random()
        if chance < self.stalls and chance >= self.errors:
            return None
        await asyncio.sleep(self.latency_s * self.random.uniform(0.5, 1.5))
        if chance < self.errors:
            kinds = [(500, {}, "oops"), (503, {}, {}), (429, {"retry-after": "1"}, {"error": {"message": "slow down"}})]
            return self.random.choice(kinds)
        if chance < self.lies:
            return self.random.choice([completion(self.random.choice(LIES)), (200, {}, "{"), completion(None)])
        asked = body["messages"][0]["content"].split("<answer>\n")[1].split("\n</answer>")[0]
        return completion(json.dumps({"reason": "it says so", "score": int(asked) % 11}))


async def test_no_score_is_lost_no_limit_is_passed_and_the_second_run_needs_no_call(
    scorer_of: Scorers, make_rollout: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judge, "MINUTE_S", 1.0)
    monkeypatch.setattr(scorer, "BACK_OFF_S", 0.1)
    limits = {"requests_per_minute": 100, "max_concurrent": 16, "timeout_s": 0.5, "cache": str(tmp_path / "cache.db")}
    async with Service(FakeJudge(errors=0.05, stalls=0.02, lies=0.05, latency_s=0.02)).open() as service:
        for _ in range(2):
            rewards = scorer_of(functions(service, **limits), timeout_s=0.01)
            scores = await asyncio.gather(*(rewards.score(make_rollout(str(i))) for i in range(200)))
            assert [score.error for score in scores if score.error] == []
            assert [score.total for score in scores] == pytest.approx([i % 11 / 10 for i in range(200)])
            asked = len(service.arrivals)
    assert asked > 200
    assert sum(score.parts["judge/calls"] for score in scores) == 0
    assert service.most_within(1) <= 100
    assert service.most <= 16


async def test_several_judges_are_averaged_and_a_retry_asks_only_the_one_that_lied(
    scorer_of: Scorers, make_rollout: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scorer, "BACK_OFF_S", 0.01)
    said = {"a": iter(["8", "2"]), "b": iter([True, "6"])}
    asked: list[Any] = []

    async def answer(headers: Headers, body: Any) -> Answer:
        asked.append((headers["authorization"], body))
        return completion(f'Here it is: {{"reason": "so", "score": {next(said[body["model"]])}}}')

    monkeypatch.setenv("MY_KEY", "hush")
    options = {"model": ["a", "b", "a"], "key_env": "MY_KEY", "request": {"temperature": 0}, "price": [1.0, 10.0]}
    async with Service(answer).open() as service:
        score = await scorer_of(functions(service, **options)).score(make_rollout("so [it] {is}", answer=None))
    assert (score.total, score.parts["judge/1"], score.parts["judge/2"], score.parts["judge/3"]) == pytest.approx(
        ((0.8 + 0.6 + 0.2) / 3, 0.8, 0.6, 0.2)
    )
    paid = {name: score.parts[f"judge/{name}"] for name in ("calls", "tokens", "dollars")}
    assert paid == pytest.approx({"calls": 4, "tokens": 4 * 120, "dollars": 4 * (100 * 1 + 20 * 10) / 1e6})
    key, body = asked[0]
    schema = body.pop("response_format")["json_schema"]["schema"]["properties"]["score"]
    content = body.pop("messages")[0]["content"]
    assert (key, schema) == ("Bearer hush", {"type": "number", "minimum": 0.0, "maximum": 10.0})
    assert body == {"model": "a", "temperature": 0, "max_completion_tokens": 512}
    for part in ("Sort: dbca", "<reference>\nnone\n", "<answer>\nso [it] {is}\n", "Is it sorted?", "from 0 to 10"):
        assert part in content


async def test_the_same_completion_is_asked_for_once_even_while_it_is_asked_for(
    scorer_of: Scorers, make_rollout: Make
) -> None:
    async with Service(FakeJudge(errors=0, stalls=0, lies=0, latency_s=0.05)).open() as service:
        scores = await scorer_of(functions(service)).score_group([make_rollout(text) for text in "7797"])
    assert [score.total for score in scores] == [0.7, 0.7, 0.9, 0.7]
    assert sorted(score.parts["judge/calls"] for score in scores) == [0, 0, 1, 1]


async def test_tokens_are_reserved_for_a_call_and_then_counted_as_the_endpoint_does(
    scorer_of: Scorers, make_rollout: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = [(100, 100), (500, 100), (-(10**9), 10**9), (float("nan"), "many"), (None, 1)]

    async def answer(headers: Headers, body: Any) -> Answer:
        return completion('{"score": 10}', *usage[len(service.arrivals) - 1])

    options = {"template": "{completion}", "max_tokens": 500, "tokens_per_minute": 1000}
    async with Service(answer).open() as service:
        rewards, tokens = scorer_of(functions(service, **options)), []
        for i in range(5):
            if i == 2:  # 200 + 600 fit into a minute, 200 + 600 + 600 don't
                monkeypatch.setattr(judge, "MINUTE_S", 0.5)
            async with asyncio.timeout(judge.MINUTE_S / 2 if i < 2 else None):
                tokens.append((await rewards.score(make_rollout(str(i) * 200))).parts["judge/tokens"])
        late = await scorer_of(functions(service, **options | {"max_tokens": 901})).score(make_rollout("x" * 200))
    assert tokens == [200, 600, 600, 600, 600]  # without a count, 200 bytes are 100 tokens and all 500 are written
    assert [b - a >= 0.5 for a, b in itertools.pairwise(service.arrivals)][1:] == [True] * 3
    assert "a call may take 1001 tokens, but only 1000 are allowed per minute" in str(late.error)


async def test_a_spent_budget_ends_the_run_and_counts_on_after_it(
    scorer_of: Scorers, make_rollout: Make, tmp_path: Path
) -> None:
    async def answer(headers: Headers, body: Any) -> Answer:
        return completion('{"score": 10}', 1000, 0)

    cache, price = str(tmp_path / "cache.db"), [1000.0, 0.0]  # a dollar for each call
    async with Service(answer).open() as service:
        for budget, enough in ((2, "ab"), (3, "abc")):
            rewards = scorer_of(functions(service, price=price, budget=budget, cache=cache))
            for text in enough:
                assert (await rewards.score(make_rollout(text))).total == 1.0
            with pytest.raises(
                RewardError, match=f"has cost {budget}.00 dollars .*cache.db.* budget is {budget}: raise"
            ):
                await rewards.score_group([make_rollout("a"), make_rollout("d")])
    assert len(service.arrivals) == 3


@pytest.mark.parametrize(
    ("answer", "calls", "error"),
    [
        (completion(LIES[1]), 2, 'RetryError: m wrote \'{"reason": "so", "score": "8"}\': its score must be a number'),
        (completion(None), 2, "m wrote '': it must hold one score"),  # and is counted, as it was paid
        ((200, {}, "<html>"), 2, "URL/v1 answered no chat completion: '<html>'"),
        ((429, {"retry-after": "301"}, {"error": {"message": "slow down"}}), 1, "429"),
        (
            (401, {}, {"error": {"message": "who are you?"}}),
            1,
            "AuthenticationError: Error code: 401 - who are you?",
        ),
        ((307, {"location": "http://127.0.0.2/"}, ""), 1, "307"),
        (None, 2, "URL/v1 does not answer: after 0.3 s"),
    ],
)
async def test_what_an_endpoint_answers_instead_of_a_score_is_the_error_of_the_sample(
    scorer_of: Scorers,
    make_rollout: Make,
    monkeypatch: pytest.MonkeyPatch,
    answer: Answer | None,
    calls: int,
    error: str,
) -> None:
    monkeypatch.setattr(scorer, "BACK_OFF_S", 0.01)

    async def say(headers: Headers, body: Any) -> Answer | None:
        return answer

    timeout_s = 60 if answer else 0.3
    async with Service(say).open() as service:
        score = await scorer_of(functions(service, retries=1, timeout_s=timeout_s)).score(make_rollout())
    assert error.replace("URL", service.url) in str(score.error)
    assert len(service.arrivals) == calls


@pytest.mark.parametrize("text", LIES)
def test_a_lie_is_no_verdict(text: str) -> None:
    with pytest.raises(ValueError, match=r"score|delimiter|value|string"):
        verdict(text, 0, 10)


@pytest.mark.parametrize(
    ("text", "score"),
    [('{"score": 0}', 0.0), ('```json\n{"score": 7.5, "reason": "{so}"}\n```', 7.5), ('Well: {"score": 1e1}.', 10.0)],
)
def test_words_around_the_object_do_not_matter(text: str, score: float) -> None:
    assert verdict(text, 0, 10) == score


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale": [1, 1]}, "lowest, highest"),
        ({"budget": 5.0}, "a budget needs the price"),
        ({"budget": 5.0, "price": [1.0, 1.0]}, "a budget needs a cache"),
        ({"key_env": "NO_SUCH_KEY"}, "NO_SUCH_KEY is not set"),
        ({"template": "{compleshun}"}, "compleshun"),
    ],
)
def test_options_that_can_not_work_are_refused(scorer_of: Scorers, options: dict[str, Any], message: str) -> None:
    options = {"base_url": "http://127.0.0.1:1/v1", "model": "m", "rubric": "r", "key_env": None} | options
    with pytest.raises(ConfigError, match=f"reward judge refuses its options: .*{message}"):
        scorer_of({"judge": options})
