"""Checkpoints of a run: everything that going on needs, in <run.dir>/checkpoints/step_000010/.

    state_00000.safetensors ...   the trainer's tensors (trainer/checkpoint.py)
    state.json                    step, config, metrics, the trainer's counters, and the state of every part of the run
    COMPLETE                      the last file to be written; then the folder gets its name

A part is whatever has a `state()` of a few values and a `restore(state)`: the position in the data, the weight version.
Knows neither what the tensors nor what the parts' states mean.
"""

import dataclasses
import json
import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, Self

from hocket.config import Config, as_dict, changes
from hocket.errors import ConfigError, TrainerError
from hocket.manifest import COMPLETE_FILE
from hocket.system import flush

FOLDER = "checkpoints"
STATE_FILE = "state.json"
_SAME = ("model", "data", "curriculum", "trainer.seed", "sft.batch_size")
"""Settings, or sections of them, without which it is another run."""
_OF_A_RUN = (
    *("metrics.jsonl", "ledger.jsonl", "rollouts", "weights", "deltas", "tensorboard", "summary.json", "report.html"),
    FOLDER,
)


class Part(Protocol):
    """What a run also consists of."""

    def state(self) -> Mapping[str, Any]:
        """Returns what `restore` needs, ready for JSON."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes back to it."""


