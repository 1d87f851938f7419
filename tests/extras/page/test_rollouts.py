"""Rollouts as the page asks for them: of a step, and token by token."""

import math
from pathlib import Path

import pytest

from hocket.extras.page import reader
from hocket.extras.page.reader import RunReader
from hocket.observe.rows import lines_of
from hocket.types import Prompt, Score
from support.records import group, sequence, write_rows
from support.tokenizers import ALPHABET, BYTES, make_tokenizer

TRICKY = 'it says "mask":[1,2],"logprobs":[3] \ud800 \\ "'


def write(folder: Path, name: str = "step_000001") -> Path:
    played = [sequence(70, 75, logprobs=(0.0, -0.5, -2.0), text=TRICKY)] * 2
    scores = (Score(total=1.0, parts={"x": 1.0}, note="n" * 3000), Score(total=math.nan, error="hung"))
    (folder / "rollouts").mkdir(parents=True, exist_ok=True)
    text = lines_of([group(Prompt(id="p", token_ids=(1,), text=TRICKY, answer="a"), played, scores)])
    (folder / f"rollouts/{name}.jsonl").write_text(text, encoding="utf-8", errors="replace")
    return folder


def test_a_step_s_rollouts_are_whole_but_for_tokens_with_the_advantage_of_training(tmp_path: Path) -> None:
    write(tmp_path)
    row = {"id": "g/0", "advantage": 0.5, "advantages": [0.0, 0.5, 0.5], "entropy": [0, 1, 2], "trainer": []}
    write_rows(tmp_path / "trained/step_000001.jsonl", row)
    first, second = RunReader(tmp_path).rollouts("step_000001")
    assert first["completion"] == first["prompt"] == TRICKY.replace("\ud800", "?")
    assert (first["advantage"], second.get("advantage")) == (0.5, None)
    assert [len(one["note"]) for one in (first, second)] == [3000, 0]
    assert (second["reward"], second["error"]) == (None, "hung")
    assert not {"token_ids", "logprobs", "mask", "advantages", "entropy", "trainer"} & (first.keys() | second.keys())


@pytest.mark.parametrize("name", ["step_000009", "../step_000001", "step_1/../../x", "", "mine"])
def test_what_is_no_step_of_the_run_has_no_rollouts(tmp_path: Path, name: str) -> None:
    write(tmp_path)
    run = RunReader(write(tmp_path / "run"))
    assert run.rollouts(name) == run.rollouts(name, "g", tokens=True) == []


def test_a_run_s_steps_are_those_of_training_and_of_evaluations(tmp_path: Path) -> None:
    for name in ("step_000010", "step_000002", "eval_000000", "mine_2"):
        write(tmp_path, name)
    assert RunReader(tmp_path).data()["rollouts"] == {"step": [2, 10], "eval": [0]}


def test_tokens_have_their_text_and_what_training_knew_of_them(tmp_path: Path) -> None:
    write(tmp_path)
    assert RunReader(tmp_path).rollouts("step_000001", "g/0", tokens=True) == []  # a rollout is no prompt
    plain = {"mask": [0, 1, 1], "token_ids": [1, 70, 75], "logprobs": [0.0, -0.5, -2.0], "texts": None}
    for one in RunReader(tmp_path).rollouts("step_000001", "g", tokens=True):
        assert one == one | plain
    known = write(tmp_path / "known")
    (known / "config.yaml").write_text("model: {path: checkpoints/tiny-sort}\n")
    row = {"id": "g/0", "advantage": 0.5, "entropy": [0.0, 0.1, 0.2]}
    write_rows(known / "trained/step_000001.jsonl", row)
    told, other = RunReader(known).rollouts("step_000001", "g", tokens=True)
    assert told == told | plain | row | {"texts": told["texts"]}
    assert "".join(told["texts"]) != ""
    assert "entropy" not in other


def test_a_character_of_several_tokens_stands_at_the_last_of_them_and_broken_ones_hold_up_no_more_than_that() -> None:
    tokenizer = make_tokenizer(ALPHABET, split=BYTES, merges=()).backend_tokenizer
    ids = tokenizer.encode("aé→b").ids
    assert reader.pieces(tokenizer, ids) == ["a", "", "é", "", "", "→", "b"]
    broken = [ids[1], ids[1], *ids]
    assert reader.pieces(tokenizer, broken) == ["", "", "\ufffd\ufffda", "", "é", "", "", "→", "b"]
