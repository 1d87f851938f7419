"""Run a stage: epochs over its rows, held-out metrics, checkpoints, and a model at the end."""

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

NUM_LINES = 20  # lines of progress in a whole run
CHUNK = 256  # sequences that are measured at a time
SHOWN_METRICS = {  # the metrics in a line of progress, and the words for them
    "train/loss": "loss",
    "rewards/accuracies": "accuracy",
    "eval/loss": "held-out loss",
    "eval/rewards/accuracies": "held-out accuracy",
}
HELD_OUT = ("loss", "rewards/accuracies", "rewards/margins")

Unit = tuple[TrainSample, ...]
"""Samples that are trained together: `Objective.unit` of them."""


class Stage:
    """What a stage brings: an objective, rows, and metrics of held-out rows."""

    rows: str  # what messages call its rows
    rate: str  # advice on the learning rate, where that is the default, which is for GRPO

    def objective(self, model: ModelConfig) -> Objective:
        """Make the objective that the trainer minimizes."""
        raise NotImplementedError

    def load(self, data: DataConfig, tokenizer: Any, longest: int) -> list[Unit]:
        """Load the rows whose sequences have `longest` tokens at most."""
        raise NotImplementedError

    def held_out(self, trainer: Trainer, samples: Sequence[TrainSample]) -> Metrics:
        """Compute eval/* of the samples of held-out rows."""
        metrics = trainer.evaluate(samples)
        return {f"eval/{name}": metrics[name] for name in HELD_OUT}


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
        raise ConfigError(
            f"checkpoint.best is for train: {command} would keep nothing by it; leave it out, and "
            "raise checkpoint.keep to choose among the checkpoints by metrics.jsonl"
        )
    output = config.run_dir / "model"
    if output.exists() and kind_of(output) not in ("model", "adapter") and any(output.iterdir()):
        raise ConfigError(
            f"{output} exists and is not a model; choose another run.dir, or remove it"
        )
    load_plugins(config.plugins)  # data.source may be a task that a plugin registers
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
        """The number of rows that are trained, each counted once an epoch."""
        epochs = getattr(self.config, self.command).epochs
        if epochs is None:
            return self.config.trainer.steps * self.batch_size
        return int(epochs * len(self.rows))

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
                head = "this head, drawn at random by trainer.seed"
                yield f"the model has no {SCORE}: the stage adds {head}"
        if added := tokenizers.said_end(model, tokenizer):
            yield added
        takes_all = ""
        if self.batch_size >= len(self.rows):
            takes_all = f", all of them: lower {self.command}.batch_size for more updates"
        steps = f"{self.num_steps} steps of {self.batch_size} {self.stage.rows}{takes_all}"
        yield f"{self.decides} decides: {steps}"
        if self.config.trainer.learning_rate == "auto":
            yield f"trainer.learning_rate=auto is for GRPO; {self.stage.rate}"
        if low := self.config.trainer.below_peak(self.num_steps):
            yield low


def _check(task: _Task) -> None:
    """Print what would be trained.

    Raise TrainerError or ConfigError for rows or memory that do not fit, as far as that shows
    without weights.
    """
    config, _, stage, objective, rows, held_out = task
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    settings = config.trainer if device.type == "cuda" else config.trainer.unmeasured()
    models = objective.models(config.model)
    dtype = compute_dtype(config.model, device)
    estimate = memory.check(models, settings, dtype, device, int(os.environ.get("WORLD_SIZE", "1")))
    if settings.micro_batch_tokens != "auto":
        samples = flat(rows) + flat(held_out)
        # Where a run may share less, it says so itself.
        packer = packing.chosen_packer(settings.share_prefixes)
        packing.check_fits(samples, settings.micro_batch_tokens, unit=objective.unit, packer=packer)
    num_parameters = sum(parameter.numel() for parameter in models[0][1].parameters())
    print(
        f"{len(rows)} {stage.rows}, {len(held_out)} held out; {num_parameters:,} parameters; "
        f"a step needs {estimate}"
    )
    for line in task.outlook(tokenizers.load(config.model.path)):
        print(line)
    print("nothing stands in the way of a run, as far as is seen without the weights")


