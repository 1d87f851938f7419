import json
import statistics
from collections.abc import Callable

import pytest

from hocket.rewards import RewardScorer, builtin
from hocket.rewards.base import REWARDS
from hocket.types import Rollout

Make = Callable[..., Rollout]
Scorers = Callable[..., RewardScorer]


def test_exact_match_ignores_only_the_spaces_around_and_needs_an_answer() -> None:
    for completion, answer, value in (
        ("abcd", "abcd", 1.0),
        (" abcd\n", "abcd ", 1.0),
        ("abdc", "abcd", 0.0),
        ("Abcd", "abcd", 0.0),
        ("", "abcd", 0.0),
    ):
        assert builtin.exact_match(completion, answer) == value, completion
    with pytest.raises(ValueError, match=r"the prompt has no answer to compare with; set data\.answer_column"):
        builtin.exact_match("abcd", None)


def test_position_match_is_the_share_of_characters_in_their_places_of_the_longer_text() -> None:
    for completion, value in (("dcba", 1.0), ("dcab", 0.5), ("abcd", 0.0), ("dcb", 0.75), ("dcbaz", 0.8), ("", 0.0)):
        assert builtin.position_match(completion, "dcba") == value, completion
    assert builtin.position_match("", "") == 0.0
    with pytest.raises(ValueError, match=r"set data\.answer_column"):
        builtin.position_match("abcd", None)


def test_length_is_the_relative_distance_to_the_target() -> None:
    for num_sampled, value in ((10, 0.0), (7, -0.3), (12, -0.2), (35, -1.0)):
        assert builtin.LengthReward(10)("abcd", (1,) * num_sampled) == pytest.approx(value)
    assert builtin.LengthReward(8, unit="characters")("abcd", (1,) * 10) == -0.5  # 4 of 8 characters
    for num_sampled, value in ((0, 0.0), (5, 0.5), (10, 1.0), (35, 1.0)):  # longer is better up to 10
        assert builtin.LengthReward(up_to=10)("abcd", (1,) * num_sampled) == value
    for target, up_to in ((0, 0), (3, 3)):
        with pytest.raises(ValueError, match="target or up_to must be at least 1"):
            builtin.LengthReward(target, up_to)


def test_think_format_wants_one_thought_and_then_an_answer() -> None:
    for completion in ("<think>d is last</think>abcd", "\n<think>\nb\nc\n</think>\n\nabcd"):
        assert builtin.think_format(completion) == 1.0
    for completion in (
        "abcd",
        "<think>  </think>abcd",
        "<think>x</think> \n",
        "<think>x",
        "x</think>abcd",
        "well <think>x</think>abcd",
        "<think>x</think>abcd<think>y</think>z",
        "<think><think>x</think>abcd",
        "<think>x</think></think>abcd",
    ):
        assert builtin.think_format(completion) == 0.0, completion


def test_repetition_is_the_share_of_repeated_n_grams() -> None:
    for completion, n, value in (
        ("a b c a b c", 3, -1 / 4),  # abc bca cab abc
        ("no no No no no", 1, -4 / 5),
        ("all words differ here", 3, 0.0),
        ("two words", 3, 0.0),
        ("", 3, 0.0),
    ):
        assert builtin.repetition(completion, n) == pytest.approx(value), completion


def test_regex_searches_or_matches_all() -> None:
    for completion, pattern, full, value in (
        ("so it is 42.", r"\d+", False, 1.0),
        ("so it is 42.", r"\d+", True, 0.0),
        ("a\nb", "a.b", True, 1.0),
        ("none", r"\d", False, 0.0),
    ):
        assert builtin.regex(completion, pattern, full) == value
    assert REWARDS.get("regex").runs == REWARDS.get("json_schema").runs == "worker"  # either may take for ever


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
    assert builtin.json_schema(completion, {}, schema=SCHEMA) == value
    assert builtin.json_schema(completion, {"schema": json.dumps(SCHEMA)}) == value


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
    with pytest.raises(ValueError, match="no list of numbers in the column 'given'"):
        builtin.countdown(completion, "55", {"nums": [1]}, numbers="given")


async def test_env_is_the_environments_reward_or_an_error(scorer_of: Scorers, make_rollout: Make) -> None:
    scorer = scorer_of({"env": 2.0})
    assert (await scorer.score(make_rollout("x", reward=0.25))).total == 0.5
    assert "set env.name" in ((await scorer.score(make_rollout("x"))).error or "")
    assert "not a finite number" in ((await scorer.score(make_rollout("x", reward=float("nan")))).error or "")


def test_random_depends_on_the_rollout_and_the_seed_only(make_rollout: Make) -> None:
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
    assert REWARDS.get("math").runs == "worker"  # which has a deadline
