"""Pairs on several ranks: a step on them is the same however it is divided."""

import functools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.extras import worker
from tests.trainer.conftest import make_model
from tests.trainer.test_ranks import run_together

from support.training import POSITIONS, additions, assert_near, untimed

pytestmark = [pytest.mark.ranks, pytest.mark.long]
MOVED = 1.5e-3
"""How far AdamW moves a weight at most: by the worker's SETTINGS half of the rate 1e-3, then the whole."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """Gives the folder of the runs of so many ranks, beside the model's."""
    root = tmp_path_factory.mktemp("pairs")
    model = make_model(root / "tied", tied=True)

    @functools.cache
    def of_ranks(size: int) -> Path:
        run_together(size, root / str(size), [("pairs", model)], worker.__file__)
        return root / str(size) / "pairs-tied"

    return of_ranks


@pytest.mark.parametrize("stage", ["dpo", "rm"])
@pytest.mark.parametrize("cell", worker.PAIRS)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_steps_on_pairs_are_the_same_whatever_the_micro_batches_the_ranks_and_the_zero_stage(
    runs: Callable[[int], Path], stage: str, cell: str, size: int
) -> None:
    if (cell, size) == ("rows divided", 3):
        pytest.skip("three ranks can't divide four heads")
    first = "lora" if "lora" in cell else "ZeRO-0"
    alone, folder = runs(1) / stage / first, runs(size) / stage / cell
    expected, found = (json.loads((one / "found.json").read_text()) for one in (alone, folder))
    model = str(runs(1).parents[1] / "tied")
    for before, now in zip(expected["stats"], found["stats"], strict=True):
        compared = untimed(before).keys() - {"train/shared"}
        # Means of sums of log-probs, and what is made of these; the norm is the root of a sum over all weights.
        assert_near([now[key] for key in compared], [before[key] for key in compared], additions(model) + POSITIONS)
        assert 0.1 < before["train/loss"] < 5
    names = expected["evaluated"].keys()
    assert found["evaluated"].keys() == names
    assert_near(*([one["evaluated"][key] for key in names] for one in (found, expected)), additions(model) + POSITIONS)
    assert expected["evaluated"]["loss"] < expected["stats"][0]["train/loss"]
    file = "adapter_model.safetensors" if (stage, first) == ("dpo", "lora") else "model.safetensors"
    weights, others = (load_file(one / file) for one in (alone, folder))
    assert weights.keys() == others.keys()
    gap = torch.cat([(others[name] - tensor).flatten() for name, tensor in weights.items()])
    # AdamW takes a step as large as any where a gradient is nothing but rounding, and may do so in the other direction:
    # a gap of 5 % of all that both steps moved has that of one weight in 1,600. A pair left out moves most of them.
    assert gap.abs().max() <= 2.1 * MOVED
    assert gap.norm() < 0.05 * MOVED * len(gap) ** 0.5