def _train(task: _Task, saved: Saved | None) -> None:
    """Train from the first step, or on from a checkpoint, and write RUN/model."""
    config = task.config
    output = config.run_dir / "model"
    num_done = saved.step if saved else 0  # steps
    with (
        Console(task.num_steps) as console,
        RunFolder(config, console.say) as folder,
        Trainer(config, objective=task.objective) as trainer,
    ):
        units = Units(task.stage.rows, flat(task.rows))
        parts: dict[str, Resumable] = {"recorder": folder, task.command: units}
        if task.objective.auxiliaries:
            task = _with_reference(task, trainer, units, saved, console)
        trainer.plan(task.num_steps)
        if saved is not None:
            trainer.restore(SavedTensors(saved.folder), saved.trainer)
            saved.restore(parts)
        held_out = flat(task.held_out)
        trainer.check_fits(flat(task.rows) + held_out)
        summary = f"{len(task.rows)} {task.stage.rows}, {trainer.num_parameters:,} parameters"
        console.say(f"{summary}; {trainer.description}")
        for line in task.outlook(trainer.tokenizer):
            console.say(line)
        if saved is None and held_out:
            before = task.stage.held_out(trainer, held_out)
            folder.finish(0, before)
            num_rows = f"{len(task.held_out)} {task.stage.rows}"
            console.say(f"step 0/{task.num_steps}  {_as_line(before)}, of {num_rows}")
        copies: list[Callable[[Path], None]] = []
        if config.checkpoint.copy_to is not None:
            from hocket.extras.copy_to import copying

            copies = copying(config, console.say)
        with Checkpoints(
            config, trainer.state, parts, newest=num_done, after=copies
        ) as checkpointing:
            _steps(task, num_done, trainer, folder, checkpointing, console)
            with atomic_folder(output) as partial:
                trainer.export(partial)
            if num_done >= task.num_steps:
                done = f"all {task.num_steps} steps are done"
                console.say(f"{done}; for more of them raise {task.decides}")
            console.say(f"wrote {output}")


def _with_reference(
    task: _Task, trainer: Trainer, units: "Units", saved: Saved | None, console: Console
) -> _Task:
    """Add the reference's log-probs to the rows, measured before the first step; `units` keeps them.

    The trainer then forgets the models that it has measured with.
    """
    if saved is None:
        rows = f"{len(task.rows)} {task.stage.rows}"
        console.say(f"the reference's log-probs of {rows} are measured once")
        units.measured = _measured(trainer, task.rows)
    else:
        units.restore(saved.parts[task.command])
    rows_with = _with(units.measured, task.rows)
    held_out = _with(_measured(trainer, task.held_out), task.held_out)
    trainer.forget()
    return task._replace(rows=rows_with, held_out=held_out)


