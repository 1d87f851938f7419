"""Pairs on several ranks: a step on them is the same however it is divided."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file
from tests.trainer import worker
from tests.trainer.conftest import make_model
from tests.trainer.test_ranks import run_together

from support.training import untimed

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pairs")
    model = make_model(root / "tied", tied=True)
    for size in (1, 2, 3):
        run_together(size, root / str(size), [("pairs", model)])
    return root


@pytest.mark.parametrize("stage", ["dpo", "rm"])
@pytest.mark.parametrize("cell", worker.PAIRS)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_steps_on_pairs_are_the_same_whatever_the_micro_batches_the_ranks_and_the_zero_stage(
    runs: Path, stage: str, cell: str, size: int
) -> None:
    if (cell, size) == ("rows divided", 3):
        pytest.skip("three ranks can't divide four heads")
    first = "lora" if "lora" in cell else "ZeRO-0"
    alone, folder = runs / "1" / "pairs-tied" / stage / first, runs / str(size) / "pairs-tied" / stage / cell
    expected, found = (json.loads((one / "found.json").read_text()) for one in (alone, folder))
    of_layout = {"train/shared", "train/micro_batches"}
    for before, now in zip(expected["stats"], found["stats"], strict=True):
        compared = {key: value for key, value in untimed(before).items() if key not in of_layout}
        assert now["train/loss"] == pytest.approx(before["train/loss"], abs=1e-6)
        assert {key: now[key] for key in compared} == pytest.approx(compared, rel=1e-5, abs=5e-6)
        assert 0.1 < before["train/loss"] < 5
    assert found["evaluated"] == pytest.approx(expected["evaluated"], rel=1e-6, abs=1e-6)
    assert expected["evaluated"]["loss"] < expected["stats"][0]["train/loss"]
    file = "adapter_model.safetensors" if (stage, first) == ("dpo", "lora") else "model.safetensors"
    weights, others = (load_file(one / file) for one in (alone, folder))
    assert weights.keys() == others.keys()
    for name, tensor in weights.items():
        gap = (others[name] - tensor).abs()
        assert int((gap > 1e-6).sum()) < 5, name  # AdamW makes a step of rounding where a gradient is near 0
        assert float(gap.max()) < 5e-4, name
