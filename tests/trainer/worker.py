"""One trainer process of a test, started once per rank: `worker.py OUTPUT SCENARIO MODEL [SCENARIO MODEL ...]`.

The scenarios run one after the other among the same ranks, each with a folder of its own, OUTPUT/SCENARIO-MODEL.
"""

import contextlib
import dataclasses
import gc
import importlib
import itertools
import json
import math
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tests.trainer.test_vision import make_seeing

from hocket import config as config_module
from hocket.algorithm.losses import LossOutput
from hocket.trainer import engine, flops, policy, ranks
from hocket.trainer.batching import TrainBatch
from hocket.trainer.objective import Objective
from hocket.trainer.ranks import Ranks
from hocket.trainer.trainer import Trainer
from hocket.types import TrainSample
from support import training
from support.training import bytes_besides, gap_of, load, make_groups, make_rollouts, measured, save, weights_of

SETTINGS = (
    "model.dtype=float32",
    "trainer.learning_rate=1e-3",
    "trainer.weight_decay=0.1",
    "trainer.schedule=linear",
    "trainer.warmup_steps=2",
    "trainer.steps=6",
    "trainer.max_grad_norm=0.3",
    "trainer.micro_batch_tokens=40",
)
ZERO = "trainer.deepspeed.zero_optimization."


# Ways to take the same steps in float32; every name says what is not as in SETTINGS.
MATRIX = {
    "ZeRO-0": "zero_stage=0",
    "ZeRO-0, one micro-batch": "zero_stage=0 micro_batch_tokens=1000",
    "ZeRO-1": "zero_stage=1",
    "ZeRO-1, smallest micro-batches, reversed": "zero_stage=1 micro_batch_tokens=19",
    "ZeRO-2": "zero_stage=2",
    "ZeRO-2, one micro-batch, recomputed": "zero_stage=2 micro_batch_tokens=1000 gradient_checkpointing=true",
    "ZeRO-2, offloaded": "zero_stage=2 offload_optimizer=true",
    "ZeRO-2, overlapped, in small buckets": (
        "zero_stage=2 deepspeed.zero_optimization.overlap_comm=true deepspeed.zero_optimization.reduce_bucket_size=3000"
    ),
    "ZeRO-3": "zero_stage=3",
    "ZeRO-3, smallest micro-batches, whole logits": "zero_stage=3 micro_batch_tokens=19",
    "ZeRO-3, offloaded, recomputed, reversed": "zero_stage=3 offload_optimizer=true gradient_checkpointing=true",
}


CORRECTED = {"correction": "truncate", "clip_low": 0.2, "clip_high": 0.28}


STAGES = {stage: (f"trainer.zero_stage={stage}",) for stage in range(4)}


def make_samples(step: int) -> list[TrainSample]:
    rng = random.Random(step)
    return [training.sample_of(rollout, rng.gauss(0, 1)) for rollout in make_rollouts(11, longest=20, seed=step)]


def make_config(model: str, *settings: str) -> config_module.Config:
    # No server is asked here; the ranks' own deadline must be the longest.
    waits = ["server.start_timeout_s=5", "rollout.timeout_s=5", "sync.timeout_s=4"]
    zero = {"stage3_param_persistence_threshold": 0}  # small ones are spread, too
    others = []
    for setting in settings:  # as the reader of DeepSpeed's settings is an extra
        name, _, value = setting.partition("=")
        if name.startswith(ZERO):
            zero[name.removeprefix(ZERO)] = json.loads(value)
        else:
            others.append(setting)
    config = config_module.load(None, [*SETTINGS, *waits, f"model.path={model}", *others])
    trainer = config.trainer.model_copy(update={"deepspeed": {"zero_optimization": zero}})
    return config.model_copy(update={"trainer": trainer})


def led(
    model: str,
    ranks: Ranks,
    variants: Mapping[Any, Sequence[str]],
    objective: Callable[[config_module.Config], Objective | None] = lambda config: None,
) -> Iterator[tuple[Any, Trainer]]:
    """Yields a trainer for each variant's settings on rank 0, which the others follow."""
    for name, settings in variants.items():
        config = make_config(model, *settings)
        trainer = Trainer(config, ranks=ranks, objective=objective(config))
        if not trainer.ranks.is_main:
            trainer.follow()
            continue
        with trainer:
            yield name, trainer


