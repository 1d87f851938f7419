"""Checkpoints of a run: write them while it trains, and read the newest when it goes on.

A checkpoint is a folder RUN/checkpoints/step_N with tensors, state.json and, written last, COMPLETE
with the checksum of both.
"""

import dataclasses
import json
import logging
import math
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

from hocket.common.files import complete_folder, numbered, partial_of, remove_folder, unused
from hocket.common.processes import first
from hocket.common.tasks import note
from hocket.config import Config
from hocket.data.template import DAY
from hocket.errors import ConfigError, TrainerError, remedy
from hocket.formats import GROWING, METRICS, PLUGINS, ROLLOUTS, SUMMARY, TRAINED
from hocket.observe.rows import DAMAGED, read_metrics, reading, step_of
from hocket.protocol import TensorSpec, manifest
from hocket.protocol.manifest import COMPLETE_FILE

FOLDER = "checkpoints"
STATE_FILE = "state.json"

# Launchers of several ranks pass a Ctrl-C on to rank 0 as SIGUSR1.
CTRL_C = signal.SIGUSR1 if "WORLD_SIZE" in os.environ else signal.SIGINT

# Commands that train beside `train`. A checkpoint of each has a part of the same name.
_STAGES = ("sft", "rm", "dpo")

# Prefixes of the settings that a resumed run must not change.
_FIXED_SETTINGS = (
    "model.",
    "data.",
    "curriculum.",
    "trainer.seed.",
    "dpo.reference.",
    "sft.batch_size.",
    "rm.batch_size.",
    "dpo.batch_size.",
)

# Files and folders that a run writes into its folder, and that hold nothing of the user's.
_FILES = (
    *GROWING,
    "trace.json",
    "tensorboard",
    "wandb",
    "skipped",
    TRAINED,
    SUMMARY,
    "report.html",
    "plugins",
    PLUGINS,
)
# All that a run writes. In these further folders there may be files of the user's, too.
_RUN_FILES = (*_FILES, ROLLOUTS, "weights", "deltas", "best", FOLDER)

# Patterns of all that a run without a complete step may have written, and no user.
_NUMBER = "[0-9]" * 6
_START_PATTERNS = (
    *_FILES,
    f"rollouts/step_{_NUMBER}.jsonl",
    f"rollouts/eval_{_NUMBER}.jsonl",
    "best",
    f"weights/v{_NUMBER}",
    f"deltas/v{_NUMBER}",
)

TrainerState = Callable[[Callable[[Mapping[str, Any]], None]], Mapping[str, Any]]
"""Trainer.state: passes each bucket of tensors to its argument, and returns the other state."""

log = logging.getLogger(__name__)


