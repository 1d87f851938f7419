"""README's first command, started as a user starts it."""

import json
from pathlib import Path

import pytest

from support.processes import START_S, Process

pytestmark = pytest.mark.e2e


def test_quickstart_learns_and_leaves_a_complete_run_folder_and_no_process(tmp_path: Path) -> None:
    run_dir, log = tmp_path / "runs" / "a", tmp_path / "log"
    settings = (f"run.dir={run_dir}", "trainer.steps=30", "eval.every_steps=0")
    with Process(["quickstart", "config/quickstart.yaml", *settings], log) as process:
        assert process.wait_end(START_S + 300) == 0, log.read_text()
        process.assert_gone()
    out = log.read_text()
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["before"]["greedy"] == summary["before"]["sampled"] == 0, out  # it can't do the task
    assert min(summary["after"]["greedy"], summary["after"]["sampled"]) >= 0.05, out
    assert (summary["steps"], summary["seed"]) == (30, 0)
    steps = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()][1:]
    assert [step["step"] for step in steps] == list(range(1, 31))
    # Every step trains on tokens that were sampled from exactly the weights that the trainer holds.
    assert max(step["train/logprob_gap"] for step in steps) < 1e-3
    assert all(step["staleness/max"] == 0 for step in steps)
    assert sorted(path.name for path in run_dir.iterdir()) == [
        "checkpoints",
        "config.yaml",
        "ledger.jsonl",
        "logs",
        "metrics.jsonl",
        "report.html",
        "rollouts",
        "summary.json",
        "timeline.jsonl",
        "trained",
        "trainer_id",
        "weights",
    ]
    versions = sorted(path.name for path in (run_dir / "weights").iterdir())
    assert versions[-1] == f"v{summary['final_version']:06d}"
    assert len((run_dir / "rollouts" / "step_000030.jsonl").read_text().splitlines()) == 16 * 12
    assert "held-out accuracy, greedy  0.000 → " in out
    assert out.count("→") >= 5  # before → after, twice, and three samples
