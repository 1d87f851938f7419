"""Tests of programs that any program would pass, or none, are errors of the row, not scores."""

from typing import Any

import pytest

from hocket.extras.code import reward as rewards_of_code
from hocket.extras.code.reward import code
from hocket.rewards.base import REWARDS

ADDS = "```python\nprint(int(input()) + 1)\n```"


@pytest.mark.parametrize(
    ("test", "problem"),
    [
        ({"input": "3", "output": ["4"]}, r"test 2 of 2 in the column 'tests': its output must be text or a number"),
        ({"input": [3], "output": "4"}, "its input must be text or a number, got \\[3\\]"),
        ({"input": "3"}, "its output must be text or a number, got None"),
        (["assert f(3) == 4"], "must be text or an object with input and output"),  # an expression: always passed
        (5, "must be text or an object with input and output, got 5"),
        ({"input": "3", "output": "4", "fn_name": "f"}, "calls a function, .*: write it as an assert"),  # APPS, PRIME
        ({"input": "3", "output": "4", "testtype": "functional"}, "calls a function"),  # LiveCodeBench
    ],
)
def test_a_test_that_says_nothing_of_a_program_is_an_error_before_any_program_runs(
    test: Any, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rewards_of_code, "run", None)
    with pytest.raises(ValueError, match=problem):
        code(ADDS, {"tests": [{"input": "1", "output": "2"}, test]})
    with pytest.raises(ValueError, match=problem):
        code("no program", {"tests": [{"input": "1", "output": "2"}, test]})


def test_numbers_stand_for_their_text_and_a_test_of_a_program_may_say_so() -> None:
    tests = [{"input": 3, "output": 4, "testtype": "stdin"}, {"input": "-1", "output": "0", "fn_name": None}]
    assert code(ADDS, {"tests": tests}, sandbox="limits_only").total == 1.0


def test_a_program_that_may_run_for_ever_has_a_deadline() -> None:
    assert REWARDS.get("code").runs == "worker"
