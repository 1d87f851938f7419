"""Supervised fine-tuning: the same trainer, with the cross-entropy of demonstrated responses as its loss."""

import hashlib
import itertools
import os
import random
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hocket import checkpoints, data
from hocket import tokenizer as tokenizers
from hocket.algorithm.losses import LossOutput
from hocket.checkpoints import Checkpoints, Part
from hocket.config import Config
from hocket.errors import ConfigError, DataError
from hocket.observe.console import Console
from hocket.observe.metrics import train_metrics
from hocket.observe.run_folder import RunFolder
from hocket.registry import load_plugins
from hocket.trainer.checkpoint import SavedTensors
from hocket.trainer.trainer import Trainer
from hocket.types import TokenSequence, TrainSample

if TYPE_CHECKING:
    from torch import Tensor

    from hocket.trainer.batching import TrainBatch

NUM_LINES = 20
"""Lines of progress that a whole run prints."""


def run(config: Config) -> None:
    """Trains model.path on the responses of data.source and writes the model to sft.output or <run.dir>/model.

    Every rank calls it; rank 0 reads the data and checks it before a model is loaded. One optimiser step per
    sft.batch_size rows, trainer.steps steps, rows in a new seeded order each epoch.
    """
    if int(os.environ.get("RANK", "0")) > 0:
        make_trainer(config).follow()
        return
    load_plugins(config.plugins)  # data.source may be a task of one
    saved = checkpoints.find(config, print)
    output = Path(config.sft.output) if config.sft.output is not None else config.run_dir / "model"
    _check_replaceable(output)
    tokenizer = tokenizers.load(config.model.path)
    max_length = tokenizers.context_length(config.model)
    samples = [demonstration(*row) for row in data.load_demonstrations(config.data, tokenizer, max_length)]
    if not samples:
        raise DataError(f"{config.data.source} has no demonstration of at most {max_length} tokens to learn from")
    with (
        Console(config.observe.console, config.trainer.steps) as console,
        RunFolder(config) as run_folder,
        make_trainer(config) as trainer,
        Checkpoints(config, trainer, parts := _parts(run_folder, samples), last=saved.step if saved else 0) as kept,
    ):
        if saved is not None:
            trainer.restore(SavedTensors(saved.folder), saved.trainer)
            saved.restore(parts)
        console.say(
            f"{len(samples)} demonstrations, {trainer.num_parameters:,} parameters, on {trainer.ranks.size} rank(s)"
        )
        console.say(trainer.memory)
        train(trainer, samples, config, run_folder, console, kept)
        export(trainer, output)
        console.say(f"wrote {output}")


def make_trainer(config: Config) -> Trainer:
    """Returns a trainer that minimises the cross-entropy of the model as it is, without a sampling temperature."""

    def loss(logprobs_bt: "Tensor", entropy_bt: "Tensor", batch: "TrainBatch") -> LossOutput:
        del entropy_bt
        return sft_loss(logprobs_bt, batch.mask_bt, num_tokens=batch.num_tokens_global)

    return Trainer(config, loss=loss, temperature=1.0)


def sft_loss(logprobs_bt: "Tensor", mask_bt: "Tensor", *, num_tokens: int) -> LossOutput:
    """Return −Σ mask · logprobs / num_tokens: the mean cross-entropy of the demonstrated tokens, in nats."""
    return LossOutput(loss=-logprobs_bt.where(mask_bt, 0.0).sum() / max(num_tokens, 1), metrics={})


def train(
    trainer: Trainer,
    samples: Sequence[TrainSample],
    config: Config,
    run_folder: RunFolder,
    console: Console,
    kept: Checkpoints,
) -> None:
    """Takes what is left of trainer.steps steps and records each."""
    steps, batch_size = config.trainer.steps, config.sft.batch_size
    done = len(run_folder.history)
    rows = itertools.islice(in_epochs(samples, config.trainer.seed), done * batch_size, None)
    start, num_tokens = time.perf_counter(), 0
    for step in range(done + 1, steps + 1):
        console.progress(step, "training")
        stats = trainer.step(list(itertools.islice(rows, batch_size)), keep=run_folder.skipped(step))
        metrics = train_metrics(stats) | kept.copy(step)
        run_folder.finish(step, metrics)
        kept.complete(step, metrics)
        num_tokens += stats.num_tokens
        if step in (done + 1, steps) or step % max(1, steps // NUM_LINES) == 0:
            seconds = time.perf_counter() - start
            console.say(
                f"step {step}/{steps}  loss {stats.loss:.4f}  grad {stats.grad_norm:.3f}  "
                f"{num_tokens / seconds:,.0f} tokens/s  {seconds / (step - done) * (steps - step):.0f} s left"
            )


def demonstration(prompt_ids: Sequence[int], response_ids: Sequence[int]) -> TrainSample:
    """Returns the row as a sample in which only the response is trained."""
    length = len(prompt_ids) + len(response_ids)
    return TrainSample(
        sequence=TokenSequence(
            token_ids=(*prompt_ids, *response_ids),
            mask=tuple(index >= len(prompt_ids) for index in range(length)),
            logprobs=(0.0,) * length,
        ),
        advantages=(0.0,) * length,
    )


def in_epochs(samples: Sequence[TrainSample], seed: int) -> Iterator[TrainSample]:
    """Yields the samples for ever: each once per epoch, every epoch in an order of its own."""
    for epoch in itertools.count():
        yield from random.Random(f"{seed}:{epoch}").sample(samples, len(samples))


class Demonstrations:
    """What is learned from, as a part of the run: a checkpoint goes on with the same, or not at all."""

    def __init__(self, samples: Sequence[TrainSample]) -> None:
        digest = hashlib.sha256()
        for sample in samples:
            digest.update(f"{sample.sequence.token_ids}\n{sample.sequence.mask}\n".encode())
        self._state = {"num_samples": len(samples), "fingerprint": digest.hexdigest()[:16]}

    def state(self) -> dict[str, Any]:
        """Returns what tells them from others, ready for JSON."""
        return self._state

    def restore(self, state: Mapping[str, Any]) -> None:
        """Raises DataError where these are not those of `state`."""
        for key, now in self._state.items():
            if state[key] != now:
                raise DataError(
                    f"can't resume: {key} of the demonstrations was {state[key]} and is {now} now; use the same data "
                    "section, files and tokenizer, or start a new run"
                )


def _parts(run_folder: RunFolder, samples: Sequence[TrainSample]) -> dict[str, Part]:
    return {"recorder": run_folder, "demonstrations": Demonstrations(samples)}


def export(trainer: Trainer, folder: Path) -> None:
    """Writes the model to `folder`, in place of a model that is there; `folder` never holds a part of one."""
    partial, old = (folder.with_name(f".{folder.name}.{suffix}") for suffix in ("partial", "old"))
    for leftover in (partial, old):
        shutil.rmtree(leftover, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    trainer.export(partial)
    if folder.exists():
        folder.rename(old)
    os.replace(partial, folder)
    shutil.rmtree(old, ignore_errors=True)


def _check_replaceable(folder: Path) -> None:
    model = any((folder / name).is_file() for name in ("config.json", "adapter_config.json"))
    if folder.exists() and not model and any(folder.iterdir()):
        raise ConfigError(f"{folder} exists and is not a model; choose another sft.output, or remove it")
