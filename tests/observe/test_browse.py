"""Rollouts as the page asks for them: in short, in full, and token by token."""

import json
from pathlib import Path

import pytest

from hocket.observe import browse
from hocket.observe.rows import lines_of
from hocket.types import Group, Prompt, Rollout, Score, TokenSequence

TRICKY = 'it says "mask":[1,2],"logprobs":[3] \ud800 \\ "'


def write(folder: Path, name: str = "step_000001") -> Path:
    prompt = Prompt(id="p", token_ids=(1,), text=TRICKY, answer="a")
    tokens = {"token_ids": (1, 70, 75), "mask": (False, True, True), "logprobs": (0.0, -0.5, -2.0)}
    played = tuple(
        Rollout(id=f"g/{i}", prompt=prompt, sequences=(TokenSequence(**tokens, text=TRICKY),)) for i in range(2)
    )
    scores = (Score(total=1.0, parts={"x": 1.0}, note="n" * 3000), Score(total=float("nan"), error="hung"))
    (folder / "rollouts").mkdir(parents=True, exist_ok=True)
    text = lines_of([Group(id="g", rollouts=played, scores=scores)])
    (folder / f"rollouts/{name}.jsonl").write_text(text, encoding="utf-8", errors="replace")
    return folder


def test_a_step_in_short_has_no_tokens_and_texts_that_are_cut_with_the_advantage_of_training(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "trained").mkdir()
    (tmp_path / "trained/step_000001.jsonl").write_text(json.dumps({"id": "g/0", "advantage": 0.5}) + "\n")
    first, second = browse.in_short(tmp_path, "step_000001")
    assert first["completion"] == first["prompt"] == TRICKY.replace("\ud800", "?")
    assert (first["advantage"], second["advantage"]) == (0.5, None)
    assert first["note"].endswith("… (1000 more characters)")
    assert (second["reward"], second["error"], "token_ids" in second) == (None, "hung", False)
    full = browse.group(tmp_path, "step_000001", "g")
    assert [len(row["note"]) for row in full] == [3000, 0]
    assert [row["meta"] for row in full] == [{}, {}]


@pytest.mark.parametrize("name", ["step_000009", "../step_000001", "step_1/../../x", "", "mine"])
def test_what_is_no_step_of_the_run_has_no_rollouts(tmp_path: Path, name: str) -> None:
    write(tmp_path / "run")
    write(tmp_path)
    assert browse.in_short(tmp_path / "run", name) == browse.group(tmp_path / "run", name, "g") == []
    assert browse.tokens(tmp_path / "run", name, "g/0") == {}


def test_a_run_s_steps_are_those_of_training_and_of_evaluations(tmp_path: Path) -> None:
    for name in ("step_000010", "step_000002", "eval_000000", "mine_2"):
        write(tmp_path, name)
    assert browse.steps(tmp_path) == {"step": [2, 10], "eval": [0]}


def test_tokens_have_their_text_and_what_training_knew_of_them(tmp_path: Path) -> None:
    write(tmp_path)
    assert browse.tokens(tmp_path, "step_000001", "g/2") == {}
    plain = {"mask": [0, 1, 1], "token_ids": [1, 70, 75], "logprobs": [0.0, -0.5, -2.0], "texts": None}
    assert browse.tokens(tmp_path, "step_000001", "g/0") == {"g/0": plain}
    assert browse.tokens(tmp_path, "step_000001", "g") == {"g/0": plain, "g/1": plain}
    known = write(tmp_path / "known")
    (known / "config.yaml").write_text("model: {path: checkpoints/tiny-sort}\n")
    (known / "trained").mkdir()
    row = {"id": "g/0", "advantage": 0.5, "entropy": [0.0, 0.1, 0.2]}
    (known / "trained/step_000001.jsonl").write_text(json.dumps(row) + "\n")
    told = browse.tokens(known, "step_000001", "g/0")["g/0"]
    assert told == plain | row | {"texts": told["texts"]}
    assert "".join(told["texts"]) != ""


class Bytes:
    """A tokenizer whose tokens are bytes."""

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        return bytes(ids).decode(errors="replace")


def test_a_character_of_several_tokens_stands_at_the_last_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(browse, "_tokenizer", lambda folder: Bytes())
    assert browse.pieces(tmp_path, list("aé→b".encode())) == ["a", "", "é", "", "", "→", "b"]
