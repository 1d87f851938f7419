"""One trainer process of a test: `worker.py SCENARIO MODEL OUTPUT`, started once per rank."""

import dataclasses
import json
import math
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from hocket import config as config_module
from hocket.algorithm.losses import LossOutput
from hocket.trainer import engine
from hocket.trainer.batching import TrainBatch
from hocket.trainer.ranks import Ranks
from hocket.trainer.trainer import Trainer
from hocket.types import TrainSample

SETTINGS = (
    "model.dtype=float32",
    "trainer.learning_rate=1e-3",
    "trainer.weight_decay=0.1",
    "trainer.schedule=linear",
    "trainer.warmup_steps=2",
    "trainer.steps=6",
    "trainer.max_grad_norm=0.3",
    "trainer.micro_batch_tokens=40",
    "trainer.logprob_chunk_tokens=4",
    "trainer.max_skipped_steps=2",
)


MATRIX = {
    "ZeRO-0": ("trainer.zero_stage=0",),
    "ZeRO-0, one micro-batch": ("trainer.zero_stage=0", "trainer.micro_batch_tokens=1000"),
    "ZeRO-1": ("trainer.zero_stage=1",),
    "ZeRO-1, smallest micro-batches, reversed": ("trainer.zero_stage=1", "trainer.micro_batch_tokens=19"),
    "ZeRO-2": ("trainer.zero_stage=2",),
    "ZeRO-2, one micro-batch, recomputed": (
        "trainer.zero_stage=2",
        "trainer.micro_batch_tokens=1000",
        "trainer.gradient_checkpointing=true",
    ),
    "ZeRO-2, offloaded": ("trainer.zero_stage=2", "trainer.offload_optimizer=true"),
    "ZeRO-3": ("trainer.zero_stage=3",),
    "ZeRO-3, smallest micro-batches, whole logits": (
        "trainer.zero_stage=3",
        "trainer.micro_batch_tokens=19",
        "trainer.logprob_chunk_tokens=1000",
    ),
    "ZeRO-3, offloaded, recomputed, reversed": (
        "trainer.zero_stage=3",
        "trainer.offload_optimizer=true",
        "trainer.gradient_checkpointing=true",
    ),
}
"""Ways to take the same steps in float32; every name says what is not as in SETTINGS."""


def make_samples(step: int) -> list[TrainSample]:
    rng = random.Random(step)
    samples = []
    for _ in range(7):
        length, prompt = rng.randint(4, 20), rng.randint(1, 3)
        mask = tuple(index >= prompt for index in range(length))
        samples.append(
            TrainSample(
                token_ids=tuple(rng.randrange(62) for _ in range(length)),
                mask=mask,
                rollout_logprobs=tuple(-2 - 4 * rng.random() if m else 0.0 for m in mask),
                advantage=rng.gauss(0, 1),
            )
        )
    return samples


def make_config(model: str, *settings: str) -> config_module.Config:
    # No server is asked here; the ranks' own deadline must be the longest.
    waits = ["server.start_timeout_s=5", "rollout.timeout_s=5", "sync.timeout_s=5"]
    return config_module.load(None, [*SETTINGS, *waits, f"model.path={model}", *settings])


def shard_everything() -> None:
    """Has ZeRO-3 spread small parameters over the ranks, too."""
    original = engine.deepspeed_config

    def config(*args: object, **kwargs: object) -> dict[str, object]:
        values = original(*args, **kwargs)  # type: ignore[arg-type]
        values["zero_optimization"]["stage3_param_persistence_threshold"] = 0
        return values

    engine.deepspeed_config = config  # type: ignore[assignment]


def stages(model: str, output: Path) -> None:
    """Three steps, one that is not finite, one more; then back to the checkpoint and that last step again."""
    shard_everything()
    ranks = Ranks(timeout_s=60)
    for stage in range(4):
        trainer = Trainer(make_config(model, f"trainer.zero_stage={stage}"), ranks=ranks)
        if not trainer.is_main:
            trainer.follow()
            continue
        with trainer:
            folder = output / str(stage)
            stats = [trainer.step(make_samples(step)) for step in range(3)]
            trainer.export(folder / "before")
            bad = make_samples(3)
            bad[4] = dataclasses.replace(bad[4], advantage=math.nan)
            stats.append(trainer.step(bad))
            trainer.export(folder / "skipped")
            trainer.save(folder / "checkpoint")
            stats.append(trainer.step(make_samples(4)))
            trainer.export(folder / "after")
            trainer.load(folder / "checkpoint")
            stats.append(trainer.step(make_samples(4)))
            trainer.export(folder / "again")
            (folder / "stats.json").write_text(json.dumps([dataclasses.asdict(s) for s in stats]))
    ranks.close()


