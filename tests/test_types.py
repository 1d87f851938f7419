"""What flows between the stages can't be malformed and can't be changed."""

import dataclasses
import doctest

import pytest

from hocket import types
from hocket.types import Prompt, Rollout, Score, TokenSequence, TrainSample

PROMPT = Prompt(id="sort:7", token_ids=(5, 6))
SEQUENCE = TokenSequence(
    token_ids=(5, 6, 9, 2), mask=(False, False, True, True), logprobs=(0.0, 0.0, -0.7, -0.1), text="c"
)
ROLLOUT = Rollout(id="sort:7/0", prompt=PROMPT, sequences=(SEQUENCE,))


SAMPLE = TrainSample(sequence=SEQUENCE, advantages=(0.0, 0.0, 1.0, 1.0))


@pytest.mark.parametrize(
    ("value", "field"),
    [
        *((SEQUENCE, field) for field in ("token_ids", "mask", "logprobs")),
        (SAMPLE, "advantages"),
    ],
)
def test_what_belongs_to_each_token_has_one_length(value: TokenSequence | TrainSample, field: str) -> None:
    with pytest.raises(ValueError, match=rf"equal lengths.*'{field}': 2"):
        dataclasses.replace(value, **{field: (0, 1)})


def test_a_column_has_one_number_per_token() -> None:
    with pytest.raises(ValueError, match=r"equal lengths.*'values': 2"):
        dataclasses.replace(SAMPLE, columns={"values": (0.0, 1.0)})


def test_values_do_not_change() -> None:
    assert ROLLOUT.num_sampled == 2
    for value in (PROMPT, ROLLOUT, Score(total=1.0)):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, dataclasses.fields(value)[0].name, None)  # type: ignore[arg-type]


def test_the_example_in_the_docstring_runs() -> None:
    results = doctest.testmod(types)
    assert results.failed == 0
    assert results.attempted > 0
