"""config/last_word.py: the rows and the reward of config/smollm2_last_word.yaml."""

import itertools
import re
from pathlib import Path
from typing import Any

import pytest

from hocket.common.registry import load_plugin

LAST_WORD = load_plugin(str(Path(__file__).parents[2] / "config" / "last_word.py"))


def rows(split: str, number: int) -> list[dict[str, Any]]:
    return list(itertools.islice(LAST_WORD.last_word(split, 0), number))


def text_of(row: dict[str, Any]) -> str:
    return str(re.fullmatch(r'Repeat the last word of this text: "([a-z\' -]+)"', row["prompt"]).group(1))  # type: ignore[union-attr]


def test_a_row_has_a_text_of_twelve_to_eighteen_words_and_its_last_one_as_answer() -> None:
    texts = [text_of(row) for row in rows("train", 500)]
    assert {len(text.split()) for text in texts} == {*range(12, 19)}
    assert [row["answer"] for row in rows("train", 500)] == [text.split()[-1] for text in texts]


def test_the_rows_of_a_seed_are_always_the_same_and_those_of_another_seed_differ() -> None:
    assert rows("train", 50) == rows("train", 50)
    assert rows("train", 50) != list(itertools.islice(LAST_WORD.last_word("train", 1), 50))


def test_held_out_texts_are_from_other_paragraphs() -> None:
    held_out = {text_of(row) for row in rows("test", 500)}
    assert len(held_out) > 400
    both = held_out.intersection(text_of(row) for row in rows("train", 20_000))
    assert len(both) < 5  # some sentences stand in two paragraphs; the config leaves such rows out


def test_always_answering_with_the_commonest_word_is_seldom_right() -> None:
    answers = [row["answer"] for row in rows("test", 1000)]
    assert max(map(answers.count, answers)) < 100


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("re-raised", 1),
        ('The last word is "Re-raised".', 1),
        ("re-raised at", 0),
        ("raised", 0),
        ("", 0),
    ],
)
def test_a_completion_is_right_if_its_last_word_is_the_answer(completion: str, reward: float) -> None:
    assert LAST_WORD.ends_with_it(completion, "re-raised") == reward
