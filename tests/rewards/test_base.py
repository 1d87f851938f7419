import dataclasses
import math
from collections.abc import Callable

import numpy
import pytest

from hocket.common.registry import Registry
from hocket.config.sections import RewardSpec
from hocket.errors import ConfigError
from hocket.rewards import base
from hocket.rewards.base import Reward, bind, reward
from hocket.rewards.scores import as_score
from hocket.types import Rollout, Score, TokenSequence


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> Registry[Reward]:
    registry: Registry[Reward] = Registry("reward")
    monkeypatch.setattr(base, "REWARDS", registry)
    return registry


def test_a_function_gets_only_what_it_names(make_rollout: Callable[..., Rollout]) -> None:
    reward("few")(lambda meta, completion, share=0.5: share)
    reward("all")(lambda completion, prompt, messages, answer, token_ids, finish_reason, rollout: 0.0)
    reward("open")(lambda completion, **options: options)
    rollout = make_rollout("abdc")
    few, opened = bind("few", RewardSpec(share=0.25)), bind("open", RewardSpec(anything=1))
    assert few.arguments([rollout]) == {"meta": {"level": 2}, "completion": "abdc"}
    assert few.made()(**few.arguments([rollout])) == 0.25
    assert opened.made()(**opened.arguments([rollout])) == {"anything": 1}
    assert bind("all", RewardSpec()).arguments([rollout]) == {
        "completion": "abdc",
        "prompt": "Sort: dbca",
        "messages": ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Sort: dbca"}),
        "answer": "abcd",
        "token_ids": (10, 11, 12),
        "finish_reason": "stop",
        "rollout": rollout,
    }
    other = TokenSequence(token_ids=(7, 8, 9), mask=(False, True, True), logprobs=(0.0,) * 3)
    both = dataclasses.replace(rollout, sequences=(other, *rollout.sequences))
    assert bind("all", RewardSpec()).arguments([both])["token_ids"] == (8, 9, 10, 11, 12)


def test_wrong_names_and_options_are_answered_with_the_signature() -> None:
    reward("near")(lambda completion, target, unit="tokens": 0.0)
    reward("needy", imports=("no_such_package",))(lambda completion: 0.0)
    reward("placed")(lambda completion, /, answer: 0.0)
    for name, options, message in (
        ("near", {}, r"needs the option 'target': set rewards.functions.near.target"),
        ("near", {"target": 3, "completion": "x"}, "'completion' comes from the rollout"),
        ("needy", {}, "needs the package no_such_package"),
        ("placed", {}, r"reward placed\(completion, answer\) gets its arguments by name: remove the /"),
    ):
        with pytest.raises(ConfigError, match=message):
            bind(name, RewardSpec.model_validate(options))


def test_numbers_of_any_kind_are_values_and_a_dict_adds_up_and_a_score_has_its_total() -> None:
    for number in (1, True, numpy.float32(1), numpy.int64(1)):
        assert as_score(number) == Score(total=1.0)
    assert as_score({"style": 0.25, "sense": 1}) == Score(total=1.25, parts={"style": 0.25, "sense": 1.0})
    assert as_score(Score(total=3.0, parts={"style": 0.5})) == Score(total=3.0, parts={"style": 0.5})
    assert as_score(Score(total=math.nan, error="the judge refused")).error == "the judge refused"