def resumes(model: str, output: Path, ranks: Ranks) -> None:
    """Each ZeRO stage takes up what 3 - this number of ranks saved at this stage and at the next, and goes on."""
    stages = output.parents[1] / str(3 - ranks.size) / output.name.replace("resumes", "stages")
    for stage, trainer in led(model, ranks, STAGES):
        for other in (stage, (stage + 1) % 4):
            load(trainer, stages / str(other) / "checkpoint")
            again = output / str(stage) / str(other)
            save(trainer, again)
            stats = trainer.step(make_samples(4))
            (again / "stats.json").write_text(json.dumps(stats))


def stages(model: str, output: Path, ranks: Ranks) -> None:
    """Three steps, one that is not finite, one more; then back to the checkpoint and that last step again."""
    bad = make_samples(3)
    bad[4] = dataclasses.replace(bad[4], advantages=(math.nan,) * len(bad[4].advantages))
    for stage, trainer in led(model, ranks, STAGES):
        folder = output / str(stage)
        stats = [trainer.step(make_samples(step)) for step in range(3)]
        trainer.export(folder / "before")
        stats.append(trainer.step(bad, keep=folder / "skipped.json"))
        trainer.export(folder / "skipped")
        save(trainer, folder / "checkpoint")
        stats.append(trainer.step(make_samples(4)))
        trainer.export(folder / "after")
        load(trainer, folder / "checkpoint")
        stats.append(trainer.step(make_samples(4)))
        trainer.export(folder / "again")
        (folder / "stats.json").write_text(json.dumps(stats))


def matrix(model: str, output: Path, ranks: Ranks) -> None:
    """Two steps of every cell in MATRIX."""
    assert ranks.smallest(10 - ranks.rank) == 11 - ranks.size
    cells = {name: [f"trainer.{one}" for one in cell.split()] for name, cell in MATRIX.items()}
    for cell, settings in cells.items():
        policy.CHUNK_TOKENS = 1000 if "whole logits" in cell else 4
        for name, trainer in led(model, ranks, {cell: settings}):
            order = -1 if "reversed" in name else 1
            stats = [trainer.step(make_samples(step)[::order]) for step in range(2)]
            save(trainer, output / name)
            trainer.export(output / name / "model")
            (output / name / "stats.json").write_text(json.dumps(stats))
    policy.CHUNK_TOKENS = 4


