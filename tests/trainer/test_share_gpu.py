"""Training state leaves the device and comes back; the CPU runs the same code, and its storages are really emptied."""

import gc

import pytest
import torch

from hocket.trainer.ranks import Ranks
from hocket.trainer.share_gpu import offload, onload, sizes
from support import training
from support.processes import wait_for
from support.training import CPU, bytes_besides, storages

SAMPLE = training.sample_of(training.sequence((3, 1, 4, 1, 5), 1))


def test_views_and_aliases_are_the_same_again() -> None:
    flat = torch.arange(6.0)
    view, alias = flat[2:4], flat.detach()
    moved = offload(iter([view]), CPU)
    assert flat.untyped_storage().nbytes() == 0
    assert [[host.numel() for host in hosts] for _, hosts in moved] == [[24]]  # the whole buffer that it is a view of
    onload(moved, CPU)
    alias[2] = 7.0
    assert view.tolist() == [7.0, 3.0]
    assert flat.tolist() == [0.0, 1.0, 7.0, 3.0, 4.0, 5.0]


def test_copies_have_sizes_that_pinned_memory_is_not_rounded_to() -> None:
    assert sizes(11 * 2**20 + 5) == [8 * 2**20, 2 * 2**20, 2**20, 5]
    assert sizes(2**30) == [2**30, 0]
    flat = torch.arange(3 * 2**18 + 3, dtype=torch.int32)
    moved = offload(iter([flat]), CPU)
    onload(moved, CPU)
    assert torch.equal(flat, torch.arange(3 * 2**18 + 3, dtype=torch.int32))


PPO = ("algorithm.preset=ppo", "algorithm.kl=k2", "algorithm.kl_coef=0.1")


@pytest.mark.long
@pytest.mark.parametrize(
    ("stage", "dtype", "settings"),  # ZeRO-1 is ZeRO-2's class
    [(0, "float32", ()), (2, "bfloat16", PPO), (3, "bfloat16", PPO)],
)
def test_nothing_of_the_training_state_stays(
    ranks: Ranks, untied_model: str, stage: int, dtype: str, settings: tuple[str, ...]
) -> None:
    gc.unfreeze()  # DeepSpeed's start does, and what a test froze would count as the trainer's
    gc.collect()  # what went before; a step itself must leave nothing that only a collection would free
    before = storages()
    more = (f"model.dtype={dtype}", f"trainer.zero_stage={stage}")
    with training.make_trainer(ranks, untied_model, *more, *settings) as trainer:
        trainer.step(training.measured(trainer, [SAMPLE], returns=1.0))
        expected, on = trainer.measure([SAMPLE.sequence]), bytes_besides(before)
        assert len(trainer.learners) + len(trainer.tensors) == (3 if settings else 1)
        trainer.offload()
        assert trainer.away
        moved = sum(host.numel() for _, hosts in trainer.away for host in hosts)
        assert on > 8 * trainer.num_parameters  # two moments at least
        # On a CPU the copies are tensors of the same device; gloo's thread holds what was sent last a moment longer:
        # some sums, or the gradients.
        wait_for(lambda: bytes_besides(before) - moved < 0.02 * on, "the device is empty")
        trainer.onload()
        held = 4 * trainer.num_parameters + 200  # by that thread, as `on` was measured
        wait_for(lambda: on - held <= bytes_besides(before) <= on, "all is back")
        assert trainer.measure([SAMPLE.sequence]) == expected
