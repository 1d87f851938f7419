"""Rows of rollout files: what is written is what is read."""

import json
import math

import pytest

from hocket.records import groups_of, lines_of
from hocket.types import Group, Prompt, Rollout, Score, TokenSequence


def rollout(group: str, index: int, others: tuple[TokenSequence, ...] = (), **changes: object) -> Rollout:
    prompt = Prompt(id=f"task:{group}", token_ids=(1, 2), text="sort ba", answer="ab")
    return Rollout(id=f"{group}/{index}", prompt=prompt, sequences=(*others, sequence(**changes)))


def sequence(**changes: object) -> TokenSequence:
    values: dict[str, object] = {
        "token_ids": (1, 2, 3, 4, 5),
        "mask": (False, False, True, False, True),  # between two turns the environment spoke
        "logprobs": (0.0, 0.0, -0.1, 0.0, -0.123456789012345),
        "finish_reason": "stop",
        "version_min": 3,
        "version_max": 4,
        "text": "ab\u2028\r\n",
        "turns": 2,
        "dialogue": ({"role": "assistant", "content": "a"}, {"role": "environment", "content": "?"}),
    }
    return TokenSequence(**(values | changes))  # type: ignore[arg-type]


def test_groups_come_back_as_they_were() -> None:
    first = Group(
        id="step 1/0",
        rollouts=(rollout("step 1/0", 0), rollout("step 1/0", 1)),
        scores=(Score(total=0.1, parts={"math": 0.1}), Score(total=1.0)),
    )
    second = Group(id="step 1/1", rollouts=(rollout("step 1/1", 0, dialogue=()),), scores=(Score(total=-2.5),))
    assert groups_of(lines_of([first, second]).split("\n")[:3]) == [first, second]


def test_the_sequences_of_an_agent_s_episode_stay_together() -> None:
    others = (sequence(), sequence(turns=1, dialogue=(), text="other"))
    group = Group(id="g", rollouts=(rollout("g", 0, others=others), rollout("g", 1)), scores=(Score(total=1.0),) * 2)
    lines = lines_of([group])
    rows = [json.loads(line) for line in lines.split("\n")[:-1]]
    assert [row["num_tokens"] for row in rows] == [6, 2]
    assert [other["id"] for other in rows[0]["others"]] == ["g/0.0", "g/0.1"]
    assert groups_of(lines.split("\n")[:-1]) == [group]


def test_a_score_that_failed_stays_one_and_a_rollout_may_have_no_sampled_token() -> None:
    silent = rollout("g", 0, mask=(False,) * 5, logprobs=(0.0,) * 5, turns=0, dialogue=())
    group = Group(id="g", rollouts=(silent,), scores=(Score(total=math.nan, error="math: hung"),))
    (read,) = groups_of(lines_of([group]).split("\n")[:-1])
    assert read.scores[0].error == "math: hung"
    assert math.isnan(read.scores[0].total)
    assert read.rollouts[0].prompt.token_ids == (1, 2, 3, 4, 5)  # all that is there was told


def test_what_is_no_row_is_an_error() -> None:
    with pytest.raises(KeyError):
        groups_of([json.dumps({"group_id": "g"})])
    with pytest.raises(ValueError, match="Expecting"):
        groups_of(["{"])