class Source(Protocol):
    """What checkpoints need of the trainer; hocket.trainer.trainer.Trainer is one."""

    def state(self, sink: Callable[[Mapping[str, Any]], None]) -> Mapping[str, Any]: ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A complete checkpoint. `trainer` is what its tensors need besides, `parts` the states by name."""

    folder: Path
    step: int
    config: Mapping[str, Any]
    metrics: Mapping[str, float]
    trainer: Mapping[str, Any]
    parts: Mapping[str, Mapping[str, Any]]

    def restore(self, parts: Mapping[str, Part]) -> None:
        """Has every part go back to its state. Raises ConfigError where the run had other parts."""
        if parts.keys() != self.parts.keys():
            raise ConfigError(
                f"{self.folder} has states of {', '.join(self.parts)}, this run has {', '.join(parts)}; go on with the "
                "command that wrote it, or choose another run.dir"
            )
        for name, part in parts.items():
            part.restore(self.parts[name])


def read(folder: Path) -> Saved:
    """Reads one checkpoint. Raises ConfigError where it is none, or not complete."""
    try:
        (folder / COMPLETE_FILE).stat()
        return Saved(folder=folder, **json.loads((folder / STATE_FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{folder} is no complete checkpoint: {error}. Remove it, and name another one") from error


def complete(run_dir: Path) -> list[Path]:
    """Returns the folders of the complete checkpoints, oldest first."""
    return sorted(path.parent for path in (run_dir / FOLDER).glob(f"step_*/{COMPLETE_FILE}"))


def find(config: Config, say: Callable[[str], None]) -> Saved | None:
    """Returns what to go on from: with checkpoint.resume, the newest complete checkpoint, if there is one.

    Where there is none, what the run folder has of a run is moved aside, as it begins again.

    Raises:
        ConfigError: with what is configured now it would be another run.
    """
    if not config.checkpoint.resume:
        return None
    folders = complete(config.run_dir)
    if not folders:
        _set_aside(config.run_dir, say)
        return None
    saved = read(folders[-1])
    said = []
    for key, (before, now) in changes(saved.config, config).items():
        if any(f"{key}.".startswith(f"{same}.") for same in _SAME):
            raise ConfigError(
                f"can't go on from {saved.folder}: {key} was {before!r}, and {now!r} makes it another run; set it as "
                "it was, or choose another run.dir"
            )
        said.append(f"; {key} was {before!r} and is {now!r}")
    say(f"going on from {saved.folder}{''.join(said)}")
    return saved


class Checkpoints:
    """Writes the checkpoints of one run. Use it as a context manager: its end waits for one that is being written.

    With checkpoint.async the files are written by a thread while training goes on, one checkpoint at a time; what goes
    wrong there is raised at the next step.

    Args:
        config: its checkpoint section, run.dir and trainer.steps are used.
        last: the step that the run goes on from, 0 at the beginning.
    """

    def __init__(self, config: Config, trainer: Source, parts: Mapping[str, Part], *, last: int = 0) -> None:
        self._config = config
        self._settings = config.checkpoint
        self._root = config.run_dir / FOLDER
        self._trainer = trainer
        self._parts = parts
        self._last = last
        self._copied: _Copy | None = None
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        self._thread.shutdown()
        if kind is None:
            self._wait()

    def copy(self, step: int, *, last: bool = False) -> dict[str, float]:
        """Takes the trainer's state after `step`, where a checkpoint is due; the trainer must be idle.

        Returns time/checkpoint, the seconds it took.

        Raises:
            TrainerError: it can't be written, or the one before could not.
        """
        if not self.due(step, last=last):
            return {}
        start = time.perf_counter()
        self._wait()
        copy = _Copy(self._root / f".step_{step:06d}.partial")
        with _written(copy.folder):
            for leftover in self._root.glob(".*"):
                shutil.rmtree(leftover, ignore_errors=True)
            copy.folder.mkdir(parents=True)
            copy.rest = self._trainer.state(copy.buckets.append if self._settings.in_background else copy.write)
        self._copied, self._last = copy, step
        return {"time/checkpoint": time.perf_counter() - start}

    def complete(self, step: int, metrics: Mapping[str, float]) -> None:
        """Adds to what `copy` took how all parts are after `step`, and its metrics: then it is a checkpoint.

        Raises:
            TrainerError: it can't be written, or the one before could not.
        """
        if self._writing is not None and self._writing.done():
            self._wait()
        if self._copied is None:
            return
        copy, self._copied = self._copied, None
        state = {
            "step": step,
            "config": as_dict(self._config),
            "metrics": {name: value for name, value in metrics.items() if math.isfinite(value)},
            "trainer": copy.rest,
            "parts": {name: part.state() for name, part in self._parts.items()},
        }
        if self._settings.in_background:
            self._writing = self._thread.submit(self._finish, copy, state)
        else:
            self._finish(copy, state)

    def due(self, step: int, *, last: bool = False) -> bool:
        """Whether there is one to take after this step; `last`: no other follows, before trainer.steps."""
        every = self._settings.every_steps
        return every > 0 and (step // every > self._last // every or last or step == self._config.trainer.steps)

    def _wait(self) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def _finish(self, copy: "_Copy", state: Mapping[str, Any]) -> None:
        with _written(copy.folder):
            while copy.buckets:
                copy.write(copy.buckets.pop(0))
            (copy.folder / STATE_FILE).write_text(json.dumps(state), encoding="utf-8")
            (copy.folder / COMPLETE_FILE).touch()
            for path in (copy.folder / STATE_FILE, copy.folder / COMPLETE_FILE, copy.folder):
                flush(path)
            copy.folder.rename(self._root / f"step_{state['step']:06d}")
            flush(self._root)
        self._prune()

    def _prune(self) -> None:
        """Remove all checkpoints but the newest."""
        for folder in complete(self._config.run_dir)[: -self._settings.keep]:
            gone = folder.with_name(f".{folder.name}.partial")  # first renamed: nobody may take half of it for one
            folder.rename(gone)
            shutil.rmtree(gone, ignore_errors=True)  # what is left of it goes before the next one is written


@dataclasses.dataclass(slots=True)
class _Copy:
    """The trainer's state on its way to the disk: `buckets` are not there yet, `rest` is what tensors don't hold."""

    folder: Path
    buckets: list[Mapping[str, Any]] = dataclasses.field(default_factory=list)
    rest: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def write(self, bucket: Mapping[str, Any]) -> None:
        from hocket.trainer.checkpoint import write_bucket

        write_bucket(self.folder, bucket)


@contextmanager
def _written(folder: Path) -> Iterator[None]:
    """Leaves nothing in `folder` where its body can't write there."""
    try:
        yield
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise TrainerError(
            f"can't write a checkpoint to {folder.parent}: {error}. Free space there, set another run.dir, or "
            "checkpoint.every_steps=0"
        ) from error


def _set_aside(run_dir: Path, say: Callable[[str], None]) -> None:
    there = [run_dir / name for name in _OF_A_RUN if (run_dir / name).exists()]
    if there:
        aside = next(folder for i in range(1, 10_000) if not (folder := run_dir / f"aside-{i}").exists())
        aside.mkdir()
        for path in there:
            path.rename(aside / path.name)
        say(f"{run_dir} has no complete checkpoint: the run begins again; what was there is in {aside}")
