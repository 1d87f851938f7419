"""Supervised fine-tuning: the GRPO trainer with another loss, on demonstrations."""

import itertools
import math
import operator
import os
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from hocket.algorithm.losses import LossOutput
from hocket.common.files import atomic_folder, kind_of
from hocket.common.registry import load_plugins
from hocket.common.tasks import seed_of
from hocket.config import Config, DataConfig, ModelConfig
from hocket.data import tokenizer as tokenizers
from hocket.data.demonstrations import load_demonstrations
from hocket.errors import ConfigError, DataError
from hocket.observe.console import SHORT, Console
from hocket.observe.owner import owning
from hocket.observe.run_folder import RunFolder
from hocket.trainer import checkpoints
from hocket.trainer.batching import TrainBatch, check_fits
from hocket.trainer.checkpoints import Checkpoints, Part
from hocket.trainer.models import Objective
from hocket.trainer.state import SavedTensors
from hocket.trainer.trainer import Trainer
from hocket.types import TrainSample

NUM_LINES = 20  # of progress in a whole run


def run(config: Config) -> None:
    """Train on the demonstrations of data.source and write RUN/model; every rank calls it."""
    if int(os.environ.get("RANK", "0")) > 0:
        Trainer(config, objective=OBJECTIVE).follow()
        return
    load_plugins(config.plugins)  # data.source may be a task of one
    with owning(config.run_dir, print, wait=config.checkpoint.resume):
        _train(config)


def _train(config: Config) -> None:
    saved = checkpoints.find(config, print, sft=True)
    output = config.run_dir / "model"
    if output.exists() and kind_of(output) not in ("model", "adapter") and any(output.iterdir()):
        raise ConfigError(f"{output} exists and is not a model; choose another run.dir, or remove it")
    samples = _samples(config.model, config.data)
    held_out: list[TrainSample] = []
    if (data := config.held_out_data) is not None:
        limit = min(config.eval.num_prompts, data.limit or config.eval.num_prompts)
        held_out = _samples(config.model, data.model_copy(update={"limit": limit}))
    last = saved.step if saved else 0
    size = config.sft.batch_size
    setting = "trainer.steps"
    most = config.trainer.steps * size
    if config.sft.epochs is not None:
        setting = "sft.epochs"
        most = config.sft.epochs * len(samples)
    steps = math.ceil(most / size)
    with (
        Console(steps) as console,
        RunFolder(config, console.say) as folder,
        Trainer(config, objective=OBJECTIVE) as trainer,
    ):
        parts: dict[str, Part] = {"recorder": folder, "demonstrations": Demonstrations(samples)}
        trainer.plan(steps)
        if saved is not None:
            trainer.restore(SavedTensors(saved.folder), saved.trainer)
            saved.restore(parts)
        check_fits([*samples, *held_out], trainer.micro_batch_tokens)
        console.say(f"{len(samples)} demonstrations, {trainer.num_parameters:,} parameters; {trainer.memory}")
        console.say(f"the first one, with what is taught in [[ ]]: {_shown(samples[0], config.model.path)}")
        console.say(f"{setting} decides: {steps} steps of {size} demonstrations")
        if size >= len(samples):
            console.say("an update takes them all: lower sft.batch_size for more")
        if "learning_rate" not in config.trainer.model_fields_set:
            rate = config.trainer.learning_rate
            console.say(f"trainer.learning_rate={rate:g} is for GRPO; demonstrations mostly take 1e-5 or more")
        if saved is None and held_out:
            before = held_out_loss(trainer, held_out)
            folder.finish(0, before)
            console.say(f"step 0/{steps}  held-out loss {before['eval/loss']:.4f}, of {len(held_out)} demonstrations")
        order = itertools.islice(in_epochs(samples, config.trainer.seed), last * size, most)
        start = time.perf_counter()
        every = config.eval.every_steps
        with Checkpoints(config, trainer.state, parts, last=last) as kept:
            for step in range(last + 1, steps + 1):
                console.progress(step, "training")
                metrics = trainer.step(list(itertools.islice(order, size)), keep=folder.skipped(step))
                said = f"loss {metrics['train/loss']:.4f}"
                if held_out and (step == steps or (every > 0 and step % every == 0)):
                    metrics |= held_out_loss(trainer, held_out)
                    said += f"  held-out loss {metrics['eval/loss']:.4f}"
                metrics |= kept.copy(step, last=step == steps)
                folder.finish(step, metrics)
                kept.complete(step, metrics)
                if "eval/loss" in metrics or step in (last + 1, steps) or step % max(1, steps // NUM_LINES) == 0:
                    left_s = (time.perf_counter() - start) / (step - last) * (steps - step)
                    speed = f"{metrics['train/tokens_per_s']:,.0f} tokens/s  {left_s:.0f} s left"
                    console.say(f"step {step}/{steps}  {said}  {speed}")
            with atomic_folder(output) as partial:
                trainer.export(partial)
            done = f"all {steps} steps are done; for more of them raise {setting}; " if last >= steps else ""
            console.say(f"{done}wrote {output}")


def _samples(model: ModelConfig, data: DataConfig) -> list[TrainSample]:
    rows = load_demonstrations(data, tokenizers.load(model.path), tokenizers.context_length(model))
    return [TrainSample(sequence=row, advantages=(0.0,) * len(row.mask)) for row in rows]


def _shown(sample: TrainSample, model: str) -> str:
    tokenizer = tokenizers.load(model)
    tokens = zip(sample.sequence.mask, sample.sequence.token_ids, strict=True)
    shown = ""
    for taught, run in itertools.groupby(tokens, key=operator.itemgetter(0)):
        text = tokenizer.decode([token for _, token in run])
        shown += f"[[{text}]]" if taught else text
    return SHORT.repr(shown)


def held_out_loss(trainer: Trainer, samples: Sequence[TrainSample]) -> dict[str, float]:
    num_tokens = sum(sample.sequence.mask.count(True) for sample in samples)
    return {"eval/loss": -math.fsum(itertools.chain(*trainer.logprobs(samples))) / num_tokens}


def sft_loss(logprobs_bt: Tensor, entropy_bt: Tensor, batch: TrainBatch) -> LossOutput:
    """Return −Σ mask · logprobs / tokens: the batch's share of the mean cross-entropy, in nats."""
    del entropy_bt
    return LossOutput(loss=-logprobs_bt.where(batch.mask_bt, 0.0).sum() / batch.num_tokens_global, metrics={})


def in_epochs(samples: Sequence[TrainSample], seed: int) -> Iterator[TrainSample]:
    """Yield the samples without end, in a new order each epoch."""
    for epoch in itertools.count():
        yield from random.Random(f"{seed}:{epoch}").sample(samples, len(samples))


OBJECTIVE = Objective(loss=sft_loss)


class Demonstrations:
    """Refuse to resume a checkpoint on other demonstrations."""

    def __init__(self, samples: Sequence[TrainSample]) -> None:
        rows = ((sample.sequence.token_ids, sample.sequence.mask) for sample in samples)
        self._state = {"num_samples": len(samples), "hash": seed_of(*rows)}

    def state(self) -> dict[str, int]:
        return self._state

    def restore(self, state: Mapping[str, Any]) -> None:
        if state != self._state:
            advice = "use the same data section, files and tokenizer, or start a new run"
            raise DataError(f"can't resume: the demonstrations were {state} and are {self._state} now; {advice}")
