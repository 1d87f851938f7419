"""timeline.jsonl: which spans it has, whose they are, by which clock, and what it says of servers."""

import time
from pathlib import Path
from typing import Any

import pytest

from hocket.common.tasks import LISTENERS, note, timed
from hocket.observe.rows import read_lines
from hocket.observe.timeline import Timeline


def spans(path: Path) -> list[tuple[Any, ...]]:
    return [(row["step"], row["who"], row["name"]) for row in read_lines(path / "timeline.jsonl") if "who" in row]


def test_spans_are_those_of_the_step_in_their_order_and_a_batch_played_ahead_began_before(tmp_path: Path) -> None:
    with Timeline(tmp_path, lambda: 0) as timeline:
        begun = time.perf_counter()
        with timed({}, "time/step"), timed({}, "time/train"):
            pass
        with timed({}, "sync/proof_s"):
            pass
        timeline.step(1, {})
        now = time.perf_counter()
        assert note("time/generate", now, now + 0.5) == 0.5
        note("time/batch", begun, now + 0.5)
        timeline.step(2, {})
    note("time/train", now)
    assert not LISTENERS
    assert spans(tmp_path) == [(1, "trainer", "train"), (2, "servers", "generate"), (2, "trainer", "wait")]
    train, batch, wait = read_lines(tmp_path / "timeline.jsonl")
    assert batch["start"] < train["start"] <= train["end"] < wait["start"]
    assert batch["end"] == wait["end"] == pytest.approx(wait["start"] + 0.5, abs=1e-5)
    assert wait["start"] == pytest.approx(time.time(), abs=60)


def test_a_step_says_what_is_known_of_each_server_and_nothing_without_one(tmp_path: Path) -> None:
    there: list[dict[str, Any]] = []
    with Timeline(tmp_path, lambda: 1, lambda: there) as timeline:
        timeline.step(0, {})
        there.append({"url": "http://127.0.0.1:1", "up": False, "out": "it is loading"})
        timeline.step(1, {})
        timeline.note_servers()
    rows = read_lines(tmp_path / "timeline.jsonl")
    assert [row.pop("time") for row in rows] == [pytest.approx(time.time(), abs=60)] * 2
    assert rows == [{"step": 1, "servers": there}, {"step": 2, "servers": there}]
