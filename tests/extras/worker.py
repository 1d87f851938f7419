"""Scenarios of extras among ranks, which tests/trainer/worker.py runs with its own."""

import dataclasses
import functools
import json
import sys
from pathlib import Path

from tests.extras.stages.runs import make_pairs
from tests.trainer import worker

from hocket.config import Config
from hocket.extras import long_rows
from hocket.extras.stages import stage_of
from hocket.extras.stages.pairs import sample
from hocket.trainer.objective import Objective
from hocket.trainer.ranks import Ranks

PAIRS = {
    "ZeRO-0": "trainer.zero_stage=0",
    "not shared, one micro-batch": "trainer.zero_stage=0 trainer.share_prefixes=false trainer.micro_batch_tokens=1000",
    "ZeRO-1": "trainer.zero_stage=1",
    "ZeRO-2, one micro-batch": "trainer.zero_stage=2 trainer.micro_batch_tokens=1000",
    "ZeRO-3": "trainer.zero_stage=3 trainer.gradient_checkpointing=true",
    "rows divided": "trainer.zero_stage=1 trainer.sequence_parallel=SIZE",
    "lora": "trainer.zero_stage=0 model.lora.rank=4",
    "lora, ZeRO-3": "trainer.zero_stage=3 model.lora.rank=4",
}
"""Ways to take the same steps on pairs; those with lora differ from the others."""


def pairs(model: str, output: Path, ranks: Ranks) -> None:
    """Two steps of dpo and of rm on the same pairs, and what is measured of these behind them."""
    cells = {
        name: [*cell.replace("SIZE", str(ranks.size)).split(), "data.chat_template=false"]
        for name, cell in PAIRS.items()
    }
    if ranks.size == 3:
        del cells["rows divided"]  # there are four heads
    for stage in ("dpo", "rm"):
        sides = [side for pair in make_pairs(11) for side in (pair.chosen, pair.rejected)]
        samples = [sample(side, ref_logprobs=-20.0 - place, margins=0.1) for place, side in enumerate(sides)]
        if stage == "rm":
            ends = [dataclasses.replace(side, mask=(*(False,) * (len(side.mask) - 1), True)) for side in sides]
            samples = [sample(end, margins=0.1) for end in ends]
        objective = functools.partial(objective_of, stage)
        for name, trainer in worker.led(model, ranks, cells, objective):
            stats = [trainer.step(samples[step * 10 :]) for step in range(2)]
            found = {"stats": stats, "evaluated": trainer.evaluate(samples)}
            trainer.export(output / stage / name)
            (output / stage / name / "found.json").write_text(json.dumps(found))


def objective_of(stage: str, config: Config) -> Objective | None:
    return stage_of(stage, getattr(config, stage)).objective(config.model)


def tiles(model: str, output: Path, ranks: Ranks) -> None:
    """Two steps with MLPs in tiles, and without."""
    worker.MATRIX = TILES
    worker.matrix(model, output, ranks)


TILES = {"ZeRO-0": "zero_stage=0", "ZeRO-3, MLPs in tiles": "zero_stage=3 gradient_checkpointing=long"}
SPLITS_OF = {  # by number of ranks; each number of them that divide a row
    1: worker.SPLITS_OF[1],
    2: [f"2 {name}" for name in worker.SPLITS],
    4: ["2 sequence mask", "2 ZeRO-3", "4 ZeRO-3"],
}

if __name__ == "__main__":
    long_rows.TILE = 2
    worker.SPLITS_OF |= SPLITS_OF
    worker.COMMON |= {scenario.__name__: scenario for scenario in (pairs, tiles)}
    worker.main(sys.argv[1:])