def _steps(
    task: _Task,
    num_done: int,
    trainer: Trainer,
    folder: RunFolder,
    checkpointing: Checkpoints,
    console: Console,
) -> None:
    """Run the steps after the first `num_done`, with their evaluations and checkpoints."""
    config = task.config
    size = task.batch_size
    steps = task.num_steps
    held_out = flat(task.held_out)
    eval_every = config.eval.every_steps or steps
    line_every = max(1, steps // NUM_LINES)
    endless = in_epochs(task.rows, config.trainer.seed)
    rows = itertools.islice(endless, num_done * size, task.num_rows)
    start = time.perf_counter()
    for step in range(num_done + 1, steps + 1):
        console.progress(step, "training")
        batch = flat(itertools.islice(rows, size))
        metrics = trainer.step(batch, keep=folder.skipped(step))
        is_evaluated = bool(held_out) and (step == steps or step % eval_every == 0)
        if is_evaluated:
            metrics |= task.stage.held_out(trainer, held_out)
        metrics |= checkpointing.copy(step, last=step == steps)
        folder.finish(step, metrics)
        checkpointing.complete(step, metrics)
        if is_evaluated or step in (num_done + 1, steps) or step % line_every == 0:
            remaining_s = (time.perf_counter() - start) / (step - num_done) * (steps - step)
            speed = f"{metrics['train/tokens_per_s']:,.0f} tokens/s  {remaining_s:.0f} s left"
            console.say(f"step {step}/{steps}  {_as_line(metrics)}  {speed}")


def _load(stage: Stage, config: Config, *, uses_logits: bool) -> tuple[list[Unit], list[Unit]]:
    """Load the rows to train on, and those held out."""
    tokenizer = model_folder.examine(config.model, head="logits" if uses_logits else None)
    longest = tokenizers.context_length(config.model)
    rows = stage.load(config.data, tokenizer, longest)
    data = config.default_source.held_out
    if data is None:
        return rows, []
    limit = min(config.eval.num_prompts, data.limit or config.eval.num_prompts)
    return rows, stage.load(data.model_copy(update={"limit": limit}), tokenizer, longest)


def _measured(trainer: Trainer, rows: Sequence[Unit]) -> list[dict[str, float]]:
    """Measure the columns that the objective needs beside the policy, summed over each sequence."""
    sequences = [sample.sequence for sample in flat(rows)]
    sums: list[dict[str, float]] = []
    for first in range(0, len(sequences), CHUNK):
        measured = trainer.measure(sequences[first : first + CHUNK])
        sums += [_sums(columns) for columns in measured]
    return sums


def _sums(columns: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {name: math.fsum(values) for name, values in columns.items()}


def _with(measured: Iterable[Mapping[str, float]], rows: Iterable[Unit]) -> list[Unit]:
    """Add to each sample of the rows what was measured of it."""
    numbers = iter(measured)
    units = []
    for row in rows:
        samples = [pairs.sample(sample.sequence, **next(numbers)) for sample in row]
        units.append(tuple(samples))
    return units


def flat(rows: Iterable[Unit]) -> list[TrainSample]:
    """Return the samples of all rows."""
    return list(itertools.chain.from_iterable(rows))


def in_epochs(rows: Sequence[Unit], seed: int) -> Iterator[Unit]:
    """Yield the rows without end, in a new order each epoch."""
    for epoch in itertools.count():
        yield from random.Random(f"{seed}:{epoch}").sample(rows, len(rows))


def _as_line(metrics: Mapping[str, float]) -> str:
    """Write the metrics of a line of progress."""
    return "  ".join(
        f"{word} {metrics[name]:.4f}" for name, word in SHOWN_METRICS.items() if name in metrics
    )


def _shown(row: Unit, tokenizer: Any) -> str:
    """Decode a row, with what is taught in [[ ]], and shorten it."""
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
    """The part of a checkpoint that knows the rows: a run on other rows is not resumed.

    It also keeps what was measured of the rows before the first step.
    """

    def __init__(self, name: str, samples: Sequence[TrainSample]) -> None:
        self._name = name
        rows = []
        for sample in samples:
            content = (tuple(keys(sample.sequence).tolist()), sample.sequence.mask)
            rows.append(content + tuple(sample.columns.values()))
        self._state = {"num_samples": len(samples), "hash": seed_of(*rows)}
        self.measured: list[dict[str, float]] = []

    def state(self) -> dict[str, Any]:
        return self._state | {"measured": self.measured}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take what was measured. Raise DataError if the checkpoint is of other rows."""
        known = dict(state)
        self.measured = known.pop("measured")
        if known != self._state:
            advice = "use the same data section, files and tokenizer, or start a new run"
            raise DataError(
                f"can't resume: the {self._name} were {known} and are {self._state} now; {advice}"
            )
