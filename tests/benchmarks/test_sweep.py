"""benchmarks/sweep.py with curves that are written by hand; nothing here is a real run."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from hocket import config

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import sweep


def step(number: int, **figures: float) -> dict[str, Any]:
    return {"step": number, "reward": 0.5, "entropy": 1.0, "seconds": 2.0, "signal": 0.5, **figures}


def evaluated(number: int, greedy: float, error: float = 0.03, **figures: float) -> dict[str, Any]:
    return step(number, greedy=greedy, greedy_stderr=error, sampled=greedy / 2, **figures)


def test_a_run_whose_accuracy_stays_within_two_standard_errors_of_its_best_has_not_collapsed() -> None:
    # The difference of two accuracies with an error of .03 each has one of .042: .08 is below two of them.
    assert sweep.collapsed([evaluated(0, 0.1), evaluated(6, 0.7), evaluated(12, 0.62)]) is None


def test_a_run_whose_accuracy_falls_further_has_collapsed_at_that_evaluation() -> None:
    curve = [evaluated(0, 0.1), evaluated(6, 0.7), step(7), evaluated(12, 0.6), evaluated(18, 0.1)]
    assert sweep.collapsed(curve) == {"step": 12, "by": "greedy"}


def test_a_policy_that_is_certain_has_collapsed_only_where_it_is_wrong() -> None:
    assert sweep.collapsed([step(1), step(2, entropy=0.01, reward=0.95)]) is None
    assert sweep.collapsed([step(1), step(2, entropy=0.01, reward=0.2)]) == {"step": 2, "by": "entropy"}


def test_the_table_has_a_row_for_each_name_with_means_and_errors_over_seeds() -> None:
    curves = [[{"step": 0, "greedy": 0.1, "greedy_stderr": 0.03}, step(1), evaluated(2, end)] for end in (0.6, 0.8)]
    lines = [{"name": "1e-5", "seed": seed, "collapsed": None, "curve": curve} for seed, curve in enumerate(curves)]
    fallen = {"name": "1e-4", "seed": 0, "collapsed": {"step": 2, "by": "greedy"}, "curve": curves[0]}
    assert sweep.table([*lines, fallen]).splitlines()[2:] == [
        "| 1e-5 | 2 | 0.100 ± 0.000 | 0.700 ± 0.100 | 0.350 ± 0.050 | 1.00, 1.00 | 0.50 | - | 2.0 |",
        "| 1e-4 | 1 | 0.100 | 0.600 | 0.300 | 1.00, 1.00 | 0.50 | 2 (greedy) | 2.0 |",
    ]


def test_every_run_of_the_grid_has_settings_that_load_and_all_of_a_seed_come_before_the_next(tmp_path: Path) -> None:
    runs = sweep.grid([], [0, 1], Path("checkpoints/tiny-sort"), tmp_path, 24)
    assert [run.seed for run in runs] == sorted(run.seed for run in runs)
    assert len({run.folder for run in runs}) == len(runs)
    for run in runs:
        loaded = config.load(None, [f"{key}={value}" for key, value in run.settings.items()])
        assert loaded.rollout.prompts_per_step * loaded.rollout.group_size == 64
        assert (loaded.trainer.steps, loaded.eval.every_steps) == (24, 6)


def test_what_has_a_line_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = []

    class Ends(sweep.Run):
        def start(self, stack: Any, cores: set[int]) -> None:
            started.append(self.name)

        def ended(self) -> bool:
            return True

        def line(self) -> dict[str, Any]:
            return {"name": self.name, "seed": self.seed, "collapsed": None, "curve": [evaluated(0, 0.1), step(1)]}

    monkeypatch.setattr(sweep, "row_of", lambda *_: "")
    monkeypatch.setattr(sweep.time, "sleep", lambda _: None)
    done = {"name": "a", "seed": 0, "collapsed": None, "curve": []}
    failed = {"name": "b", "seed": 0, "failed": "out of memory"}
    (tmp_path / "runs.jsonl").write_text(json.dumps(done) + "\n" + json.dumps(failed) + "\n")
    sweep.play([Ends(name, 0, {}, tmp_path) for name in "abc"], tmp_path, 1)
    assert started == ["b", "c"]
    assert [line["name"] for line in sweep.results(tmp_path)] == ["a", "b", "b", "c"]


def test_a_step_s_seconds_are_those_without_its_evaluation_and_signal_is_the_share_of_unequal_groups() -> None:
    row = {"step": 6, "time/step": 9.0, "time/eval": 4.0, "rollout/zero_variance": 0.25, "reward/mean": 0.5}
    assert sweep.point(row) == {"step": 6, "reward": 0.5, "signal": 0.75, "seconds": 5.0}
    assert sweep.point({"step": 0, "eval/greedy": 0.1}) == {"step": 0, "greedy": 0.1}
