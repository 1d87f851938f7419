"""timeline.jsonl: which spans it has, whose they are, by which clock, and what it says of servers."""

from contextlib import closing
from pathlib import Path
from typing import Any

from hocket.common.tasks import LISTENERS, note, timed
from hocket.extras.timeline import Timeline
from hocket.observe.rows import read_lines


def spans(path: Path) -> list[tuple[Any, ...]]:
    return [(row["step"], row["who"], row["name"]) for row in read_lines(path / "timeline.jsonl") if "who" in row]


def test_spans_are_those_of_the_step_in_their_order_and_a_batch_played_ahead_began_before(
    tmp_path: Path, clock: Any
) -> None:
    with closing(Timeline(tmp_path, lambda: 0)) as timeline:  # at 1000 s
        clock.now = 1001.0
        with timed({}, "time/step"), timed({}, "time/train"):
            clock.now = 1003.0
        with timed({}, "sync/proof_s"):
            pass
        timeline.recorded(1, {})
        clock.now = 1004.0
        assert note("time/generate", 1004.0, 1004.5) == 0.5
        note("time/batch", 1000.0, 1004.5)
        timeline.recorded(2, {})
    note("time/train", 1004.0)
    assert not LISTENERS
    assert spans(tmp_path) == [(1, "trainer", "train"), (2, "servers", "generate"), (2, "trainer", "wait")]
    found = [(row["start"], row["end"]) for row in read_lines(tmp_path / "timeline.jsonl")]
    assert found == [(1011, 1013), (1010, 1014.5), (1014, 1014.5)]  # by Unix time, 10 s ahead


def test_a_step_says_what_is_known_of_each_server_and_nothing_without_one(tmp_path: Path, clock: Any) -> None:
    there: list[dict[str, Any]] = []
    with closing(Timeline(tmp_path, lambda: 1, lambda: there)) as timeline:
        timeline.recorded(0, {})
        there.append({"url": "http://127.0.0.1:1", "up": False, "state": "waiting", "reason": "it is loading"})
        timeline.recorded(1, {})
        clock.now += 1
        timeline.servers_changed()
    told = [{"step": 1, "time": 1010, "servers": there}, {"step": 2, "time": 1011, "servers": there}]
    assert read_lines(tmp_path / "timeline.jsonl") == told
