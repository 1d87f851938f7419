import itertools
from typing import Any

import pytest

from hocket.data.tasks import sort
from hocket.errors import DataError


def rows(split: str, num: int = 4000, seed: int = 0) -> list[dict[str, Any]]:
    return list(itertools.islice(sort(split, seed), num))


def test_the_answer_is_the_letters_in_order() -> None:
    for row in rows("train") + rows("test"):
        letters = row["prompt"].removeprefix("Sort: ")
        assert row["answer"] == "".join(sorted(letters))
        assert 4 <= len(letters) == len(set(letters)) <= 6


def test_three_of_four_demonstrations_have_two_letters_swapped() -> None:
    wrong = 0
    for row in rows("train"):
        different = [i for i, (a, b) in enumerate(zip(row["answer"], row["response"], strict=True)) if a != b]
        assert len(different) in (0, 2)
        assert sorted(row["response"]) == list(row["answer"])
        wrong += bool(different)
    assert wrong / 4000 == pytest.approx(0.75, abs=0.03)  # 4 standard deviations


@pytest.mark.parametrize("seed", [0, 1])
def test_no_held_out_answer_is_ever_trained_on(seed: int) -> None:
    train = {row["answer"] for row in rows("train", 50_000)}
    test = {row["answer"] for row in rows("test", 5_000, seed=seed)}
    assert train
    assert test
    assert not train & test


def test_the_same_seed_gives_the_same_rows() -> None:
    assert rows("train", 100) == rows("train", 100)
    assert rows("train", 100) != rows("train", 100, seed=1)


def test_there_is_no_third_split() -> None:
    with pytest.raises(DataError, match=r"splits train and test, not 'dev'"):
        next(sort("dev", 0))
