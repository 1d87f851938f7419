"""Training state leaves the device and comes back; the CPU runs the same code, and its storages are really emptied."""

import dataclasses
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.trainer import builders

from hocket.errors import TrainerError
from hocket.trainer.offload import offload, onload
from hocket.trainer.ranks import Ranks
from hocket.trainer.trainer import Trainer

CPU = torch.device("cpu")
SAMPLE = builders.sample_of(builders.sequence((3, 1, 4, 1, 5), 1))


def make_trainer(ranks: Ranks, model: str, stage: int, dtype: str, *more: str) -> Trainer:
    return builders.make_trainer(ranks, model, f"model.dtype={dtype}", f"trainer.zero_stage={stage}", *more)


def storages() -> dict[int, torch.UntypedStorage]:
    """What holds the tensors of this process, but for model files mapped into the CPU's memory.

    While the caller keeps it none of it can go, which parts of earlier trainers otherwise do at any time: DeepSpeed's
    own globals refer to an engine until there is another.
    """
    tensors = [value for value in gc.get_objects() if issubclass(type(value), torch.Tensor) and value.device == CPU]
    found = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
    return {key: storage for key, storage in found.items() if storage.resizable()}


def bytes_besides(before: dict[int, torch.UntypedStorage]) -> int:
    return sum(storage.nbytes() for key, storage in storages().items() if key not in before)


def test_views_and_aliases_are_the_same_again() -> None:
    flat = torch.arange(6.0)
    view, alias = flat[2:4], flat.detach()
    moved = offload(iter([view]), CPU)
    assert flat.untyped_storage().nbytes() == 0
    assert [host.numel() for _, host in moved] == [24]  # the whole buffer that it is a view of
    onload(moved, CPU)
    alias[2] = 7.0
    assert view.tolist() == [7.0, 3.0]
    assert flat.tolist() == [0.0, 1.0, 7.0, 3.0, 4.0, 5.0]


@pytest.mark.parametrize(
    ("stage", "dtype"), [(0, "float32"), (0, "bfloat16"), (1, "bfloat16"), (2, "float32"), (3, "bfloat16")]
)
def test_a_trainer_that_leaves_between_steps_trains_the_same_to_the_last_bit(
    ranks: Ranks, tied_model: str, stage: int, dtype: str, tmp_path: Path
) -> None:
    weights: dict[bool, Any] = {}
    for leaves in (False, True):
        with make_trainer(ranks, tied_model, stage, dtype) as trainer:
            for _ in range(3):
                if leaves:
                    trainer.offload()
                    trainer.onload()
                trainer.step([SAMPLE])
            trainer.export(tmp_path / str(leaves))
        weights[leaves] = load_file(tmp_path / str(leaves) / "model.safetensors")
    assert all(torch.equal(weights[True][name], weights[False][name]) for name in weights[False])
    start = load_file(Path(tied_model) / "model.safetensors")
    assert any(not torch.equal(weights[True][name].float(), start[name]) for name in start)


PPO = ("algorithm.preset=ppo", "algorithm.kl=k2", "algorithm.kl_coef=0.1")


@pytest.mark.parametrize(
    ("stage", "dtype", "settings"),
    [(0, "float32", ()), (1, "float32", PPO), (2, "bfloat16", ()), (3, "bfloat16", ()), (3, "float32", PPO)],
)
def test_nothing_of_the_training_state_stays(
    ranks: Ranks, untied_model: str, stage: int, dtype: str, settings: tuple[str, ...]
) -> None:
    gc.collect()  # what went before; a step itself must leave nothing that only a collection would free
    before = storages()
    with make_trainer(ranks, untied_model, stage, dtype, *settings) as trainer:
        known = [dataclasses.asdict(measured) for measured in trainer.measure([SAMPLE.sequence])]
        returns = {"returns": (0.0, 1.0, 1.0, 1.0, 1.0)} if settings else {}
        trainer.step([dataclasses.replace(SAMPLE, **returns, **(known[0] if known else {}))])
        expected, on = trainer.measure([SAMPLE.sequence]), bytes_besides(before)
        assert len(trainer.models.engines) == (3 if settings else 1)
        trainer.offload()
        assert trainer._away is not None
        moved = sum(host.numel() for _, host in trainer._away)
        assert on > 8 * trainer.num_parameters  # two moments at least
        assert bytes_besides(before) - moved < 0.02 * on  # on a CPU the copies are tensors of the same device
        trainer.onload()
        # gloo's thread holds what was sent last a moment longer: some sums, or the gradients
        assert bytes_besides(before) == pytest.approx(on, abs=4 * trainer.num_parameters + 200)
        assert trainer.measure([SAMPLE.sequence]) == expected


def test_while_it_is_away_it_refuses_to_work_and_can_be_closed(ranks: Ranks, tied_model: str, tmp_path: Path) -> None:
    with make_trainer(ranks, tied_model, 1, "float32") as trainer:
        trainer.onload()  # it is there already
        trainer.offload()
        trainer.offload()
        for work in (lambda: trainer.step([SAMPLE]), lambda: trainer.export(tmp_path)):
            with pytest.raises(TrainerError, match="off the GPU"):
                work()
