"""Run a stage: epochs over its rows, held-out numbers, checkpoints, and a model at the end."""

import dataclasses
import functools
import itertools
import math
import operator
import os
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from hocket.common.files import atomic_folder, kind_of
from hocket.common.registry import load_plugins, options_of, try_out
from hocket.common.tasks import seed_of
from hocket.config import Config, DataConfig, StageConfig
from hocket.errors import ConfigError, DataError
from hocket.observe.console import SHORT, Console
from hocket.observe.owner import owning
from hocket.observe.run_folder import RunFolder
from hocket.stages import STAGES
from hocket.trainer import checkpoints
from hocket.trainer.batching import check_fits
from hocket.trainer.checkpoints import Checkpoints, Part
from hocket.trainer.models import Objective
from hocket.trainer.state import SavedTensors
from hocket.trainer.trainer import Trainer
from hocket.types import Metrics, TrainSample

NUM_LINES = 20  # of progress in a whole run
SAID = {  # metrics in these lines
    "train/loss": "loss",
    "rewards/accuracies": "accuracy",
    "eval/loss": "held-out loss",
    "eval/rewards/accuracies": "held-out accuracy",
}
T = TypeVar("T")

Row = tuple[TrainSample, ...]
"""Samples that are trained together: `Objective.unit` of them."""
Prepare = Callable[[Trainer, Sequence[Row], bool, Callable[[str], None]], list[Row]]
"""(trainer, rows, whether the run goes on from a checkpoint, what tells people) → rows."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """What a stage has of its own."""

    settings: StageConfig
    rows: str  # its word for them
    first: str  # what is said of the first one, before its text
    rate: str  # advice beside the learning rate of GRPO, the default
    objective: Objective
    load: Callable[[DataConfig], list[Row]]
    prepare: Prepare | None = None  # what rows need of the model that training begins with
    held_out: Callable[[Trainer, Sequence[TrainSample]], Metrics]


def run(config: Config, command: str) -> None:
    """Train a stage on the rows of data.source and write RUN/model; every rank calls it."""
    stage: Stage = STAGES.get(command)(config)
    if int(os.environ.get("RANK", "0")) > 0:
        Trainer(config, objective=stage.objective).follow()
        return
    if config.data.sources:
        raise ConfigError(f"data.sources is for train: {command} has one data.source; join the rows to one file")
    load_plugins(config.plugins)  # data.source may be a task of one
    with owning(config.run_dir, print, wait=config.checkpoint.resume):
        _train(config, command, stage)


def _train(config: Config, command: str, stage: Stage) -> None:
    saved = checkpoints.find(config, print, command=command)
    output = config.run_dir / "model"
    if output.exists() and kind_of(output) not in ("model", "adapter") and any(output.iterdir()):
        raise ConfigError(f"{output} exists and is not a model; choose another run.dir, or remove it")
    rows = stage.load(config.data)
    held_out: list[Row] = []
    if (data := config.held_out_data) is not None:
        limit = min(config.eval.num_prompts, data.limit or config.eval.num_prompts)
        held_out = stage.load(data.model_copy(update={"limit": limit}))
    last = saved.step if saved else 0
    size = stage.settings.batch_size
    setting = "trainer.steps"
    most = config.trainer.steps * size
    if stage.settings.epochs is not None:
        setting = f"{command}.epochs"
        most = stage.settings.epochs * len(rows)
    steps = math.ceil(most / size)
    with (
        Console(steps) as console,
        RunFolder(config, console.say) as folder,
        Trainer(config, objective=stage.objective) as trainer,
    ):
        parts: dict[str, Part] = {"recorder": folder, stage.rows: Rows(stage.rows, flat(rows))}
        if stage.prepare is not None:
            prepared = stage.prepare(trainer, [*rows, *held_out], saved is not None, console.say)
            rows, held_out = prepared[: len(rows)], prepared[len(rows) :]
        samples = flat(rows)
        measured = flat(held_out)
        trainer.plan(steps)
        if saved is not None:
            trainer.restore(SavedTensors(saved.folder), saved.trainer)
            saved.restore(parts)
        check_fits([*samples, *measured], trainer.micro_batch_tokens, stage.objective.unit)
        console.say(f"{len(rows)} {stage.rows}, {trainer.num_parameters:,} parameters; {trainer.memory}")
        console.say(f"{stage.first}: {_shown(rows[0], trainer.tokenizer)}")
        console.say(f"{setting} decides: {steps} steps of {size} {stage.rows}")
        if size >= len(rows):
            console.say(f"an update takes them all: lower {command}.batch_size for more")
        if "learning_rate" not in config.trainer.model_fields_set:
            rate = config.trainer.learning_rate
            console.say(f"trainer.learning_rate={rate:g} is for GRPO; {stage.rate}")
        if saved is None and held_out:
            before = stage.held_out(trainer, measured)
            folder.finish(0, before)
            console.say(f"step 0/{steps}  {_said(before)}, of {len(held_out)} {stage.rows}")
        order = itertools.islice(in_epochs(rows, config.trainer.seed), last * size, most)
        start = time.perf_counter()
        every = config.eval.every_steps
        with Checkpoints(config, trainer.state, parts, last=last) as kept:
            for step in range(last + 1, steps + 1):
                console.progress(step, "training")
                batch = flat(itertools.islice(order, size))
                metrics = trainer.step(batch, keep=folder.skipped(step))
                if held_out and (step == steps or (every > 0 and step % every == 0)):
                    metrics |= stage.held_out(trainer, measured)
                metrics |= kept.copy(step, last=step == steps)
                folder.finish(step, metrics)
                kept.complete(step, metrics)
                if "eval/loss" in metrics or step in (last + 1, steps) or step % max(1, steps // NUM_LINES) == 0:
                    left_s = (time.perf_counter() - start) / (step - last) * (steps - step)
                    speed = f"{metrics['train/tokens_per_s']:,.0f} tokens/s  {left_s:.0f} s left"
                    console.say(f"step {step}/{steps}  {_said(metrics)}  {speed}")
            with atomic_folder(output) as partial:
                trainer.export(partial)
            done = f"all {steps} steps are done; for more of them raise {setting}; " if last >= steps else ""
            console.say(f"{done}wrote {output}")


def options_of_stage(kind: type[T], section: StageConfig, name: str) -> T:
    """Return the options of a stage, a dataclass, from its section. Raise ConfigError where they are wrong."""
    options = options_of(name, kind, section.model_extra or {}, section=name)
    make = functools.partial(kind, **options)
    try_out(make, name, name)
    return make()


def flat(rows: Iterable[Row]) -> list[TrainSample]:
    return list(itertools.chain.from_iterable(rows))


def in_epochs(rows: Sequence[Row], seed: int) -> Iterator[Row]:
    """Yield the rows without end, in a new order each epoch."""
    for epoch in itertools.count():
        yield from random.Random(f"{seed}:{epoch}").sample(rows, len(rows))


def _said(metrics: Mapping[str, float]) -> str:
    return "  ".join(f"{word} {metrics[name]:.4f}" for name, word in SAID.items() if name in metrics)


def _shown(row: Row, tokenizer: Any) -> str:
    sides = []
    for sample in row:
        shown = ""
        tokens = zip(sample.sequence.mask, sample.sequence.token_ids, strict=True)
        for taught, run in itertools.groupby(tokens, key=operator.itemgetter(0)):
            text = tokenizer.decode([token for _, token in run])
            shown += f"[[{text}]]" if taught else text
        sides.append(shown)
    return SHORT.repr(" / ".join(sides))


class Rows:
    """Refuse to resume a checkpoint on other rows."""

    def __init__(self, name: str, samples: Sequence[TrainSample]) -> None:
        self._name = name
        rows = (
            (sample.sequence.token_ids, sample.sequence.mask, *sample.sequence.images, *sample.columns.values())
            for sample in samples
        )
        self._state = {"num_samples": len(samples), "hash": seed_of(*rows)}

    def state(self) -> dict[str, int]:
        return self._state

    def restore(self, state: Mapping[str, Any]) -> None:
        if state != self._state:
            advice = "use the same data section, files and tokenizer, or start a new run"
            raise DataError(f"can't resume: the {self._name} were {state} and are {self._state} now; {advice}")
