"""The reward is here, too: what is scored is made again from the row."""

import json
from typing import Any

import pytest

from hocket.config import Config, DataConfig, RewardSpec, load
from hocket.data.sources import read_rows
from hocket.errors import ConfigError, DataError
from hocket.rewards.base import bind


def test_a_source_of_the_gym_names_the_package_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"gym:lcm needs the package reasoning_gym: \.venv/bin/pip install reasoning_g"
    ):
        rows("lcm")
    with pytest.raises(ConfigError, match="reward gym needs the package reasoning_gym"):
        bind("gym", RewardSpec())


def config(task: str, *settings: str) -> Config:
    return load(None, [f"data.source=gym:{task}", "data.limit=40", *settings])


def rows(task: str, *settings: str) -> list[dict[str, Any]]:
    return [columns for _, columns in read_rows(config(task, *settings).data)]


def test_a_task_is_held_out_by_its_split() -> None:
    held_out = config("lcm", "data.options={min_value: 3}").default_source.held_out
    assert held_out is not None
    assert (held_out.source, held_out.split, held_out.options) == ("gym:lcm", "test", {"min_value": 3})


class TestWithThePackage:
    @pytest.fixture(autouse=True)
    def needs(self) -> None:
        pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed")

    def test_rows_follow_from_options_and_seed_and_splits_share_no_seed(self) -> None:
        options = "data.options={min_word_len: 4, max_word_len: 4, seed: 7}"
        train, again, test = (
            rows("spell_backward", options, f"data.split={one}") for one in ("train", "train", "test")
        )
        assert train == again
        assert {len(row["answer"]) for row in train} == {4}
        assert train[0]["prompt"].endswith(train[0]["answer"][::-1])
        seeds = [json.loads(of[0]["gym"]["options"])["seed"] for of in (train, test)]
        assert seeds == [7, 7 + 2**31]
        assert {row["prompt"] for row in train} != {row["prompt"] for row in test}

    def test_columns_are_called_as_the_section_says(self) -> None:
        row = rows("lcm", "data.prompt_column=question", "data.answer_column=null")[0]
        assert [*row] == ["question", "response", "gym"]

    @pytest.mark.parametrize(
        ("settings", "said"),
        [
            (["nothing"], "refuses gym:nothing with data.options={}"),
            (["lcm", "data.options={hard: 1}"], r"with data.options=\{'hard': 1\}: TypeError"),
            (["chain_sum", "data.options={min_terms: 0}"], "AssertionError"),
            (["lcm", "data.split=dev"], "has the splits train and test, not 'dev'; set data.split"),
        ],
    )
    def test_what_the_package_does_not_know_is_refused(self, settings: list[str], said: str) -> None:
        with pytest.raises(DataError, match=said):
            rows(*settings)

    def test_the_reward_is_the_scorer_of_the_task(self) -> None:
        score = bind("gym", RewardSpec()).make()
        tagged = bind("gym", RewardSpec(tag="answer")).make()
        for row in rows("chain_sum")[:5]:
            meta = json.loads(json.dumps({"gym": row["gym"]}))  # as a replay reads it
            assert score(f" {row['answer']}\n", meta) == 1
            assert score(f"<think>{row['answer']}", meta) == 0
            assert score("I do not know", meta) < 0.1
            assert tagged(f"It is <answer>{row['answer']}</answer>", meta) == 1
            assert tagged(row["answer"], meta) < 0.1


def test_an_unknown_kind_of_source_lists_those_of_extras_too() -> None:
    with pytest.raises(ConfigError, match=r"there is no source 's3'; known: gym, hf, task, verifiers; add your own"):
        read_rows(DataConfig(source="s3://bucket/rows.jsonl"))
