import json
from pathlib import Path

import pytest

from hocket.observe.console import Console
from support.records import write_rows

METRICS = {
    "reward/mean": 0.5, "eval/sampled": 0.25, "rollout/length_mean": 7.0, "rollout/truncated": 0.1,
    "train/logprob_gap": 2e-6, "train/clip_low": 0.01, "train/clip_high": 0.015, "train/importance_capped": 0.005,
    "step/tokens_per_s": 12345.6, "train/mfu": 0.41, "time/generate": 1.5, "time/step": 2.0,
}  # fmt: skip
BEFORE = {"greedy": 0.2, "sampled": 0.1, "greedy_stderr": 0.03, "sampled_stderr": 0.03, "zero_or_one": 1.0}
AFTER = {"greedy": 0.95, "sampled": 0.9, "greedy_stderr": 0.01, "sampled_stderr": 0.02, "zero_or_one": 1.0}


def test_a_step_is_one_line_of_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    with Console(steps=10) as console:
        console.step(1, METRICS)
        console.step(2, {"reward/mean": 0.625})
    first, alarm, second = capsys.readouterr().out.splitlines()
    said = "step 1/10  reward 0.500  held-out sampled 0.250  length 7.0  gap 2.0e-06  12,346 tokens/s  2.00 s  "
    assert first.startswith(said)
    assert first.endswith("left")
    assert "rollout/truncated = 0.1 (> 0.05)" in alarm
    assert second.startswith("step 2/10  reward 0.625  ")


def test_an_alarm_is_printed_when_it_begins_and_again_after_ten_steps_without_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    unhealthy = {1, 2, 4, 5, 15, 26}
    with Console(steps=100) as console:
        for step in range(1, 31):
            console.step(step, {"rollout/truncated": 0.2 if step in unhealthy else 0.0})
    lines = [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()]
    after = [lines[index - 1] for index, line in enumerate(lines) if not line]  # an alarm is indented
    assert after == ["step 1/100", "step 26/100"]


def test_an_alarm_of_step_0_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with Console(10) as console:
        for step in range(3):
            console.step(step, {"rollout/truncated": 0.1})
    _, alarm, *later = capsys.readouterr().out.splitlines()
    assert "rollout/truncated = 0.1" in alarm
    assert len(later) == 2  # it stays, and is printed once


def test_the_first_line_may_be_of_step_0_and_without_a_terminal_an_activity_is_printed_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with Console(steps=10) as console:
        console.doing("waiting for [the] server", 0.1)
        console.doing("waiting for [the] server", 5.2)
        console.doing("loading", 2.6)
        console.step(0, {"eval/sampled": 0.25})
        console.step(1, {"time/step": 1.0})
    waiting, loading, before, first = capsys.readouterr().out.splitlines()
    assert (waiting, loading) == ("waiting for [the] server", "loading (3 s)")
    assert before == "step 0/10  held-out sampled 0.250"
    assert (before.endswith("left"), first.endswith("left")) == (False, True)


def test_without_a_terminal_phases_are_said_until_the_first_step_has_its_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with Console(steps=10) as console:
        console.progress(0, "held-out evaluation")
        console.step(0, {"eval/sampled": 0.25})
        console.progress(1, "generating, 0/4 groups scored")
        console.progress(1, "generating, 3/4 groups scored")
        console.step(1, {"time/step": 1.0})
        console.progress(2, "training")
    assert [line[:24] for line in capsys.readouterr().out.splitlines()] == [
        "step 0/10: held-out eval", "step 0/10  held-out samp", "step 1/10: generating, 0", "step 1/10  1.00 s  0:09 "
    ]  # fmt: skip


def test_a_line_that_counts_seconds_is_one_activity(capsys: pytest.CaptureFixture[str]) -> None:
    with Console(steps=10) as console:
        for second in range(5):
            console.doing(f"waiting for http://a:1 (it works for another trainer, heard of {second} s ago)", second)
        console.doing("waiting for http://a:1 (it is loading)", 5.0)
    assert [line[-12:] for line in capsys.readouterr().out.splitlines()] == [" of 0 s ago)", "ading) (5 s)"]


def test_the_end_shows_before_after_samples_and_where_everything_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "weights" / "v000009").mkdir(parents=True)
    (tmp_path / "report.html").touch()
    timed = {"steps": 8, "updated": 8, "train_seconds": 61.0, "seed": 0, "final_version": 9}
    row = {"id": "eval 8/0/0", "prompt": "sort ba", "completion": "ab", "answer": "ab", "reward": 1.0, "error": None}
    sampled = row | {"id": "eval 8/0/1", "completion": "ba"}
    failed = row | {"reward": None, "error": "math: hung"}
    rollouts = write_rows(tmp_path / "rollouts" / "eval_000008.jsonl", row, sampled, failed, row, row)
    (tmp_path / "rollouts" / "eval_000000.jsonl").touch()

    def told(**changes: object) -> str:
        summary = {"before": BEFORE, "after": AFTER, **timed, **changes}
        (tmp_path / "summary.json").write_text(json.dumps(summary))
        Console(steps=8).finish(tmp_path)
        return capsys.readouterr().out

    out = told()
    assert "held-out accuracy, greedy  0.200 → 0.950 ± 0.010\n" in out
    assert "held-out accuracy, sampled 0.100 → 0.900 ± 0.020\n" in out
    assert out.count("'sort ba' → 'ab'") == 3
    for said in ("reward math: hung", f"{tmp_path}/weights/v000009", f"{tmp_path}/report.html"):
        assert said in out
    assert "updated" not in out
    row["dialogue"] = [{"role": "assistant", "content": "?"}, {"role": "tool", "content": "!"}]
    write_rows(rollouts, row)
    assert r"'sort ba' → 'assistant: ?\ntool: !'" in told()
    assert "held-out reward, greedy  0.200 → 0.950 ± 0.010\n" in told(after=AFTER | {"zero_or_one": 0.9})
    assert "3 of 8 steps updated the weights\n" in told(updated=3)
    assert "0 of 8 steps updated the weights: all rew" in told(updated=0)
