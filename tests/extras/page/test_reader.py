"""A run folder as the page reads it: while it grows, after it was cut, and however long it is."""

from pathlib import Path

from hocket.extras.page.reader import RunReader
from hocket.observe.owner import LOCK, owning
from support.records import write_rows


def test_only_complete_lines_are_read_and_what_comes_later_is_added(tmp_path: Path) -> None:
    run = RunReader(tmp_path)
    run.look()
    assert run.curves(-1)["step"] == []
    write_rows(tmp_path / "metrics.jsonl", {"step": 0, "a": 1}, {"step": 1, "a": None, "b": 2.5, "rollout/tokens": 7})
    run.look()
    write_rows(tmp_path / "metrics.jsonl", {"step": 2, "rollout/tokens": 5, "time/step": 1.5}, mode="a", end="")
    run.look()
    assert run.curves(-1)["step"] == [0, 1]
    write_rows(tmp_path / "metrics.jsonl", mode="a")
    run.look()
    assert run.reads == 1
    assert {name: run.curves(-1)[name] for name in ("a", "b", "tokens", "seconds")} == {
        "a": [1, None, None],
        "b": [None, 2.5, None],
        "tokens": [0, 7, 12],
        "seconds": [0, 0, 1.5],
    }
    assert run.news(1)["curves"]["step"] == [2]


def test_a_resumed_run_whose_last_steps_were_cut_off_is_read_anew(tmp_path: Path) -> None:
    run = RunReader(tmp_path)
    path = tmp_path / "metrics.jsonl"
    write_rows(path, {"step": 1, "x": 1}, {"step": 2, "x": 2})
    run.look()
    write_rows(path, {"step": 1, "x": 1}, {"step": 2, "x": 3})
    run.look()
    assert (run.reads, run.curves(-1)["x"]) == (2, [1, 3])
    path.unlink()
    run.look()
    assert (run.reads, run.curves(-1)["step"]) == (3, [])


def test_an_alarm_has_its_sentence_the_number_of_steps_and_the_last_one(tmp_path: Path) -> None:
    rows = [{"step": step, "rollout/truncated": share} for step, share in enumerate((0.5, 0.0, 0.25, 0.01))]
    write_rows(tmp_path / "metrics.jsonl", *rows, {"step": 4, "train/logprob_gap": None})
    run = RunReader(tmp_path)
    run.look()
    assert run.alarms["rollout/truncated"]["text"].startswith("rollout/truncated = 0.25 (> 0.05): share of rollouts")
    assert [run.alarms["rollout/truncated"][name] for name in ("count", "last")] == [2, 2]
    assert run.alarms["train/logprob_gap"]["text"].startswith("train/logprob_gap = nan")


def test_the_newest_phases_and_what_became_of_each_server_are_known(tmp_path: Path) -> None:
    span = {"step": 1, "name": "train", "who": "trainer", "start": 1.0, "end": 2.5}
    up = {"url": "http://a", "up": True, "state": "up", "reason": None, "version": 3}
    out = {"url": "http://a", "up": False, "state": "lost", "reason": "no answer"}
    told = [{"step": step, "servers": [one]} for step, one in enumerate((up, up, out, up))]
    write_rows(tmp_path / "timeline.jsonl", span, *told)
    run = RunReader(tmp_path)
    run.look()
    news = run.news(0)
    assert news["phases"] == [span]
    assert news["servers"]["http://a"]["changes"] == [[0, True], [2, False], [3, True]]
    assert news["servers"]["http://a"]["up"]


def test_a_run_is_running_as_long_as_it_has_an_owner_and_finished_with_its_summary(tmp_path: Path) -> None:
    run = RunReader(tmp_path)
    assert run.news(0)["state"] == "stopped"
    (tmp_path / LOCK).touch()  # as a killed run leaves it
    assert run.news(0)["state"] == "stopped"
    with owning(tmp_path, print, wait=False):
        assert run.news(0)["state"] == "running"
        (tmp_path / "summary.json").write_text("{}" + "\n")
        assert run.news(0)["state"] == "running"  # an empty one is none
    assert run.news(0)["state"] == "stopped"
    (tmp_path / "summary.json").write_text('{"steps": 3}')
    assert run.news(0)["state"] == "finished"