class Resumable(Protocol):
    """A part of a run that can be saved: its state is ready for JSON."""

    def state(self) -> Mapping[str, Any]: ...

    def restore(self, state: Mapping[str, Any]) -> None: ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A complete checkpoint, except for its tensors."""

    folder: Path
    step: int  # the last step before it was written
    config: Mapping[str, Any]  # the run's settings at that time
    metrics: Mapping[str, float]  # metrics of that step
    trainer: Mapping[str, Any]  # the trainer's state beside its tensors
    parts: Mapping[str, Mapping[str, Any]]  # states of the run's other parts, by their names
    day: str = ""  # the day on which the run began, which chat templates may show

    def restore(self, parts: Mapping[str, Resumable]) -> None:
        """Restore the states of all parts, by their names."""
        for name, part in parts.items():
            part.restore(self.parts[name])


# Reading


def read(folder: Path, *, whole: bool = True) -> Saved:
    """Read one checkpoint. Raises ConfigError if it is incomplete or damaged.

    Args:
        folder: the checkpoint.
        whole: whether to read all tensors, too, and compare the checksum.
    """
    from safetensors import SafetensorError

    try:
        checksum = (folder / COMPLETE_FILE).read_text(encoding="utf-8")
        text = (folder / STATE_FILE).read_text(encoding="utf-8")
        saved = Saved(folder=folder, **json.loads(text))
        if whole:
            specs = manifest.specs(manifest.tensors(folder))
            if checksum != manifest.total_checksum(specs, text):
                raise ValueError(
                    "something has changed its files, the disk is failing, "
                    "or an earlier hocket wrote it"
                )
        return saved
    except (OSError, SafetensorError, *DAMAGED) as error:
        raise ConfigError(
            f"{folder} is no complete checkpoint: {error}. Remove it, or name another one"
        ) from error


def complete(folder: Path) -> list[Path]:
    """List the complete checkpoints in a folder, oldest first."""
    return list(numbered(folder, "step_*", COMPLETE_FILE).values())


def find(
    config: Config, say: Callable[[str], None], *, dry_run: bool = False, command: str = "train"
) -> Saved | None:
    """Find the checkpoint that a run goes on from: the newest that is not damaged.

    It is printed, with what has changed in the settings, and DAY becomes the day of its run.
    Without any, or without checkpoint.resume, the run begins: `make_room`, and the result is None.

    Args:
        config: the settings of the run.
        say: prints a line.
        dry_run: change no file.
        command: the command that wants to go on.

    Raises:
        ConfigError: all checkpoints are damaged, or the newest is of another run.
    """
    folders = complete(config.run_dir / FOLDER)
    if not (folders and config.checkpoint.resume):
        make_room(config.run_dir, say, resume=config.checkpoint.resume, dry_run=dry_run)
        DAY.begin()
        return None
    saved = _newest_undamaged(folders, say)
    _check_command(saved, command, config.run_dir)

    # Name each changed setting, and refuse those that make another run of it.
    line = f"going on from {saved.folder}"
    for key, (before, now) in config.changes(saved.config).items():
        if f"{key}.".startswith(_FIXED_SETTINGS):
            raise ConfigError(
                f"can't go on from {saved.folder}: {key} was {before!r}, {now!r} is another run; "
                "set it as it was, or choose another run.dir"
            )
        line += f"; {key} was {before!r} and is {now!r}"
    say(line)
    DAY.go_on(saved.day)
    return saved


def _newest_undamaged(folders: list[Path], say: Callable[[str], None]) -> Saved:
    """Read the last of these checkpoints that is not damaged."""
    while True:
        try:
            return read(folders.pop())
        except ConfigError as error:
            if not folders:
                raise
            say(f"WARNING: {error}; the one before is taken")


def _check_command(saved: Saved, command: str, run_dir: Path) -> None:
    """Raise ConfigError if another command wrote the checkpoint."""
    written_by = next((stage for stage in _STAGES if stage in saved.parts), "train")
    if written_by != command:
        advice = f"choose another run.dir; model.path={run_dir} names its model"
        raise ConfigError(f"can't go on from {saved.folder}: it is of {written_by}; {advice}")


# Beginning a run


def refuse_taken(run_dir: Path, *, resume: bool) -> int:
    """Count the steps of the run in a folder. Raises ConfigError for any, except to `resume`."""
    with reading(run_dir / METRICS):
        rows = read_metrics(run_dir)
        kept = numbered(run_dir / FOLDER, "step_*", COMPLETE_FILE)
        steps: int = max(kept, default=0)
        for row in rows:
            steps = max(steps, step_of(row))
    if steps and not resume:
        advice = "choose another run.dir, or go on with its training by checkpoint.resume=true"
        if not kept:
            advice = (
                "choose another run.dir; it kept no checkpoint, so that its training can't go on"
            )
        raise ConfigError(f"{run_dir} holds a run of {steps} steps already; {advice}")
    return steps


def make_room(
    run_dir: Path, say: Callable[[str], None], *, resume: bool = False, dry_run: bool = False
) -> None:
    """Make room for a new run: remove a run without a step, or move one without a checkpoint aside.

    Args:
        run_dir: the run's folder.
        say: prints a line about moved files.
        resume: False: raise ConfigError for a run with steps, which would be moved.
        dry_run: change no file.
    """
    steps = refuse_taken(run_dir, resume=resume)
    # A run that ended before its first step has nothing worth keeping.
    if steps == 0 and (run_dir / METRICS).exists():
        if not dry_run:
            _remove_start(run_dir)
        return
    paths = [run_dir / name for name in _RUN_FILES]
    present = [path for path in paths if path.exists()]
    if not (present and resume):
        return
    aside = unused(run_dir / "aside")
    begins = f"{run_dir} has no complete checkpoint: the run begins again"
    if dry_run:
        say(f"{begins}, and what is there is moved to {aside}")
        return
    aside.mkdir()
    for path in present:
        path.rename(aside / path.name)
    say(f"{begins}; what was there is in {aside}")


def _remove_start(run_dir: Path) -> None:
    for pattern in _START_PATTERNS:
        for path in run_dir.glob(pattern):
            if path.is_dir():
                remove_folder(path)
            else:
                path.unlink()


# Writing


def write_bucket(folder: Path, bucket: Mapping[str, Any]) -> None:
    """Write tensors as one more file of a checkpoint. Raises OSError."""
    from safetensors import SafetensorError  # imported late: these import torch
    from safetensors.torch import save_file

    number = len(list(folder.iterdir()))
    try:
        save_file(dict(bucket), folder / f"state_{number:05d}.safetensors")
    except SafetensorError as error:  # an error of the disk, which it has only in its message
        raise OSError(str(error)) from error


class Checkpoints(AbstractContextManager["Checkpoints"]):
    """Writes the checkpoints of one run.

    `copy` copies the trainer's state while the trainer is idle; `complete` adds the step's metrics
    and the states of all other parts. With checkpoint.async a thread writes the files meanwhile,
    and its errors are raised at the next step. Another thread then calls each function of `after`
    with the folder, and its errors are raised in the same way. Leaving the context waits for both.

    The first Ctrl-C has the running step write a checkpoint; `complete` then raises
    KeyboardInterrupt.

    Example: a loop that writes a checkpoint every checkpoint.every_steps steps.

        with Checkpoints(config, trainer.state, {"prompts": prompts}) as checkpoints:
            for step in range(1, steps + 1):
                metrics = trainer.step(samples)
                checkpoints.copy(step, last=step == steps)
                checkpoints.complete(step, metrics)

    Args:
        config: the settings of the run.
        state: `Trainer.state`.
        parts: the other parts of the run with a state, by their names.
        newest: step of the newest checkpoint, 0 before any.
        after: called with the folder of each complete checkpoint.

    Attributes:
        kept: a step whose checkpoint is not removed when it is old.
    """

    def __init__(
        self,
        config: Config,
        state: TrainerState,
        parts: Mapping[str, Resumable],
        *,
        newest: int = 0,
        after: Sequence[Callable[[Path], None]] = (),
    ) -> None:
        self._config = config
        self._settings = config.checkpoint
        self._root = config.run_dir / FOLDER
        self._state = state
        self._parts = parts
        self.newest = newest
        self.kept = 0
        self.after = after
        self._interrupted = False  # whether Ctrl-C was pressed
        self._signals = ExitStack()  # gives the signal back to its handler before

        # The checkpoint in work.
        self._copied: Mapping[str, Any] | None = None  # the trainer's state, until `complete`
        self._buckets: list[Mapping[str, Any]] = []  # copied tensors that wait for the thread
        self._specs: dict[str, TensorSpec] = {}  # specs of the tensors that are written

        # One thread writes a checkpoint; another calls `after`, and removes old ones.
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[None] = Future()
        self._writing.set_result(None)
        self._after_thread = ThreadPoolExecutor(1, "checkpoint-copy")
        self._after_calls: list[Future[None]] = []  # calls of `after` that may raise yet

    def __enter__(self) -> "Checkpoints":
        if self._settings.every_steps:
            self._signals.enter_context(first(CTRL_C, self._interrupt))
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        self._signals.close()
        self._writer.shutdown()
        self._after_thread.shutdown()
        if kind is None:  # an error of the run is worth more than those of its checkpoints
            self._writing.result()
            self._raise_after_errors()

    def copy(self, step: int, *, last: bool = False) -> dict[str, float]:
        """Copy the idle trainer's state if a checkpoint is due at this step.

        Returns time/checkpoint, the seconds that it took; {} if none is due. `last` marks the run's
        last step, at which one is always due.
        """
        if not self._is_due(step, last):
            return {}
        start = time.perf_counter()
        self._writing.result()  # the checkpoint before must be written
        self.newest = step
        with self._disk_errors():
            for leftover in self._root.glob(".*"):  # of a run that was killed
                shutil.rmtree(leftover, ignore_errors=True)
            partial_of(self._folder).mkdir(parents=True)
            self._specs.clear()
            take = self._buckets.append if self._settings.in_background else self._write
            self._copied = self._state(take)
        return {"time/checkpoint": note("time/checkpoint", start)}

    def _is_due(self, step: int, last: bool) -> bool:
        every = self._settings.every_steps
        if every == 0 or step == self.newest:
            return False
        # Due once the steps have passed a multiple of `every` since the newest checkpoint.
        return last or self._interrupted or step // every > self.newest // every

    def complete(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Write a checkpoint, if `copy` took the trainer's state, with metrics and all parts."""
        # Raise errors of the threads.
        if self._writing.done():
            self._writing.result()
        self._raise_after_errors()
        if self._copied is None:
            return
        finite = {  # a metric that was not finite may be None, too
            name: value
            for name, value in metrics.items()
            if value is not None and math.isfinite(value)
        }
        state = {
            "step": step,
            "config": self._config.as_dict(),
            "day": str(DAY),
            "metrics": finite,
            "trainer": self._copied,
            "parts": {name: part.state() for name, part in self._parts.items()},
        }
        self._copied = None
        self._writing = self._writer.submit(self._finish, state)
        if self._interrupted or not self._settings.in_background:
            self._writing.result()
        if self._interrupted:
            raise KeyboardInterrupt

    def _interrupt(self) -> None:
        """Note a Ctrl-C, and write a line directly: a signal may have interrupted a print."""
        self._interrupted = True
        line = (
            b"\ninterrupted: after this step at the latest the run ends, with a checkpoint; "
            b"Ctrl-C again ends it now\n"
        )
        os.write(2, line)

    @property
    def _folder(self) -> Path:
        return self._root / f"step_{self.newest:06d}"

    def _write(self, bucket: Mapping[str, Any]) -> None:
        self._specs |= manifest.specs(bucket.items())
        write_bucket(partial_of(self._folder), bucket)

    def _finish(self, state: Mapping[str, Any]) -> None:
        """Write the tensors that wait, then the state; in the thread of `_writer`."""
        partial = partial_of(self._folder)
        with self._disk_errors():
            while self._buckets:
                self._write(self._buckets.pop(0))  # each is freed when it is written
            text = json.dumps(state)
            (partial / STATE_FILE).write_text(text, encoding="utf-8")
            checksum = manifest.total_checksum(self._specs, text)
            (partial / COMPLETE_FILE).write_text(checksum, encoding="utf-8")
            complete_folder(self._folder)
        for function in self.after:
            self._after_calls.append(self._after_thread.submit(function, self._folder))
        self._after_thread.submit(self._tidy, self._folder, f"step_{self.kept:06d}")

    def _tidy(self, written: Path, kept: str) -> None:
        """Remove old checkpoints. Those after `written` don't count: `after` has not seen them."""
        folders = [folder for folder in complete(self._root) if folder <= written]
        for old in folders[: -self._settings.keep]:
            if old.name == kept:
                continue
            try:
                remove_folder(old)
            except OSError as error:
                line = "can't remove %s: %s; it is tried again with the next checkpoint"
                log.warning(line, old, error)

    def _raise_after_errors(self) -> None:
        """Raise the error of a call of `after` that has ended."""
        ended = [call for call in self._after_calls if call.done()]
        self._after_calls = [call for call in self._after_calls if not call.done()]
        for call in ended:
            call.result()

    @contextmanager
    def _disk_errors(self) -> Iterator[None]:
        """Raise an error of the disk as a TrainerError, without the files of this checkpoint."""
        try:
            yield
        except OSError as error:
            shutil.rmtree(partial_of(self._folder), ignore_errors=True)
            advice = remedy(error) or "is the disk well?"
            raise TrainerError(
                f"can't write a checkpoint to {self._root}: {error}; {advice}; "
                "or set another run.dir, or checkpoint.every_steps=0"
            ) from error
