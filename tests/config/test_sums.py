"""config/sums.py: the rows and the reward of config/smollm2_sums.yaml."""

import itertools
import re
from pathlib import Path

import pytest

from hocket.common.registry import load_plugin

SUMS = load_plugin(str(Path(__file__).parents[2] / "config" / "sums.py"))


def pairs(split: str, number: int) -> list[frozenset[str]]:
    rows = itertools.islice(SUMS.sums(split, 0), number)
    return [frozenset(re.findall(r"\d+", row["prompt"])) for row in rows]


def test_a_row_asks_for_a_sum_of_two_numbers_of_two_digits_and_has_it_as_answer() -> None:
    for row in itertools.islice(SUMS.sums("train", 0), 200):
        a, b = re.fullmatch(r"What is (\d\d) \+ (\d\d)\? Answer with the number only\.", row["prompt"]).groups()  # type: ignore[union-attr]
        assert row["answer"] == str(int(a) + int(b))


def test_no_held_out_sum_is_trained_in_either_order_of_its_numbers() -> None:
    held_out = set(pairs("test", 1000))
    assert len(held_out) > 300
    assert held_out.isdisjoint(pairs("train", 20_000))


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("139", 1.0),
        ("64 + 75 = 139.", 1.0),
        ("139 is 64 + 75", 0.0),  # the last number counts, or a list of many would be right
        ("1390", 0.0),
        ("0139", 0.0),
        ("64 - 203 = -139", 0.0),
        ("a hundred and thirty-nine", 0.0),
        ("", 0.0),
    ],
)
def test_a_completion_is_right_if_its_last_number_is_the_answer(completion: str, reward: float) -> None:
    assert SUMS.last_number(completion, "139") == reward
