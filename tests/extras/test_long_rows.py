from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.extras import worker
from tests.trainer.conftest import peak  # noqa: F401 - for each test here
from tests.trainer.test_ranks import assert_same_steps, reference, run_together  # noqa: F401
from tests.trainer.test_vision import check_rehearsal
from torch import Tensor

from hocket.extras import long_rows
from hocket.trainer.ranks import Ranks
from support import training
from support.training import assert_same_metrics, assert_same_states, make_groups, make_trainer, measured, state_of


@pytest.mark.long
@pytest.mark.parametrize("model", ["tied_model", "experts_model"])
def test_tiles_and_copies_on_the_cpu_change_no_step(
    ranks: Ranks, model: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(long_rows, "TILE", 5)
    kept: list[Tensor] = []

    class Watched(torch.autograd.graph.saved_tensors_hooks):
        """Keeps what the backward pass needs, as save_on_cpu does."""

        def __init__(self) -> None:
            super().__init__(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor)

    monkeypatch.setattr(long_rows.LongRows, "forward_pass", lambda self: Watched())
    path = request.getfixturevalue(model)
    samples = make_groups(path, prompt=9)
    found: list[Any] = []
    for how in ("true", "long"):
        with make_trainer(ranks, path, f"trainer.gradient_checkpointing={how}") as trainer:
            stats = trainer.step(measured(trainer, samples))
            found.append((training.untimed(stats) | {"gap": training.gap_of(trainer, samples)}, state_of(trainer)))
    (stats, state), (long_stats, long_state) = found
    assert_same_metrics(long_stats, stats, path)
    assert_same_states(long_state, state, path, updates=1)
    # Each layer keeps what it gets, and of an MLP's tiles what they get.
    assert len(kept) > 2


@pytest.mark.parametrize("scores", [False, True])
def test_an_mlp_sees_no_more_than_a_tile(scores: bool) -> None:
    seen = list[int]()

    def forward(hidden: Tensor) -> Any:
        seen.append(hidden.shape[1])
        return (2 * hidden, 3 * hidden[0]) if scores else 2 * hidden

    tiled: Callable[[Tensor], Any] = long_rows._in_tiles(forward)
    hidden = torch.randn(1, 10_000, 1, requires_grad=True)
    result = tiled(hidden)
    if scores:
        result, others = result
        assert torch.equal(others, 3 * hidden[0])
    assert torch.equal(result, 2 * hidden)
    assert seen == [4096, 4096, 1808]
    result.sum().backward()
    assert max(seen) == 4096
    assert torch.equal(hidden.grad, torch.full_like(hidden, 2.0))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def tiled(tied_model: str, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """By number of ranks, the folder with one for each SCENARIO-MODEL of worker.py."""
    root = tmp_path_factory.mktemp("tiled")
    for size in (1, 2):
        run_together(size, root / str(size), [("tiles", tied_model)], worker.__file__)
    return {size: root / str(size) for size in (1, 2)}


@pytest.mark.ranks
@pytest.mark.long
@pytest.mark.parametrize("size", [1, 2])
def test_steps_in_tiles_are_those_of_plain_torch_on_one_rank_and_on_two(
    tiled: dict[int, Path],
    reference: dict[str, Any],  # noqa: F811
    tied_model: str,
    size: int,
) -> None:
    first, folder = tiled[1] / "tiles-tied" / "ZeRO-0", tiled[size] / "tiles-tied" / "ZeRO-3, MLPs in tiles"
    assert_same_steps(folder, first, reference, tied_model)


@pytest.mark.parametrize("model", ["tiny_vlm", "tiny_qwen_vl"])
def test_a_step_in_tiles_is_rehearsed_with_sequences_full_of_pictures(
    ranks: Ranks, model: str, request: pytest.FixtureRequest
) -> None:
    check_rehearsal(ranks, request.getfixturevalue(model), "trainer.gradient_checkpointing=long")
