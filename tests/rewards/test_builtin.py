import json
import statistics
from typing import Any

import pytest

from hocket.rewards import builtin
from hocket.rewards.base import REWARDS
from support.episodes import Scorers, make_rollout


@pytest.mark.parametrize(
    ("name", "arguments", "value"),
    [
        ("exact_match", ("abcd", "abcd"), 1.0),
        ("exact_match", (" abcd\n", "abcd "), 1.0),
        ("exact_match", ("abdc", "abcd"), 0.0),
        ("exact_match", ("Abcd", "abcd"), 0.0),
        ("exact_match", ("", "abcd"), 0.0),
        ("position_match", ("dcba", "dcba"), 1.0),
        ("position_match", ("dcab", "dcba"), 0.5),
        ("position_match", ("dcb", "dcba"), 0.75),
        ("position_match", ("dcbaz", "dcba"), 0.8),
        ("position_match", ("", "dcba"), 0.0),
        ("position_match", ("", ""), 0.0),
        ("think_format", ("<think>d is last</think>abcd",), 1.0),
        ("think_format", ("\n<think>\nb\nc\n</think>\n\nabcd",), 1.0),
        ("think_format", ("abcd",), 0.0),
        ("think_format", ("<think>  </think>abcd",), 0.0),
        ("think_format", ("<think>x</think> \n",), 0.0),
        ("think_format", ("<think>x",), 0.0),
        ("think_format", ("x</think>abcd",), 0.0),
        ("think_format", ("well <think>x</think>abcd",), 0.0),
        ("think_format", ("<think>x</think>abcd<think>y</think>z",), 0.0),
        ("think_format", ("<think>x</think></think>abcd",), 0.0),
        ("repetition", ("a b c a b c", 3), -1 / 4),  # abc bca cab abc
        ("repetition", ("no no No no no", 1), -4 / 5),
        ("repetition", ("all words differ here", 3), 0.0),
        ("repetition", ("two words", 3), 0.0),
        ("regex", ("so it is 42.", r"\d+"), 1.0),
        ("regex", ("so it is 42.", r"\d+", True), 0.0),
        ("regex", ("a\nb", "a.b", True), 1.0),
        ("regex", ("none", r"\d"), 0.0),
    ],
)
def test_the_values_of_the_page(name: str, arguments: tuple[Any, ...], value: float) -> None:
    assert getattr(builtin, name)(*arguments) == pytest.approx(value)


def test_without_an_answer_there_is_no_match() -> None:
    for match in (builtin.exact_match, builtin.position_match):
        with pytest.raises(ValueError, match=r"the prompt has no answer to compare with; set data\.answer_column"):
            match("abcd", None)


def test_length_is_the_relative_distance_to_the_target() -> None:
    for num_sampled, value in ((10, 0.0), (7, -0.3), (12, -0.2), (35, -1.0)):
        assert builtin.LengthReward(10)("abcd", (1,) * num_sampled) == pytest.approx(value)
    assert builtin.LengthReward(8, unit="characters")("abcd", (1,) * 10) == -0.5  # 4 of 8 characters
    for num_sampled, value in ((0, 0.0), (5, 0.5), (10, 1.0), (35, 1.0)):  # longer is better up to 10
        assert builtin.LengthReward(up_to=10)("abcd", (1,) * num_sampled) == value
    for target, up_to in ((0, 0), (3, 3)):
        with pytest.raises(ValueError, match="target or up_to must be at least 1"):
            builtin.LengthReward(target, up_to)


def test_what_may_take_for_ever_has_a_deadline() -> None:
    assert {REWARDS.get(name).runs for name in ("regex", "json_schema", "math")} == {"worker"}


