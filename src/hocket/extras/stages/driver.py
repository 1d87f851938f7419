"""Run a stage: epochs over its rows, held-out numbers, checkpoints, and a model at the end."""

import itertools
import math
import operator
import os
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hocket.common import machine
from hocket.common.files import atomic_folder, kind_of
from hocket.common.registry import load_plugins
from hocket.common.tasks import seed_of
from hocket.config import Config, DataConfig, ModelConfig
from hocket.data import model_folder
from hocket.data import tokenizer as tokenizers
from hocket.errors import ConfigError, DataError
from hocket.extras.stages import pairs, stage_of
from hocket.observe.console import SHORT, Console
from hocket.observe.owner import owning
from hocket.observe.run_folder import RunFolder
from hocket.protocol import model_files
from hocket.trainer import checkpoints, memory, packing
from hocket.trainer.checkpoints import Checkpoints, Resumable, Saved
from hocket.trainer.objective import Objective
from hocket.trainer.packing import keys
from hocket.trainer.policy import compute_dtype
from hocket.trainer.state import SavedTensors
from hocket.trainer.trainer import Trainer
from hocket.trainer.weights import SCORE
from hocket.types import Metrics, TrainSample

NUM_LINES = 20  # of progress in a whole run
CHUNK = 256  # sequences that are measured at a time
SAID = {  # metrics in these lines
    "train/loss": "loss",
    "rewards/accuracies": "accuracy",
    "eval/loss": "held-out loss",
    "eval/rewards/accuracies": "held-out accuracy",
}
HELD_OUT = ("loss", "rewards/accuracies", "rewards/margins")

Unit = tuple[TrainSample, ...]
"""Samples that are trained together: `Objective.unit` of them."""


class Stage:
    """What a stage has of its own."""

    rows: str  # its word for them
    rate: str  # advice beside the learning rate of GRPO, the default

    def objective(self, model: ModelConfig) -> Objective:
        raise NotImplementedError

    def load(self, data: DataConfig, tokenizer: Any, longest: int) -> list[Unit]:
        """Return rows whose sequences have `longest` tokens at most."""
        raise NotImplementedError

    def held_out(self, trainer: Trainer, samples: Sequence[TrainSample]) -> Metrics:
        found = trainer.evaluate(samples)
        return {f"eval/{name}": found[name] for name in HELD_OUT}


def run(config: Config, command: str, *, dry_run: bool = False) -> None:
    """Train a stage on the rows of data.source and write RUN/model; every rank calls it.

    With `dry_run`, only say what would be trained, before any weights are loaded.
    """
    if not torch.cuda.is_available():
        machine.keep_freed_memory()
    stage: Stage = stage_of(command, getattr(config, command))
    objective = stage.objective(config.model)
    if int(os.environ.get("RANK", "0")) > 0:
        if not dry_run:
            Trainer(config, objective=objective).follow()
        return
    if config.data.sources:
        raise ConfigError(
            f"data.sources is for train: {command} has one data.source; join the rows to one file"
        )
    if config.checkpoint.best is not None:
        advice = "leave it out, and raise checkpoint.keep to choose among the checkpoints by metrics.jsonl"
        raise ConfigError(
            f"checkpoint.best is for train: {command} would keep nothing by it; {advice}"
        )
    output = config.run_dir / "model"
    if output.exists() and kind_of(output) not in ("model", "adapter") and any(output.iterdir()):
        raise ConfigError(
            f"{output} exists and is not a model; choose another run.dir, or remove it"
        )
    load_plugins(config.plugins)  # data.source may be a task of one
    with owning(config.run_dir, print, wait=config.checkpoint.resume and not dry_run):
        saved = checkpoints.find(config, print, command=command, dry_run=dry_run)
        rows, held_out = _load(stage, config, uses_logits=objective.kind.uses_logits)
        task = _Task(config, command, stage, objective, rows, held_out)
        if dry_run:
            _check(task)
        else:
            _train(task, saved)


