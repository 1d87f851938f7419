"""benchmarks/curve.py with curves that are written by hand; nothing here is a real run."""

import json
import sys
import xml.etree.ElementTree
from pathlib import Path
from typing import Any

import pytest
import torch

from hocket.common.registry import load_plugin

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import curve


def line(who: str, seed: int, greedy: float) -> dict[str, Any]:
    accuracies = {"0": 0.1, "2": greedy}
    return {"who": who, "seed": seed, "rewards": [0.2, greedy], "greedy": accuracies, "seconds": [9.0, 2.0 + seed]}


LINES = [line("hocket", 0, 0.6), line("hocket", 1, 0.8), line("TRL", 0, 0.5)]


def test_points_are_means_over_seeds_with_their_standard_errors() -> None:
    assert curve.points(LINES, "hocket", "greedy") == [(0, 0.1, 0.0), (2, pytest.approx(0.7), pytest.approx(0.1))]
    assert curve.points(LINES, "TRL", "rewards") == [(1, 0.2, 0.0), (2, 0.5, 0.0)]


def test_the_table_has_the_accuracies_of_both_and_the_median_seconds_of_all_steps_but_the_first() -> None:
    assert curve.table(LINES).splitlines() == [
        "| held-out greedy | seeds | step 0 | step 2 | s a step |",
        "|---|--:|--:|--:|--:|",
        "| hocket | 2 | 0.100 ± 0.000 | 0.700 ± 0.100 | 3.0 |",
        "| TRL | 1 | 0.100 ± 0.000 | 0.500 ± 0.000 | 2.0 |",
    ]


def test_the_picture_is_svg_with_a_line_and_a_band_for_each_library_in_both_panels() -> None:
    drawn = xml.etree.ElementTree.fromstring(curve.picture(LINES))
    names = [element.tag.rpartition("}")[2] for element in drawn]
    assert (names.count("polyline"), names.count("polygon")) == (4, 4)
    texts = [element.text for element in drawn]
    assert "hocket: 3.0 s a step, 2 seeds" in texts
    rewards = next(element for element in drawn if element.tag.endswith("polyline"))
    # Steps 1 and 2 of 2; rewards of .2 and .7: a panel is 380 wide from 50 on, and 240 high from 50 on.
    assert rewards.get("points") == "240.0,242.0 430.0,122.0"


def test_the_average_over_all_completions_divides_by_their_number_and_the_longest(tmp_path: Path) -> None:
    (tmp_path / "aggregate.py").write_text(curve.AGGREGATE)
    plugin = load_plugin(str(tmp_path / "aggregate.py"))
    weights = plugin.all_completions(torch.tensor([[1.0, 1.0, 0.0]]), longest=12, completions=64)
    assert weights.tolist() == [[pytest.approx(1 / 768), pytest.approx(1 / 768), 0.0]]


def test_rows_are_written_in_the_order_in_which_a_run_draws_them(tmp_path: Path) -> None:
    curve.write_rows(tmp_path, 1, 64)
    train, drawn = (
        [json.loads(text) for text in (tmp_path / name).read_text().splitlines()]
        for name in ("train.jsonl", "drawn.jsonl")
    )
    assert drawn != train
    assert sorted(row["prompt"] for row in drawn) == sorted(row["prompt"] for row in train)
    held_out = [json.loads(text)["prompt"] for text in (tmp_path / "test.jsonl").read_text().splitlines()]
    assert len(held_out) == 200
    assert set(held_out).isdisjoint(row["prompt"] for row in train)