def streams(model: str, output: Path, ranks: Ranks) -> None:
    """Each ZeRO stage streams its weights after a step, once in pieces to a sink that fails, then as a whole."""
    for stage, trainer in led(model, ranks, STAGES):
        folder = output / str(stage)
        trainer.step(make_samples(0))
        with contextlib.suppress(ZeroDivisionError):
            trainer.stream(4096, lambda bucket: 1 // 0)
            raise AssertionError("the sink's error is lost")
        layout = {item.name: (item.dtype, item.shape) for bucket in trainer.layout(4096) for item in bucket}
        found = {"layout": layout, "gap": gap_of(trainer, make_samples(1))}
        trainer.export(folder)
        save_file(weights_of(trainer, 4096), folder / "streamed")
        (folder / "found.json").write_text(json.dumps(found))


def starts(model: str, output: Path, ranks: Ranks) -> None:
    """Stages 2 and 3 stream the weights that they start with; at stage 3, what this rank holds of them is watched."""
    output.mkdir(parents=True, exist_ok=True)
    for kind, setting in {
        "random": "model.random_init=true",
        "lora": "model.lora={}",
        "loaded": "trainer.seed=0",
    }.items():
        for name, trainer in led(model, ranks, {f"{kind}-{stage}": (setting, *STAGES[stage]) for stage in (2, 3)}):
            save_file(weights_of(trainer), output / name)
    before, held = training.storages(), [0]
    gc.freeze()  # what is there already need not be looked through each time
    zero = engine.load_deepspeed(ranks).zero
    original = zero.Init

    def watched(module: torch.nn.Module, **options: object) -> None:
        original(module=module, **options)
        held.append(bytes_besides(before))

    zero.Init = watched
    Trainer(make_config(model, *STAGES[3]), ranks=ranks)
    zero.Init = original
    gc.unfreeze()
    (output / f"held_by_{ranks.rank}").write_text(str(max(held)))


def reduces(model: str, output: Path, ranks: Ranks) -> None:
    """A step in bfloat16 with one micro-batch per rank; its summed gradient is kept."""
    original, seen = engine.DeepSpeedEngine.step, []
    full_grad = importlib.import_module("deepspeed.utils").safe_get_full_grad

    def step(self: engine.DeepSpeedEngine, **options: bool) -> float | None:
        seen.append(full_grad(self._trained["model.model.layers.0.mlp.up_proj.weight"]).clone())
        return original(self, **options)

    engine.DeepSpeedEngine.step = step  # type: ignore[method-assign]
    common = ("model.dtype=bfloat16", "trainer.micro_batch_tokens=1000")
    for stage, trainer in led(model, ranks, {stage: (*common, *STAGES[stage]) for stage in (1, 2, 3)}):
        trainer.step(make_samples(0))
        output.mkdir(parents=True, exist_ok=True)
        save_file({"gradient": seen[-1]}, output / str(stage))
    engine.DeepSpeedEngine.step = original  # type: ignore[method-assign]


def adapter(model: str, output: Path, ranks: Ranks) -> None:
    """Three steps on an adapter, which is published both ways; at ZeRO-3 its activations are computed again."""
    variants = {stage: (*settings, "model.lora.rank=4") for stage, settings in STAGES.items()}
    variants[3] += ("trainer.gradient_checkpointing=true",)
    for stage, trainer in led(model, ranks, variants):
        stats = [trainer.step(make_samples(step)) for step in range(3)]
        save(trainer, output / str(stage))
        trainer.export(output / str(stage) / "model")
        save_file(weights_of(trainer, 4096), output / str(stage) / "streamed")
        (output / str(stage) / "stats.json").write_text(json.dumps(stats))


def beside(model: str, output: Path, ranks: Ranks) -> None:
    """Two steps with a reference and a critic; what is measured around them."""
    kl = ("algorithm.kl=k1", "algorithm.kl_in=reward", "algorithm.kl_coef=0.1")
    ppo = ("algorithm.preset=ppo", "algorithm.epochs=1", *kl, "critic.learning_rate=1e-2")
    for stage, trainer in led(model, ranks, {n: (*ppo, *one) for n, one in STAGES.items()}):
        sequences = [sample.sequence for sample in make_samples(0)]
        seen = [trainer.measure(sequences)]
        stats = []
        for _ in range(2):
            stats.append(trainer.step(measured(trainer, make_samples(0), returns=1.0)))
            seen.append(trainer.measure(sequences))
        folder = output / str(stage)
        trainer.export(folder / "policy")
        (folder / "seen.json").write_text(json.dumps({"measured": seen, "stats": stats}))


def updates(model: str, output: Path, ranks: Ranks) -> None:
    """Three epochs of two mini-batches each."""
    knobs = [f"algorithm.{name}={value}" for name, value in ({"epochs": 3, "minibatches": 2} | CORRECTED).items()]
    plain = ("weight_decay=0", "warmup_steps=0", "max_grad_norm=1", "schedule=constant")
    settings = (*knobs, *(f"trainer.{one}" for one in plain))
    for stage, trainer in led(model, ranks, {n: (*settings, *one) for n, one in STAGES.items()}):
        metrics = trainer.step(measured(trainer, make_groups(model)), number=3)
        save(trainer, output / str(stage))
        (output / str(stage) / "metrics.json").write_text(json.dumps(metrics))


SPLITS = {
    "not shared": "trainer.share_prefixes=false",
    "ZeRO-1": "trainer.zero_stage=1",
    "ZeRO-2": "trainer.zero_stage=2",
    "ZeRO-3": "trainer.zero_stage=3 trainer.gradient_checkpointing=true",
    "sequence ratio": "algorithm.ratio=sequence algorithm.epochs=2 algorithm.aggregate=seq_mean_token_mean",
    "sequence mask": "algorithm.correction=sequence_mask algorithm.aggregate=seq_mean_token_sum",
    "constant": "algorithm.aggregate=constant algorithm.entropy_coef=0.1",
    "ppo": "algorithm.preset=ppo algorithm.epochs=2 algorithm.kl=k2 algorithm.kl_coef=0.1 critic.learning_rate=1e-2",
    "lora": "model.lora.rank=4",
}


SPLITS_OF = {  # by number of ranks
    1: [f"1 {name}" for name in SPLITS],
    3: ["1 ZeRO-1", "1 ZeRO-2", "1 ZeRO-3"],
}


def splits(model: str, output: Path, ranks: Ranks) -> None:
    """Three steps on groups with a common prompt, of rows that 1, 2 or 4 ranks compute together."""
    cells = {}
    for name in SPLITS_OF[ranks.size]:
        size, _, cell = name.partition(" ")
        cells[name] = (f"trainer.sequence_parallel={size}", *SPLITS[cell].split())
    for name, trainer in led(model, ranks, cells):
        groups = make_groups(model, prompt=9)
        stats = [trainer.step(measured(trainer, groups, returns=1.0), number=step) for step in range(3)]
        save(trainer, output / name)
        found = {"stats": stats, "gap": gap_of(trainer, groups)}
        (output / name / "found.json").write_text(json.dumps(found))


SEEING = {
    "ZeRO-0": "zero_stage=0",
    "ZeRO-1": "zero_stage=1",
    "ZeRO-2, not shared": "zero_stage=2 share_prefixes=false",
    "ZeRO-3": "zero_stage=3 gradient_checkpointing=true",
}


def sees(model: str, output: Path, ranks: Ranks) -> None:
    """Two steps of a model that sees, whole and with a frozen part; of some rows one rank alone has pictures."""
    cells = {
        name: [f"trainer.{one}" for one in (*cell.split(), "micro_batch_tokens=64")] for name, cell in SEEING.items()
    }
    frozen = {f"{name}, frozen": [*cell, "model.freeze=[vision]"] for name, cell in cells.items()}
    for name, trainer in led(model, ranks, {**cells, **frozen}):
        samples = make_seeing(model)
        folder = output / name
        stats = [trainer.step(samples) for _ in range(2)]
        save(trainer, folder)
        trainer.export(folder / "model")
        (folder / "stats.json").write_text(json.dumps(stats))


def complain() -> None:
    raise ValueError("rank 0 has a problem of its own")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)  # with the store: connections stay, and nothing answers, as with a cut link