class _Task(NamedTuple):
    """A stage and the rows that it is trained on."""

    config: Config
    command: str
    stage: Stage
    objective: Objective
    rows: list[Unit]
    held_out: list[Unit]

    @property
    def batch_size(self) -> int:
        return int(getattr(self.config, self.command).batch_size)

    @property
    def num_rows(self) -> int:
        """Rows that are trained, counted in each epoch."""
        epochs = getattr(self.config, self.command).epochs
        return (
            self.config.trainer.steps * self.batch_size
            if epochs is None
            else epochs * len(self.rows)
        )

    @property
    def num_steps(self) -> int:
        return math.ceil(self.num_rows / self.batch_size)

    @property
    def decides(self) -> str:
        """The setting that decides on the number of steps."""
        epochs = getattr(self.config, self.command).epochs
        return "trainer.steps" if epochs is None else f"{self.command}.epochs"

    def outlook(self, tokenizer: Any) -> Iterator[str]:
        """Yield lines on what is trained: the first row, the number of steps, the learning rate."""
        model = self.config.model.path
        yield f"the first one, with what is taught in [[ ]]: {_shown(self.rows[0], tokenizer)}"
        if self.objective.kind.scores:
            files, _ = model_files.weight_files(model)
            shapes, _ = model_files.read_headers(files)
            if SCORE not in shapes:
                yield f"the model has no {SCORE}: the stage adds this head, drawn at random by trainer.seed"
        if added := tokenizers.said_end(model, tokenizer):
            yield added
        takes_all = ""
        if self.batch_size >= len(self.rows):
            takes_all = f", all of them: lower {self.command}.batch_size for more updates"
        steps = f"{self.num_steps} steps of {self.batch_size} {self.stage.rows}{takes_all}"
        yield f"{self.decides} decides: {steps}"
        if "learning_rate" not in self.config.trainer.model_fields_set:
            rate = self.config.trainer.learning_rate
            yield f"trainer.learning_rate={rate:g} is for GRPO; {self.stage.rate}"
        if low := self.config.trainer.below_peak(self.num_steps):
            yield low


def _check(task: _Task) -> None:
    """Say what would be trained, and raise for what shows without weights: rows or memory that do
    not fit."""
    config, _, stage, objective, rows, held_out = task
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    settings = config.trainer if device.type == "cuda" else config.trainer.unmeasured()
    models = objective.models(config.model)
    dtype = compute_dtype(config.model, device)
    estimate = memory.check(models, settings, dtype, device, int(os.environ.get("WORLD_SIZE", "1")))
    if settings.micro_batch_tokens != "auto":
        samples = [*flat(rows), *flat(held_out)]
        # Where a run may share less, it says so itself.
        packer = packing.chosen_packer(settings.share_prefixes)
        packing.check_fits(samples, settings.micro_batch_tokens, unit=objective.unit, packer=packer)
    num_parameters = sum(parameter.numel() for parameter in models[0][1].parameters())
    print(
        f"{len(rows)} {stage.rows}, {len(held_out)} held out; {num_parameters:,} parameters; a step needs {estimate}"
    )
    for line in task.outlook(tokenizers.load(config.model.path)):
        print(line)
    print("nothing stands in the way of a run, as far as is seen without the weights")


