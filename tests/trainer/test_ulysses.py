"""Rows that several ranks compute together: the steps of one rank, of every loss and ZeRO stage."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file
from tests.trainer import worker
from tests.trainer.builders import make_trainer
from tests.trainer.test_ranks import run_together

from hocket.errors import ConfigError
from hocket.trainer.ranks import Ranks

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def splits(tied_model: str, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    root = tmp_path_factory.mktemp("splits")
    for size in (1, 2, 4):
        run_together(size, root / str(size), [("splits", tied_model)])
    return {size: root / str(size) / "splits-tied" for size in (1, 2, 4)}


@pytest.mark.parametrize(("size", "parts"), [(2, 2), (4, 2), (4, 4)])
@pytest.mark.parametrize("name", worker.SPLITS)
def test_ranks_that_divide_rows_train_like_one_rank(splits: dict[int, Path], name: str, size: int, parts: int) -> None:
    alone, folder = splits[1] / f"1 {name}", splits[size] / f"{parts} {name}"
    expected, found = (json.loads((one / "found.json").read_text()) for one in (alone, folder))
    for before, now in zip(expected["stats"], found["stats"], strict=True):
        timed = ("tokens_per_s", "mfu", "time/", "positions_per_s", "micro_batches", "shared")
        compared = {key: value for key, value in before.items() if not any(word in key for word in timed)}
        assert {key: now[key] for key in compared} == pytest.approx(compared, rel=1e-4, abs=1e-5, nan_ok=True)
    assert found["gap"] == pytest.approx(expected["gap"], abs=1e-6)
    file = "adapter_model.safetensors" if name == "lora" else "model.safetensors"
    weights, theirs = (load_file(one / file) for one in (alone, folder))
    for key, tensor in weights.items():
        gap = (theirs[key] - tensor).abs()
        assert int((gap > 1e-5).sum()) < 5  # AdamW makes a step of rounding where a gradient is near 0
        assert float(gap.max()) < 5e-4


def test_parts_that_do_not_divide_the_ranks_are_refused(ranks: Ranks, tied_model: str) -> None:
    with pytest.raises(ConfigError, match="sequence_parallel=2 does not divide the 1 ranks: set a divisor"):
        make_trainer(ranks, tied_model, "trainer.sequence_parallel=2")