def matrix(model: str, output: Path) -> None:
    """Two steps of every cell in MATRIX."""
    shard_everything()
    ranks = Ranks(timeout_s=60)
    assert ranks.smallest(10 - ranks.rank) == 11 - ranks.size
    for name, settings in MATRIX.items():
        trainer = Trainer(make_config(model, *settings), ranks=ranks)
        if not trainer.is_main:
            trainer.follow()
            continue
        with trainer:
            order = -1 if "reversed" in name else 1
            stats = [dataclasses.asdict(trainer.step(make_samples(step)[::order])) for step in range(2)]
            trainer.export(output / name)
            (output / name / "stats.json").write_text(json.dumps(stats))
    ranks.close()


def streams(model: str, output: Path) -> None:
    """Each ZeRO stage streams its weights after a step, once in pieces to a sink that fails, then as a whole."""
    shard_everything()
    ranks = Ranks(timeout_s=60)
    for stage in range(4):
        trainer = Trainer(make_config(model, f"trainer.zero_stage={stage}"), ranks=ranks)
        if not trainer.is_main:
            trainer.follow()
            continue
        with trainer:
            folder = output / str(stage)
            folder.mkdir()
            trainer.step(make_samples(0))
            taken: list[tuple[str, torch.Tensor]] = []

            def broken(bucket: object) -> None:
                raise OSError("the wire is cut")

            def take(bucket: Sequence[tuple[str, torch.Tensor]], taken: list[tuple[str, torch.Tensor]] = taken) -> None:
                taken.extend((name, tensor.clone()) for name, tensor in bucket)

            try:
                trainer.stream(4096, broken)
            except OSError as error:
                (folder / "failure").write_text(str(error))
            layout = [item.model_dump() for bucket in trainer.layout(4096) for item in bucket]
            trainer.stream(4096, take)
            (folder / "layout.json").write_text(json.dumps(layout))
            save_file(dict(taken), folder / "streamed.safetensors")
            (folder / "gap").write_text(repr(trainer.logprob_gap(make_samples(1))))
            trainer.export(folder / "exported")
    ranks.close()


def adapter(model: str, output: Path) -> None:
    """Three steps on an adapter, which is published both ways."""
    shard_everything()
    ranks = Ranks(timeout_s=60)
    for stage in (1, 2, 3):
        trainer = Trainer(make_config(model, f"trainer.zero_stage={stage}", "model.lora.rank=4"), ranks=ranks)
        if not trainer.is_main:
            trainer.follow()
            continue
        with trainer:
            stats = [dataclasses.asdict(trainer.step(make_samples(step))) for step in range(3)]
            trainer.export(output / str(stage))
            streamed: dict[str, torch.Tensor] = {}
            trainer.stream(4096, lambda named: streamed.update((name, t.clone()) for name, t in named))  # noqa: B023
            save_file(streamed, output / str(stage) / "streamed")
            (output / str(stage) / "stats.json").write_text(json.dumps(stats))
    ranks.close()


def main_fails(model: str, output: Path) -> None:
    """Rank 0 raises between two steps."""
    trainer = Trainer(make_config(model, "trainer.collective_timeout_s=60"))
    if not trainer.is_main:
        trainer.follow()
        (output / "released").touch()
        return
    with trainer:
        trainer.step(make_samples(0))
        raise ValueError("rank 0 has a problem of its own")


def rank_dies(model: str, output: Path) -> None:
    """Rank 1 is killed in the middle of a step, at its second micro-batch."""
    del output
    break_down(model, lambda: os.kill(os.getpid(), signal.SIGKILL), "trainer.collective_timeout_s=60")


def rank_hangs(model: str, output: Path) -> None:
    """Rank 1 stops answering in the middle of a step, while rank 0 waits for its share of the gradients."""
    del output
    break_down(model, lambda: time.sleep(1000), "trainer.collective_timeout_s=20", "trainer.zero_stage=2")


def break_down(model: str, happen: Callable[[], object], *settings: str) -> None:
    micro_batches = 0

    def deadly(logprobs_bt: torch.Tensor, batch: TrainBatch) -> LossOutput:
        nonlocal micro_batches
        micro_batches += 1
        if micro_batches == 2 and os.environ["RANK"] == "1":
            happen()
        return LossOutput(loss=-logprobs_bt.sum() / batch.num_tokens_global, metrics={})

    trainer = Trainer(make_config(model, "trainer.micro_batch_tokens=20", *settings), loss=deadly)
    if not trainer.is_main:
        trainer.follow()
    with trainer:
        for step in range(3):
            trainer.step(make_samples(step))


def main(arguments: Sequence[str]) -> None:
    scenario, model, output = arguments
    scenarios = {
        "stages": stages,
        "matrix": matrix,
        "streams": streams,
        "adapter": adapter,
        "main_fails": main_fails,
        "rank_dies": rank_dies,
        "rank_hangs": rank_hangs,
    }
    scenarios[scenario](model, Path(output))


if __name__ == "__main__":
    main(sys.argv[1:])
