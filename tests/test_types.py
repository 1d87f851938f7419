"""What flows between the stages can't be malformed and can't be changed."""

import dataclasses

import pytest

from hocket.protocol import Completion
from hocket.types import Group, Prompt, Rollout, Score, TokenSequence, TrainSample

PROMPT = Prompt(id="sort:7", token_ids=(5, 6))
SEQUENCE = TokenSequence(
    token_ids=(5, 6, 9, 2), mask=(False, False, True, True), logprobs=(0.0, 0.0, -0.7, -0.1), text="c"
)
ROLLOUT = Rollout(id="sort:7/0", prompt=PROMPT, sequences=(SEQUENCE,))


@pytest.mark.parametrize("field", ["mask", "logprobs", "token_ids"])
def test_a_sequences_fields_have_one_length(field: str) -> None:
    with pytest.raises(ValueError, match=rf"equal lengths.*'{field}': 3"):
        dataclasses.replace(SEQUENCE, **{field: getattr(SEQUENCE, field)[:-1]})


def test_a_completion_has_one_logprob_per_token() -> None:
    with pytest.raises(ValueError, match="2 token_ids need as many logprobs, got 1"):
        Completion(token_ids=(1, 2), logprobs=(-0.1,), finish_reason="stop", versions=((1, 0, 2),), text="")


def test_a_group_has_one_score_per_rollout() -> None:
    with pytest.raises(ValueError, match="'rollouts': 1, 'scores': 2"):
        Group(id="g", rollouts=(ROLLOUT,), scores=(Score(total=1.0), Score(total=0.0)))


@pytest.mark.parametrize("length", [0, 1])
def test_a_sample_has_a_token_to_predict_from(length: int) -> None:
    with pytest.raises(ValueError, match="at least two tokens"):
        TrainSample(
            sequence=TokenSequence(token_ids=(1,) * length, mask=(True,) * length, logprobs=(0.0,) * length),
            advantages=(0.0,) * length,
        )


@pytest.mark.parametrize("field", ["advantages", "ref_logprobs", "values", "returns"])
def test_a_sample_has_one_number_per_token(field: str) -> None:
    sample = TrainSample(sequence=SEQUENCE, advantages=(0.0, 0.0, 1.0, 1.0))
    with pytest.raises(ValueError, match=f"'{field}': 2"):
        dataclasses.replace(sample, **{field: (0.0, 1.0)})


def test_values_do_not_change() -> None:
    assert ROLLOUT.num_sampled == 2
    for value in (PROMPT, ROLLOUT, Score(total=1.0)):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, dataclasses.fields(value)[0].name, None)  # type: ignore[arg-type]
