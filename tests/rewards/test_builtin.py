import statistics
from collections.abc import Callable
from typing import Any

import pytest

from hocket.rewards import RewardScorer
from hocket.types import Rollout

Make = Callable[..., Rollout]
Scorers = Callable[..., RewardScorer]


@pytest.mark.parametrize(
    ("completion", "answer", "value"),
    [("abcd", "abcd", 1.0), (" abcd\n", "abcd ", 1.0), ("abdc", "abcd", 0.0), ("Abcd", "abcd", 0.0), ("", "abcd", 0.0)],
)
async def test_exact_match_ignores_only_the_spaces_around(
    scorer_of: Scorers, make_rollout: Make, completion: str, answer: str, value: float
) -> None:
    score = await scorer_of({"exact_match": 1.0}).score(make_rollout(completion, answer=answer))
    assert (score.total, score.error) == (value, None)


async def test_exact_match_without_an_answer_is_an_error_and_not_zero(scorer_of: Scorers, make_rollout: Make) -> None:
    score = await scorer_of({"exact_match": 1.0}).score(make_rollout(answer=None))
    assert score.error is not None
    assert score.error.startswith("exact_match: ValueError: the prompt has no answer")


@pytest.mark.parametrize(
    ("options", "num_sampled", "value"),
    [
        ({"target": 10}, 10, 0.0),
        ({"target": 10}, 7, -0.3),
        ({"target": 10}, 12, -0.2),
        ({"target": 10}, 35, -1.0),
        ({"target": 8, "unit": "characters"}, 10, -0.5),  # the text "abcd" has 4 of 8 characters
    ],
)
async def test_length_is_the_relative_distance_to_the_target(
    scorer_of: Scorers, make_rollout: Make, options: dict[str, Any], num_sampled: int, value: float
) -> None:
    score = await scorer_of({"length": options}).score(make_rollout(num_sampled=num_sampled))
    assert score.total == pytest.approx(value)


async def test_length_with_a_target_of_nothing_is_an_error(scorer_of: Scorers, make_rollout: Make) -> None:
    score = await scorer_of({"length": {"target": 0}}).score(make_rollout())
    assert score.error is not None
    assert "target must be at least 1" in score.error


@pytest.mark.parametrize(
    ("completion", "value"),
    [
        ("<think>d is last</think>abcd", 1.0),
        ("\n<think>\nb\nc\n</think>\n\nabcd", 1.0),
        ("abcd", 0.0),
        ("<think>  </think>abcd", 0.0),
        ("<think>x</think> \n", 0.0),
        ("<think>x", 0.0),
        ("x</think>abcd", 0.0),
        ("well <think>x</think>abcd", 0.0),
        ("<think>x</think>abcd<think>y</think>z", 0.0),
        ("<think><think>x</think>abcd", 0.0),
        ("<think>x</think></think>abcd", 0.0),
    ],
)
async def test_think_format_wants_one_thought_and_then_an_answer(
    scorer_of: Scorers, make_rollout: Make, completion: str, value: float
) -> None:
    assert (await scorer_of({"think_format": 1.0}).score(make_rollout(completion))).total == value


async def test_env_is_what_the_environment_gave_and_an_error_where_there_is_none(
    scorer_of: Scorers, make_rollout: Make
) -> None:
    scorer = scorer_of({"env": 2.0})
    assert (await scorer.score(make_rollout("x", reward=0.25))).total == 0.5
    assert "set env.name" in ((await scorer.score(make_rollout("x"))).error or "")
    assert "not a finite number" in ((await scorer.score(make_rollout("x", reward=float("nan")))).error or "")


async def test_random_depends_on_the_rollout_and_the_seed_only(scorer_of: Scorers, make_rollout: Make) -> None:
    async def draw(seed: int, text: str) -> list[float]:
        scorer = scorer_of({"random": {"seed": seed}})
        return [(await scorer.score(make_rollout(text, id=f"step 1/{i}/0"))).total for i in range(2000)]

    first = await draw(0, "abcd")
    assert first == await draw(0, "something else")
    assert set(first) == {0.0, 1.0}
    assert statistics.fmean(first) == pytest.approx(0.5, abs=0.05)  # 4.5 standard deviations
    assert statistics.fmean(a == b for a, b in zip(first, await draw(1, "abcd"), strict=True)) < 0.6


async def test_math_compares_values_after_the_thought(scorer_of: Scorers, make_rollout: Make) -> None:
    scorer = scorer_of({"math": 1.0}, timeout_s=120)
    right = [
        ("72", "The answer is 72."),
        ("1/2", r"so $\frac{2}{4}$"),
        (r"\frac{3}{4}", "0.75"),
        (r"$\frac{3}{4}$", r"\boxed{\frac{6}{8}}"),
        ("1,000", "1000"),
        ("18", r"It costs \$18 in all"),
        ("18", "that is $18."),
        ("5", r"<think>4, no, \boxed{6}</think> It is \boxed{5}."),
    ]
    wrong = [
        ("72", "The answer is 71."),
        ("72", "seventy-two"),
        ("6", r"<think>4, no, \boxed{6}</think> It is \boxed{5}."),
        ("5", "<think>it is 5"),
        ("2", ""),
    ]
    for answer, completion in right:
        score = await scorer.score(make_rollout(completion, answer=answer))
        assert (score.total, score.error) == (1.0, None), (answer, completion)
    for answer, completion in wrong:
        score = await scorer.score(make_rollout(completion, answer=answer))
        assert (score.total, score.error) == (0.0, None), (answer, completion)


async def test_math_that_takes_for_ever_is_an_error_and_the_next_one_is_scored(
    scorer_of: Scorers, make_rollout: Make
) -> None:
    scorer = scorer_of({"math": 1.0}, timeout_s=1)
    slow = await scorer.score(make_rollout("9^9^9^9^9", answer="9^9^9^9"))
    assert slow.error == "math: no result within 1 s; its worker process was ended"
    scorer._timeout_s = 120  # this one is not about the speed of the machine
    assert (await scorer.score(make_rollout("7", answer="7"))).total == 1.0
