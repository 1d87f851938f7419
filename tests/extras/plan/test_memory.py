"""A plan's bytes beside those of a trainer."""

import gc

import pytest
from tests.trainer.test_memory import make_trainer, samples

from hocket.extras.plan.plan import OFFLOADED
from hocket.trainer.ranks import Ranks
from support.training import bytes_besides, storages


@pytest.mark.long
@pytest.mark.parametrize("stage", [2, 3])
def test_a_plan_knows_the_bytes_that_are_kept_off_a_gpu(ranks: Ranks, wide_model: str, stage: int) -> None:
    before, bucket = storages(), 131_072  # as large as the largest parameter, allocated by ZeRO-3
    settings = ("trainer.offload_optimizer=true", f"trainer.zero_stage={stage}", "model.dtype=bfloat16")
    small = f"trainer.deepspeed.zero_optimization.reduce_bucket_size={bucket}"
    with make_trainer(ranks, wide_model, *settings, small) as trainer:
        trainer.step(samples(64))
        gc.collect()
        held = bytes_besides(before) - (4 * bucket if stage == 3 else 0)
        assert held / trainer.num_parameters == pytest.approx(2 + OFFLOADED[stage], rel=0.02)  # weights stay