def _train(task: _Task, saved: Saved | None) -> None:
    config, command, stage, objective, rows, held_out = task
    output = config.run_dir / "model"
    last = saved.step if saved else 0
    size = task.batch_size
    steps = task.num_steps
    with (
        Console(steps) as console,
        RunFolder(config, console.say) as folder,
        Trainer(config, objective=objective) as trainer,
    ):
        kept = Units(stage.rows, flat(rows))
        parts: dict[str, Resumable] = {"recorder": folder, command: kept}
        if objective.auxiliaries:
            if saved is None:
                console.say(
                    f"the reference's log-probs of {len(rows)} {stage.rows} are measured once"
                )
                kept.measured = _measured(trainer, rows)
            else:
                kept.restore(saved.parts[command])
            rows = _with(kept.measured, rows)
            held_out = _with(_measured(trainer, held_out), held_out)
            trainer.forget()
        measured = flat(held_out)
        trainer.plan(steps)
        if saved is not None:
            trainer.restore(SavedTensors(saved.folder), saved.trainer)
            saved.restore(parts)
        trainer.check_fits([*flat(rows), *measured])
        console.say(
            f"{len(rows)} {stage.rows}, {trainer.num_parameters:,} parameters; {trainer.memory}"
        )
        for line in task.outlook(trainer.tokenizer):
            console.say(line)
        if saved is None and held_out:
            before = stage.held_out(trainer, measured)
            folder.finish(0, before)
            console.say(f"step 0/{steps}  {_said(before)}, of {len(held_out)} {stage.rows}")
        order = itertools.islice(in_epochs(rows, config.trainer.seed), last * size, task.num_rows)
        start = time.perf_counter()
        copies: list[Callable[[Path], None]] = []
        if config.checkpoint.copy_to is not None:
            from hocket.extras.copy_to import copying

            copies = copying(config, console.say)
        with Checkpoints(config, trainer.state, parts, newest=last, after=copies) as written:
            for step in range(last + 1, steps + 1):
                console.progress(step, "training")
                metrics = trainer.step(
                    flat(itertools.islice(order, size)), keep=folder.skipped(step)
                )
                if held_out and (step == steps or step % (config.eval.every_steps or steps) == 0):
                    metrics |= stage.held_out(trainer, measured)
                metrics |= written.copy(step, last=step == steps)
                folder.finish(step, metrics)
                written.complete(step, metrics)
                if (
                    "eval/loss" in metrics
                    or step in (last + 1, steps)
                    or step % max(1, steps // NUM_LINES) == 0
                ):
                    left_s = (time.perf_counter() - start) / (step - last) * (steps - step)
                    speed = f"{metrics['train/tokens_per_s']:,.0f} tokens/s  {left_s:.0f} s left"
                    console.say(f"step {step}/{steps}  {_said(metrics)}  {speed}")
            with atomic_folder(output) as partial:
                trainer.export(partial)
            if last >= steps:
                console.say(f"all {steps} steps are done; for more of them raise {task.decides}")
            console.say(f"wrote {output}")


def _load(stage: Stage, config: Config, *, uses_logits: bool) -> tuple[list[Unit], list[Unit]]:
    """Return the rows to train on, and those held out."""
    tokenizer = model_folder.examine(config.model, head="logits" if uses_logits else None)
    longest = tokenizers.context_length(config.model)
    rows = stage.load(config.data, tokenizer, longest)
    data = config.default_source.held_out
    if data is None:
        return rows, []
    limit = min(config.eval.num_prompts, data.limit or config.eval.num_prompts)
    return rows, stage.load(data.model_copy(update={"limit": limit}), tokenizer, longest)


def _measured(trainer: Trainer, rows: Sequence[Unit]) -> list[dict[str, float]]:
    """Return the sums over each sequence of what the objective needs beside the policy."""
    sequences = [sample.sequence for sample in flat(rows)]
    parts = (
        trainer.measure(sequences[first : first + CHUNK])
        for first in range(0, len(sequences), CHUNK)
    )
    return [
        {name: math.fsum(columns[name]) for name in columns} for columns in itertools.chain(*parts)
    ]


def _with(measured: Iterable[Mapping[str, float]], rows: Iterable[Unit]) -> list[Unit]:
    numbers = iter(measured)
    return [tuple(pairs.sample(sample.sequence, **next(numbers)) for sample in row) for row in rows]


def flat(rows: Iterable[Unit]) -> list[TrainSample]:
    return [*itertools.chain.from_iterable(rows)]


def in_epochs(rows: Sequence[Unit], seed: int) -> Iterator[Unit]:
    """Yield the rows without end, in a new order each epoch."""
    for epoch in itertools.count():
        yield from random.Random(f"{seed}:{epoch}").sample(rows, len(rows))


def _said(metrics: Mapping[str, float]) -> str:
    return "  ".join(
        f"{word} {metrics[name]:.4f}" for name, word in SAID.items() if name in metrics
    )


def _shown(row: Unit, tokenizer: Any) -> str:
    sides = []
    for sample in row:
        shown = ""
        tokens = zip(sample.sequence.mask, sample.sequence.token_ids, strict=True)
        for taught, run in itertools.groupby(tokens, key=operator.itemgetter(0)):
            text = tokenizer.decode([token for _, token in run])
            shown += f"[[{text}]]" if taught else text
        sides.append(shown)
    return SHORT.repr(" / ".join(sides))


class Units:
    """Refuse to resume a checkpoint on other rows; it has what was measured of them before the
    first step, too."""

    def __init__(self, name: str, samples: Sequence[TrainSample]) -> None:
        self._name = name
        rows = (
            (tuple(keys(sample.sequence).tolist()), sample.sequence.mask, *sample.columns.values())
            for sample in samples
        )
        self._state = {"num_samples": len(samples), "hash": seed_of(*rows)}
        self.measured: list[dict[str, float]] = []

    def state(self) -> dict[str, Any]:
        return {**self._state, "measured": self.measured}

    def restore(self, state: Mapping[str, Any]) -> None:
        known = {**state}
        self.measured = known.pop("measured")
        if known != self._state:
            advice = "use the same data section, files and tokenizer, or start a new run"
            raise DataError(
                f"can't resume: the {self._name} were {known} and are {self._state} now; {advice}"
            )
