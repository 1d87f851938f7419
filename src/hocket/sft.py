"""Supervised fine-tuning: the GRPO trainer with another loss, on demonstrated responses."""

import itertools
import os
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from hocket import checkpoints
from hocket import tokenizer as tokenizers
from hocket.algorithm.losses import LossOutput
from hocket.checkpoints import Checkpoints, Part
from hocket.config import Config
from hocket.data.prompts import load_demonstrations
from hocket.errors import ConfigError, DataError
from hocket.observe.console import Console
from hocket.observe.owner import owning
from hocket.observe.run_folder import RunFolder
from hocket.registry import load_plugins
from hocket.system import atomic_folder, kind_of, seed_of
from hocket.trainer.batching import TrainBatch
from hocket.trainer.state import SavedTensors
from hocket.trainer.trainer import Trainer
from hocket.types import TokenSequence, TrainSample

NUM_LINES = 20  # of progress in a whole run


def run(config: Config) -> None:
    """Train model.path on the responses of data.source and write the model; every rank calls it."""
    if int(os.environ.get("RANK", "0")) > 0:
        Trainer(config, loss=sft_loss).follow()
        return
    load_plugins(config.plugins)  # data.source may be a task of one
    with owning(config.run_dir, print, wait=config.checkpoint.resume):
        _train(config)


def _train(config: Config) -> None:
    saved = checkpoints.find(config, print)
    output = Path(config.sft.output) if config.sft.output is not None else config.run_dir / "model"
    if output.exists() and kind_of(output) not in ("model", "adapter") and any(output.iterdir()):
        raise ConfigError(f"{output} exists and is not a model; choose another sft.output, or remove it")
    tokenizer, max_length = tokenizers.load(config.model.path), tokenizers.context_length(config.model)
    rows = load_demonstrations(config.data, tokenizer, max_length)
    samples = [demonstration(*row) for row in rows]
    last, steps, batch_size = saved.step if saved else 0, config.trainer.steps, config.sft.batch_size
    with (
        Console(steps) as console,
        RunFolder(config) as folder,
        Trainer(config, loss=sft_loss) as trainer,
    ):
        parts: dict[str, Part] = {"recorder": folder, "demonstrations": Demonstrations(samples)}
        if saved is not None:
            trainer.restore(SavedTensors(saved.folder), saved.trainer)
            saved.restore(parts)
        console.say(f"{len(samples)} demonstrations, {trainer.num_parameters:,} parameters; {trainer.memory}")
        order = itertools.islice(in_epochs(samples, config.trainer.seed), last * batch_size, None)
        start, num_tokens = time.perf_counter(), 0.0
        with Checkpoints(config, trainer.state, parts, last=last) as kept:
            for step in range(last + 1, steps + 1):
                console.progress(step, "training")
                metrics = trainer.step(list(itertools.islice(order, batch_size)), keep=folder.skipped(step))
                metrics |= kept.copy(step)
                folder.finish(step, metrics)
                kept.complete(step, metrics)
                num_tokens += metrics["train/tokens"]
                if step in (last + 1, steps) or step % max(1, steps // NUM_LINES) == 0:
                    seconds = time.perf_counter() - start
                    console.say(
                        f"step {step}/{steps}  loss {metrics['train/loss']:.4f}  {num_tokens / seconds:,.0f} tokens/s  "
                        f"{seconds / (step - last) * (steps - step):.0f} s left"
                    )
            with atomic_folder(output) as partial:
                trainer.export(partial)
            done = f"all {steps} steps are done; for more of them raise trainer.steps; " if last >= steps else ""
            console.say(f"{done}wrote {output}")


def sft_loss(logprobs_bt: Tensor, entropy_bt: Tensor, batch: TrainBatch) -> LossOutput:
    """Return −Σ mask · logprobs / tokens: this batch's share of the mean cross-entropy of the responses, in nats."""
    del entropy_bt
    return LossOutput(loss=-logprobs_bt.where(batch.mask_bt, 0.0).sum() / batch.num_tokens_global, metrics={})


def demonstration(prompt_ids: Sequence[int], response_ids: Sequence[int]) -> TrainSample:
    """Return the row as a sample in which only the response is trained."""
    length = len(prompt_ids) + len(response_ids)
    sequence = TokenSequence(
        token_ids=(*prompt_ids, *response_ids),
        mask=tuple(index >= len(prompt_ids) for index in range(length)),
        logprobs=(0.0,) * length,
    )
    return TrainSample(sequence=sequence, advantages=(0.0,) * length)


def in_epochs(samples: Sequence[TrainSample], seed: int) -> Iterator[TrainSample]:
    """Yield the samples without end, each once per epoch, in a new order per epoch."""
    for epoch in itertools.count():
        yield from random.Random(f"{seed}:{epoch}").sample(samples, len(samples))


class Demonstrations:
    """The part of a run that refuses to resume a checkpoint on other demonstrations."""

    def __init__(self, samples: Sequence[TrainSample]) -> None:
        rows = ((sample.sequence.token_ids, sample.sequence.mask) for sample in samples)
        self._state = {"num_samples": len(samples), "hash": seed_of(*rows)}

    def state(self) -> dict[str, int]:
        """Return the identity of the demonstrations."""
        return self._state

    def restore(self, state: Mapping[str, Any]) -> None:
        """Raise DataError unless `state` is of the same demonstrations."""
        if state != self._state:
            advice = "use the same data section, files and tokenizer, or start a new run"
            raise DataError(f"can't resume: the demonstrations were {state} and are {self._state} now; {advice}")
