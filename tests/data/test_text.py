"""Text of tokens, wherever they are cut."""

import random
from typing import Any

import pytest

from hocket.data.text import TextStream, last_characters, text_after, turn_text, without_special
from support.tokenizers import SPECIAL, random_ids, with_byte_fallback, with_merged_bytes

KINDS = {"merged bytes": with_merged_bytes(), "byte fallback": with_byte_fallback()}


@pytest.fixture(params=list(KINDS))
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return KINDS[request.param]


def test_a_character_belongs_to_the_tokens_that_end_it(tokenizer: Any) -> None:
    (ids,) = tokenizer(["the 🤖 is"], add_special_tokens=False)["input_ids"]
    decode = without_special(tokenizer.decode)
    first, later = ids[:-4], ids[-4:]
    assert decode(first) in ("the \ufffd", "the \ufffd\ufffd\ufffd")
    assert decode(ids) == "the 🤖 is"
    assert text_after(decode, first, later) == "🤖 is"
    assert turn_text(tokenizer.decode, first, 0, later) == "🤖 is"
    assert turn_text(tokenizer.decode, first, 2, later) == "🤖 is"
    assert turn_text(tokenizer.decode, first, len(first), later) == "the 🤖 is"


def test_a_broken_character_that_a_prompt_has_is_not_told_again(tokenizer: Any) -> None:
    for end in ("", SPECIAL[0]):  # the text without special tokens ends with it, too
        prompt = tokenizer.encode("STOP \ufffd" + end, add_special_tokens=False)
        answer = tokenizer.encode("the end", add_special_tokens=False)
        assert turn_text(tokenizer.decode, prompt, 0, answer).strip() == "the end"


def test_a_turn_has_no_space_at_its_beginning_that_the_tokenizer_made(tokenizer: Any) -> None:
    prompt, answer, more = (tokenizer.encode(text, add_special_tokens=False) for text in ("the", "the", " the"))
    assert turn_text(tokenizer.decode, prompt, 0, answer) == "the"
    two = [*answer, *more[-1:]]
    assert turn_text(tokenizer.decode, prompt + two[:1], 1, two[1:]) == tokenizer.decode(two)


def test_spaces_stay_as_the_tokens_have_them(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = KINDS["byte fallback"]
    for name in ("", "_for_bpe_even_though_it_will_corrupt_output"):
        monkeypatch.setattr(tokenizer, f"clean_up_tokenization_spaces{name}", True)
    ids = tokenizer.encode("a , b .", add_special_tokens=False)
    assert tokenizer.decode(ids) == "a, b."
    assert turn_text(tokenizer.decode, [], 0, ids) == "a , b ."


def test_random_texts_are_the_same_in_two_parts_and_token_by_token(tokenizer: Any) -> None:
    rng = random.Random(0)
    decode = without_special(tokenizer.decode)
    for _ in range(300):
        ids = random_ids(tokenizer, rng)
        cut = rng.randrange(len(ids) + 1)
        assert turn_text(tokenizer.decode, ids[:cut], cut, ids[cut:]) == decode(ids)
        stream = TextStream(decode)
        told = "".join(map(stream.add, ids))
        assert decode(ids).startswith(told)
        assert set(decode(ids)[len(told) :]) <= {"\ufffd"}
        whole, unfinished = last_characters(tokenizer.decode, ids[:cut])
        assert ids[:cut][len(ids[:cut]) - len(whole) - len(unfinished) :] == whole + unfinished
        assert len(unfinished) < 4
