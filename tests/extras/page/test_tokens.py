"""What training made of a step's rollouts, kept for the page."""

import json
from pathlib import Path
from unittest.mock import Mock

import pytest

from hocket.extras.page import tokens
from hocket.extras.page.tokens import keep
from hocket.observe.rows import read_lines
from hocket.trainer.trainer import Trainer
from hocket.types import Columns, TrainSample
from support.records import sequence
from support.training import make_samples

SAMPLES = [TrainSample(sequence=sequence(2, 3), advantages=(0.0, 0.25, 0.75), id="g/0")]


def test_each_sequence_has_its_mean_advantage(tmp_path: Path) -> None:
    keep(tmp_path, None, 3, SAMPLES)
    assert read_lines(tmp_path / "trained/step_000003.jsonl") == [{"id": "g/0", "advantage": 0.5}]


def test_with_a_way_to_measure_each_token_has_its_numbers_too(tmp_path: Path) -> None:
    def measure(samples: object) -> list[Columns]:
        assert samples == SAMPLES
        return [{"logprobs": (0.0, -1.00004, -2.5), "entropy": (0.0, 0.123456, 2.0)}]

    keep(tmp_path, measure, 3, SAMPLES)
    (row,) = read_lines(tmp_path / "trained/step_000003.jsonl")
    assert row == {"id": "g/0", "advantage": 0.5, "advantages": [0.0, 0.25, 0.75], "trainer": [0.0, -1.0, -2.5],
                   "entropy": [0.0, 0.1235, 2.0]}  # fmt: skip


def test_the_numbers_of_tokens_for_the_page_take_one_forward_pass(
    trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = Mock(wraps=trainer.engine.forward)
    monkeypatch.setattr(trainer.engine, "forward", forward)
    tokens.keep(tmp_path, trainer.numbers, 1, make_samples())
    assert forward.call_count == 1
    rows = [json.loads(line) for line in (tmp_path / "trained" / "step_000001.jsonl").read_text().splitlines()]
    assert all(len(row["trainer"]) == len(row["entropy"]) == 9 for row in rows)