SCHEMA = {"type": "object", "required": ["n"], "properties": {"n": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("completion", "value"),
    [
        ('{"n": 1}', 1.0),
        ('<think>{"n": 1}</think>{"n": "one"}', 0.0),
        ('<think>hm</think>Here:\n```json\n{"n": "x"}\n```\nno,\n```json\n{"n": 2}\n```\nI hope', 1.0),
        ('<think>{"n": 1}', 0.0),
        ('{"n": 1', 0.0),
        ("[" * 100_000, 0.0),
        ('{"n": NaN}', 0.0),
        ("", 0.0),
    ],
)
def test_json_schema_wants_json_as_the_option_or_the_row_says(completion: str, value: float) -> None:
    for schema in (SCHEMA, json.dumps(SCHEMA)):
        assert builtin.json_schema(completion, {}, schema=schema) == value
        assert builtin.json_schema(completion, {"schema": schema}) == value


@pytest.mark.parametrize(
    ("completion", "value"),
    [
        ("<answer>(3 + 5) * 7 - 1</answer>", 1.0),
        ("<answer>1</answer> no, <answer>7 * (5 + 3) - 1</answer>", 1.0),
        ("<answer>-1 + 7 * (5 + 3)</answer>", 1.0),
        ("7 * (5 + 3) - 1", 0.0),  # no <answer>
        ("<answer>55</answer>", 0.1),
        ("<answer>(3 + 5) * 7 - 1 * 1</answer>", 0.1),  # one number twice
        ("<answer>5 * 7 + 3 - 1</answer>", 0.1),  # another value
        ("<answer>1 / 0 + 3 + 5 + 7</answer>", 0.1),
        ("<answer>__import__('os').getpid()</answer>", 0.1),
        ("<answer>9 ** 9 ** 9 ** 9</answer>", 0.1),
        ("<answer>" + "(" * 10_000 + "</answer>", 0.1),
        ("<answer>(3 + 5</answer>", 0.1),
        ("<answer>1e308 * 1e308 - 1e308 * 1e308</answer>", 0.1),
    ],
)
def test_countdown_wants_each_number_once_and_the_target(completion: str, value: float) -> None:
    assert builtin.countdown(completion, "55", {"nums": [1, 3, 5, 7]}, format_score=0.1) == value
    assert builtin.countdown(completion, "55", {"nums": "[1, 3, 5, 7]"}, format_score=0.1) == value
    assert builtin.countdown(completion, "55", {"nums": ["1", "3", "5.0", "7"]}, format_score=0.1) == value
    with pytest.raises(ValueError, match="could not convert string to float: 'one'"):
        builtin.countdown(completion, "55", {"nums": ["one", 3, 5, 7]})
    with pytest.raises(ValueError, match="no list of numbers in the column 'given'"):
        builtin.countdown(completion, "55", {"nums": [1]}, numbers="given")


async def test_env_is_the_environments_reward_or_an_error(scorer_of: Scorers) -> None:
    scorer = scorer_of({"env": 2.0})
    assert (await scorer.score(make_rollout("x", reward=0.25))).total == 0.5
    assert "set env.name" in ((await scorer.score(make_rollout("x"))).error or "")
    assert "not a finite number" in ((await scorer.score(make_rollout("x", reward=float("nan")))).error or "")


def test_random_depends_on_the_rollout_and_the_seed_only() -> None:
    def draw(seed: int, text: str) -> list[float]:
        return [builtin.random(make_rollout(text, id=f"step 1/{i}/0"), seed) for i in range(2000)]

    first = draw(0, "abcd")
    assert first == draw(0, "something else")
    assert set(first) == {0.0, 1.0}
    assert statistics.fmean(first) == pytest.approx(0.5, abs=0.05)  # 4.5 standard deviations
    assert statistics.fmean(a == b for a, b in zip(first, draw(1, "abcd"), strict=True)) < 0.6


@pytest.mark.parametrize(
    ("value", "answer", "completion"),
    [
        (1.0, "72", "The answer is 72."),
        (1.0, "1/2", r"so $\frac{2}{4}$"),
        (1.0, r"\frac{3}{4}", "0.75"),
        (1.0, r"$\frac{3}{4}$", r"\boxed{\frac{6}{8}}"),
        (1.0, "1,000", "1000"),
        (1.0, "18", r"It costs \$18 in all"),
        (1.0, "18", "that is $18."),
        (1.0, "1.5e-3", "0.0015"),
        (1.0, "0.0015", "about 1.5e-3."),
        (1.0, "6.02E3", r"$6.02 \times 10^{3}$"),
        (1.0, "-2e5", "$-2e5$"),
        (0.0, "1.5e-3", "1.5"),
        (1.0, "2e", "$2e$"),  # Euler's
        (0.0, "10", "1,000e5"),
        (1.0, "5", r"<think>4, no, \boxed{6}</think> It is \boxed{5}."),
        (0.0, "72", "The answer is 71."),
        (0.0, "72", "seventy-two"),
        (0.0, "6", r"<think>4, no, \boxed{6}</think> It is \boxed{5}."),
        (0.0, "5", "<think>it is 5"),
        (0.0, "2", ""),
    ],
)
def test_math_compares_values_after_the_thought(value: float, answer: str, completion: str) -> None:
    assert builtin.math(completion, answer) == value