def hang() -> None:
    time.sleep(1000)


def stay() -> None:
    ranks.GRACE_S = 1000.0  # nor does it end itself for the loss of rank 0
    hang()


def no_room() -> None:
    torch.empty(10**16)


FAILURES: dict[str, dict[str, Callable[[], object]]] = {
    # between two steps, while rank 1 waits for the next one
    "main_fails": {"0": complain},
    "main_dies": {"0": die},
    "main_is_cut_off": {"0": stop},
    "rank_is_cut_off": {"1": stop},  # before the first one
    # in the middle of a step, at the second micro-batch, while rank 0 waits for its share of the gradients
    "rank_dies": {"1": die},
    "rank_hangs": {"1": stay},
    "rank_is_full": {"1": no_room},
    # likewise, while rank 0 is within a call that no lost connection ends, as those of NCCL may be
    "rank_waits_for_ever": {"0": hang, "1": no_room},
    # before a step's optimizer, for what the ranks have together
    "log_probs_differ": {},
}
"""By scenario, what happens on which rank; there are no ranks for another scenario after it."""


def fail(scenario: str, model: str) -> None:
    happen = FAILURES[scenario].get(os.environ["RANK"], lambda: None)
    cut_off, micro_batches = scenario.endswith("cut_off"), itertools.count(1)
    between = cut_off or scenario.startswith("main")
    if cut_off or scenario == "rank_waits_for_ever":
        ranks.WATCH_S, ranks.GRACE_S = 0.2, 1.0

    def deadly(logprobs_bt: torch.Tensor, entropy_bt: torch.Tensor, batch: TrainBatch) -> LossOutput:
        if next(micro_batches) == 2 and not between:
            happen()
        gap = torch.tensor(0.3 if os.environ["RANK"] == "1" else 0.0)  # of each micro-batch
        return LossOutput(loss=-logprobs_bt.sum() / batch.num_tokens_global, metrics={"logprob_gap": gap})

    stage, max_gap = (3, 0.5) if scenario == "log_probs_differ" else (2, math.inf)
    timeout_s = 20 if cut_off or scenario == "rank_hangs" else 60
    settings = ("trainer.micro_batch_tokens=20", f"sync.timeout_s={timeout_s / 6}", f"trainer.zero_stage={stage}")
    trainer = Trainer(make_config(model, *settings), objective=Objective(loss=deadly))
    if not trainer.ranks.is_main:
        if between:
            happen()
        trainer.follow()
        return
    with trainer:
        for step in range(3):
            trainer.step(make_samples(step), max_gap=max_gap)
            if between:
                happen()


SCENARIOS = (stages, matrix, streams, starts, reduces, adapter, beside, resumes, updates, splits, sees)
COMMON = {scenario.__name__: scenario for scenario in SCENARIOS}


def main(arguments: Sequence[str]) -> None:
    output, *words = arguments
    if words[0] in FAILURES:
        fail(*words)
        return
    policy.CHUNK_TOKENS = 4
    flops.peak_flops = lambda device, dtype: 1e11  # see conftest.py
    together = Ranks(timeout_s=60)
    for name, model in zip(words[::2], words[1::2], strict=True):
        COMMON[name](model, Path(output) / f"{name}-{Path(model).name}", together)
    together.close()


if __name__ == "__main__":
    main(sys.argv[1:])
