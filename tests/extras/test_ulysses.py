"""Rows that several ranks compute together; on those of worker.py, too."""

import concurrent.futures
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.extras import worker
from tests.trainer import test_meta as meta
from tests.trainer.conftest import peak  # noqa: F401 - for each test here
from tests.trainer.test_meta import Waiting, model, waiting  # noqa: F401
from tests.trainer.test_ranks import ALIKE, assert_like_one, run_together
from torch import Tensor, nn

from hocket.config import ModelConfig, TrainerConfig
from hocket.errors import ConfigError
from hocket.extras import ulysses
from hocket.extras.ulysses import Split
from hocket.trainer import attention, memory
from hocket.trainer.attention import Segments, attend
from hocket.trainer.policy import skeleton
from hocket.trainer.ranks import Ranks
from support.training import CPU, assert_near, make_trainer


@pytest.mark.parametrize(("heads", "key_heads", "size"), [(4, 2, 2), (4, 2, 4), (4, 1, 2), (6, 3, 2), (12, 4, 6)])
def test_attention_of_ranks_is_that_of_one(
    heads: int, key_heads: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    barrier = threading.Barrier(size, timeout=60)
    sent: dict[int, Tensor] = {}

    def exchange(_: Tensor, parts: Tensor, group: int) -> Tensor:
        """Stands for all_to_all among threads; the group is the rank's number."""
        sent[group] = parts
        barrier.wait()
        received = torch.stack([sent[rank][group] for rank in range(size)])
        barrier.wait()
        return received

    monkeypatch.setattr(ulysses, "all_to_all_single", exchange)
    layout: Any = ((8, 10, 6), CPU, (0, 0, 4), torch.cat([torch.arange(18), torch.arange(4), torch.arange(18, 24)]))
    query, key, value = (torch.randn(1, n, 24, 8, requires_grad=True) for n in (heads, key_heads, key_heads))
    sinks = torch.randn(heads, requires_grad=True)

    def attended(part: slice, segments: Segments) -> Tensor:
        parts = (tensor[:, :, part] for tensor in (query, key, value))
        return attend(nn.Module(), *parts, None, scaling=0.3, segments=segments, sliding_window=7, s_aux=sinks)[0]

    def of_rank(rank: int) -> Tensor:
        own = slice(rank * 24 // size, (rank + 1) * 24 // size)
        return attended(own, Segments(*layout, Split(size, rank, group=rank)))

    expected = attended(slice(None), Segments(*layout))
    with concurrent.futures.ThreadPoolExecutor(size) as pool:
        found = torch.cat(list(pool.map(of_rank, range(size))), dim=1)
    sums = 8 + 2 * 24  # a score of 8 products; the softmax and the sum of values over what is seen
    assert_near(found, expected, sums)
    weights, inputs = torch.randn_like(expected), (query, key, value, sinks)
    gradients = [torch.autograd.grad((result * weights).sum(), inputs) for result in (found, expected)]
    for gradient, other in zip(*gradients, strict=True):
        assert_near(gradient, other, 3 * sums + heads // key_heads * 24)  # those of a key: of all queries that see it


def test_parts_that_do_not_divide_the_ranks_or_the_heads_of_any_model_are_refused(
    ranks: Ranks, tied_model: str
) -> None:
    with pytest.raises(ConfigError, match="sequence_parallel=2 does not divide the 1 ranks: set a divisor"):
        make_trainer(ranks, tied_model, "trainer.sequence_parallel=2")
    model = ModelConfig(path=tied_model)  # noqa: F811
    models, config = [(model, skeleton(model))], TrainerConfig(sequence_parallel=3)
    with pytest.raises(ConfigError, match=f"sequence_parallel=3 does not divide the 4 attention heads of {tied_model}"):
        memory.needed(models, config, torch.float32, num_ranks=3, on_gpu=False)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["kernel", "groups"])
def test_a_rank_that_computes_a_part_of_each_row_does_so_too(
    ranks: Ranks,
    model: str,  # noqa: F811
    waiting: Waiting,  # noqa: F811
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention, "has_kernel", lambda query, *args: query.is_meta and kind == "kernel")
    monkeypatch.setattr(ulysses, "all_to_all_single", lambda received, parts, group: parts.clone())
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor, **options: None)
    with meta.make_trainer(ranks, model, "algorithm.preset=ppo") as trainer:
        trainer.ranks.part = ulysses.Split(2, 0, group=None)
        meta.train(trainer, meta.samples(2, 128))
    assert waiting.met >= {"trainer.step.accumulate", "trainer.engine._step_without_zero"}


@pytest.fixture(scope="module")
def divided(tied_model: str, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """By number of ranks, the folder with one for each SCENARIO-MODEL of worker.py."""
    root = tmp_path_factory.mktemp("divided")
    folders = {size: root / str(size) for size in worker.SPLITS_OF}
    for size, folder in folders.items():
        run_together(size, folder, [("splits", tied_model)], worker.__file__)
    return folders


@pytest.mark.ranks
@pytest.mark.long
@pytest.mark.parametrize(
    ("size", "name"), [(size, name) for size, names in worker.SPLITS_OF.items() if size > 1 for name in names]
)
def test_ranks_that_divide_rows_train_like_one_rank(
    divided: dict[int, Path], tied_model: str, size: int, name: str
) -> None:
    like = "1 not shared" if name[2:] in ALIKE else f"1 {name[2:]}"
    assert_like_one(divided[1] / "splits-tied" / like, divided[size] / "splits-tied" / name, tied_model)
