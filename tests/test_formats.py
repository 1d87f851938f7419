"""The files of a run: keys are as their types say, older files are read, newer ones are refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hocket.config import load
from hocket.errors import DataError
from hocket.formats import FORMAT, RolloutRow, SequenceRow
from hocket.observe.rows import (
    groups_of,
    lines_of,
    read_ledger,
    read_metrics,
    read_rollouts,
    read_summary,
    row_of,
    scan_lines,
    scan_rollouts,
)
from hocket.observe.run_folder import RunFolder, kept_plugins
from hocket.types import Group, Image, Prompt, Rollout, Score, TurnReward
from support.records import group, sequence

PROMPT = Prompt(id="rows:0", token_ids=(1,), text="?", answer="a", source="mine")
PLAIN = group(PROMPT, [sequence(2, text="a"), sequence(3, text="b")], [1.0, None])

IMAGE = Image(file=b"", name="0.png", start=0, length=1, placeholder=9)
TURNS = ({"role": "assistant", "content": "a"}, {"role": "tool", "content": "b"})
FULL_SEQUENCE = sequence(2, text="a", dialogue=TURNS, images=(IMAGE,), turn_rewards=(TurnReward(0, 1, 0.5),))
FULL = Group(
    id="g",
    rollouts=(
        Rollout(
            id="g/0",
            prompt=PROMPT,
            sequences=(FULL_SEQUENCE, FULL_SEQUENCE),
            error="it broke",
            metrics={"env/moves": 2.0},
        ),
    ),
    scores=(Score(total=1.0, parts={"one": 1.0}, note="so"),),
)

READERS: dict[str, Callable[[Path], Any]] = {
    "metrics.jsonl": lambda path: read_metrics(path.parent),
    "ledger.jsonl": lambda path: read_ledger(path.parent),
    "rollouts/step_000001.jsonl": read_rollouts,
    "rollouts/step_000002.jsonl": lambda path: [*scan_rollouts(path)],
    "rollouts/step_000003.jsonl": lambda path: groups_of(path.read_text().splitlines(), path),
    "trained/step_000001.jsonl": lambda path: [*scan_lines(path)],
    "summary.json": lambda path: read_summary(path.parent),
    "plugins.json": lambda path: kept_plugins(path.parent),
}
"""File → a reader of it."""


@pytest.mark.parametrize("name", READERS)
def test_a_newer_format_is_refused_with_its_file_and_what_helps(name: str, tmp_path: Path) -> None:
    content = json.dumps({"format": FORMAT + 1, "id": "g/0"})
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"[{content}]" if name == "plugins.json" else content)
    expected = f"{path} has format {FORMAT + 1}, and this hocket reads formats up to {FORMAT}: a newer hocket wrote it"
    with pytest.raises(DataError, match=f"{expected}; read it with that one, or update this one"):
        READERS[name](path)


def test_a_format_that_is_no_number_is_damage(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"format": "one", "step": 1}\n')
    with pytest.raises(DataError, match=f"{tmp_path}/metrics.jsonl is damaged"):
        read_metrics(tmp_path)


def test_rows_without_a_format_are_read_as_those_with_it(tmp_path: Path) -> None:
    """As hocket wrote them before there was one."""
    lines = lines_of([PLAIN]).splitlines()
    before = [line.replace(f'{{"format":{FORMAT},', "{") for line in lines]
    assert before != lines
    assert groups_of(before) == groups_of(lines)
    for rows in (lines, before):
        path = tmp_path / "step_000001.jsonl"
        path.write_text("\n".join(rows) + "\n")
        expected = [row_of(PLAIN, *pair) for pair in zip(PLAIN.rollouts, PLAIN.scores, strict=True)]
        assert read_rollouts(path) == json.loads(json.dumps(expected))


def test_every_line_and_file_that_a_run_writes_says_its_format(tmp_path: Path) -> None:
    with RunFolder(load(None, [f"run.dir={tmp_path}/run"])) as folder:
        folder.ledger(0, [{"num_prompts": 3}])
        folder.finish(0, {"eval/greedy": 0.5})
        folder.finish(1, {"reward/mean": 0.5})
        folder.rollouts("step_000001", [PLAIN])
        folder.summary(final_version=1)
    run = tmp_path / "run"
    files = [*run.rglob("*.jsonl"), run / "summary.json"]
    contents = {file.name: file.read_text() for file in files}
    assert {name for name, text in contents.items() if not text} == {"timeline.jsonl"}
    for name, text in contents.items():
        for content in text.splitlines() if name.endswith("jsonl") else [text]:
            assert json.loads(content)["format"] == FORMAT, name


def test_a_rollout_s_row_has_the_keys_of_its_type_and_no_other() -> None:
    """Those that may be absent, too, where there is something to say."""
    full = row_of(FULL, FULL.rollouts[0], FULL.scores[0])
    assert full.keys() == RolloutRow.__annotations__.keys()
    assert full["others"][0].keys() == SequenceRow.__annotations__.keys()
    plain = row_of(PLAIN, PLAIN.rollouts[0], PLAIN.scores[0])
    optional = {"failed", "others", "metrics", "dialogue", "turn_rewards", "images"}
    assert RolloutRow.__annotations__.keys() - plain.keys() == optional
