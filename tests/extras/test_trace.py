"""trace.json: the chosen steps of all processes, nested and side by side as they were."""

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from hocket import config
from hocket.common.tasks import LISTENERS, Span, note, timed
from hocket.errors import ConfigError
from hocket.extras.timeline import Timeline, events


def test_what_is_done_at_the_same_time_has_a_lane_of_its_own_and_parts_lie_within_the_whole() -> None:
    spans = [
        Span("time/train", 2, 4),
        Span("update", 2, 3),
        Span("time/step", 1, 5),
        Span("8 turns", 1, 3, "http://a"),
        Span("4 turns", 2, 4, "http://a"),
        Span("1 turns", 3, 5, "http://a"),
    ]
    *all_of_them, last = events(spans)
    names = {event["pid"]: event["args"]["name"] for event in all_of_them if event["ph"] == "M"}
    drawn = [(names[one["pid"]], one["name"], one["tid"]) for one in [*all_of_them, last] if one["ph"] == "X"]
    assert drawn == [
        ("trainer, rank 0", "step", 0),
        ("http://a", "8 turns", 0),
        ("trainer, rank 0", "train", 0),
        ("http://a", "4 turns", 1),
        ("trainer, rank 0", "update", 0),
        ("http://a", "1 turns", 0),
    ]
    assert last["dur"] == 2e6


def test_the_chosen_steps_are_written_by_the_clock_of_all_and_no_others(tmp_path: Path, clock: Any) -> None:
    chosen = config.load(None, ["observe.trace=2..3"]).observe
    with closing(Timeline(tmp_path, lambda: 0, traced=chosen.traced)) as timeline:
        for step in range(5):
            with timed({}, "time/step"):
                note(f"{step}", clock.now, who="http://a")
                clock.now += 1
            timeline.recorded(step, {})
            assert (tmp_path / "trace.json").exists() == (step >= 2)
    assert not LISTENERS
    written: list[dict[str, Any]] = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [event["name"] for event in written if event["pid"] == 1 and event["ph"] == "X"] == ["2", "3"]
    assert written[-1]["ts"] == 1013e6  # microseconds of Unix time


@pytest.mark.parametrize(("told", "steps"), [("3", [3]), ("3..5", [3, 4, 5]), ("null", [])])
def test_steps_are_one_or_a_span(told: str, steps: list[int]) -> None:
    chosen = config.load(None, [f"observe.trace={told}"])
    assert list(chosen.observe.traced) == steps
    with pytest.raises(ConfigError, match=r"observe\.trace: .*match"):
        config.load(None, [f"observe.trace={told}-7"])
    with pytest.raises(ConfigError, match=r"trace=5\.\.3 has no steps: write first\.\.last"):
        config.load(None, ["observe.trace=5..3"])
