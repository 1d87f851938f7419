"""Checkpoints of a run: folders with tensors, state.json and, written last, COMPLETE with the checksum of both."""

import dataclasses
import itertools
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
CTRL_C = (
    signal.SIGUSR1 if "WORLD_SIZE" in os.environ else signal.SIGINT
)  # as launchers pass it on to rank 0
_STAGES = ("sft", "rm", "dpo")  # parts of their checkpoints, too
_SIZES = (f"{command}.batch_size." for command in _STAGES)
# Settings that a resumed run keeps.
_SAME = ("model.", "data.", "curriculum.", "trainer.seed.", "dpo.reference.", *_SIZES)
_LOGS = ("trace.json", "tensorboard", "wandb", "skipped", TRAINED)
_FILES = (*GROWING, *_LOGS, SUMMARY, "report.html", "plugins", PLUGINS)
_OF_A_RUN = (*_FILES, ROLLOUTS, "weights", "deltas", "best", FOLDER)
_NUMBER = "[0-9]" * 6
_ROLLOUTS = (f"rollouts/step_{_NUMBER}.jsonl", f"rollouts/eval_{_NUMBER}.jsonl")
_OF_A_START = (
    *_FILES,
    *_ROLLOUTS,
    "best",
    f"weights/v{_NUMBER}",
    f"deltas/v{_NUMBER}",
)  # what a run without a step has left

TrainerState = Callable[[Callable[[Mapping[str, Any]], None]], Mapping[str, Any]]  # Trainer.state

log = logging.getLogger(__name__)


class Resumable(Protocol):
    """A part of a run with a state ready for JSON."""

    def state(self) -> Mapping[str, Any]: ...

    def restore(self, state: Mapping[str, Any]) -> None: ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A complete checkpoint, but for its tensors."""

    folder: Path
    step: int
    config: Mapping[str, Any]
    metrics: Mapping[str, float]
    trainer: Mapping[str, Any]  # the trainer's state beside its tensors
    parts: Mapping[str, Mapping[str, Any]]  # name → state
    day: str = ""  # on which the run began

    def restore(self, parts: Mapping[str, Resumable]) -> None:
        for name, part in parts.items():
            part.restore(self.parts[name])


def read(folder: Path, *, whole: bool = True) -> Saved:
    """Read one checkpoint. Raise ConfigError where it is not as it was written; but for `whole` no tensor is read."""
    from safetensors import SafetensorError

    try:
        mark = (folder / COMPLETE_FILE).read_text(encoding="utf-8")
        text = (folder / STATE_FILE).read_text(encoding="utf-8")
        saved = Saved(folder=folder, **json.loads(text))
        if whole and mark != manifest.total_checksum(
            manifest.specs(manifest.tensors(folder)), text
        ):
            raise ValueError(
                "something has changed its files, the disk is failing, or an earlier hocket wrote it"
            )
        return saved
    except (OSError, SafetensorError, *DAMAGED) as error:
        raise ConfigError(
            f"{folder} is no complete checkpoint: {error}. Remove it, or name another one"
        ) from error


def complete(folder: Path) -> list[Path]:
    """Return the complete checkpoints in a folder, oldest first."""
    return [*numbered(folder, "step_*", COMPLETE_FILE).values()]


def find(
    config: Config, say: Callable[[str], None], *, dry_run: bool = False, command: str = "train"
) -> Saved | None:
    """Return the newest undamaged checkpoint with checkpoint.resume; where there is none at all, `make_room`."""
    folders = complete(config.run_dir / FOLDER)
    if not (folders and config.checkpoint.resume):
        make_room(config.run_dir, say, resume=config.checkpoint.resume, dry_run=dry_run)
        DAY.begin()
        return None
    while True:
        try:
            saved = read(folders.pop())
            break
        except ConfigError as error:
            if not folders:
                raise
            say(f"WARNING: {error}; the one before is taken")
    of = next((name for name in _STAGES if name in saved.parts), "train")
    if of != command:
        advice = f"choose another run.dir; model.path={config.run_dir} names its model"
        raise ConfigError(f"can't go on from {saved.folder}: it is of {of}; {advice}")
    line = f"going on from {saved.folder}"
    for key, (before, now) in config.changes(saved.config).items():
        if f"{key}.".startswith(_SAME):
            what = f"{key} was {before!r}, {now!r} is another run; set it as it was, or choose another run.dir"
            raise ConfigError(f"can't go on from {saved.folder}: {what}")
        line += f"; {key} was {before!r} and is {now!r}"
    say(line)
    DAY.go_on(saved.day)
    return saved


def refuse_taken(run_dir: Path, *, resume: bool) -> int:
    """Count the steps of the run in a folder; raise ConfigError for any, but to `resume`."""
    with reading(run_dir / METRICS):
        rows = read_metrics(run_dir)
        kept = numbered(run_dir / FOLDER, "step_*", COMPLETE_FILE)
        steps: int = max([0, *kept, *map(step_of, rows)])
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
    """Remove a run without a step, move another one aside (`resume`), or raise ConfigError; `dry_run`: only say it."""
    steps = refuse_taken(run_dir, resume=resume)
    there = [path for path in map(run_dir.joinpath, _OF_A_RUN) if path.exists()]
    if steps == 0 and (run_dir / METRICS).exists():
        if dry_run:
            return
        for path in itertools.chain.from_iterable(map(run_dir.glob, _OF_A_START)):
            if path.is_dir():
                remove_folder(path)
            else:
                path.unlink()
    elif there and resume:
        aside = unused(run_dir / "aside")
        begins = f"{run_dir} has no complete checkpoint: the run begins again"
        if dry_run:
            say(f"{begins}, and what is there is moved to {aside}")
            return
        aside.mkdir()
        for path in there:
            path.rename(aside / path.name)
        say(f"{begins}; what was there is in {aside}")


def write_bucket(folder: Path, bucket: Mapping[str, Any]) -> None:
    """Write one more file; raises OSError."""
    from safetensors import SafetensorError  # which imports torch
    from safetensors.torch import save_file

    try:
        save_file(dict(bucket), folder / f"state_{len(list(folder.iterdir())):05d}.safetensors")
    except SafetensorError as error:  # names the disk's error in words only
        raise OSError(str(error)) from error


class Checkpoints(AbstractContextManager["Checkpoints"]):
    """Writes the checkpoints of one run; leaving it waits for one that is being written.

    With checkpoint.async a thread writes them; its errors are raised at the next step. Another one calls `after` with
    each complete one; so are its errors. `last`: step of the newest, 0 before any. `kept`: a step whose checkpoint
    stays.

    The first Ctrl-C has the step write one; then `complete` raises KeyboardInterrupt.
    """

    def __init__(
        self,
        config: Config,
        state: TrainerState,
        parts: Mapping[str, Resumable],
        *,
        last: int = 0,
        after: Sequence[Callable[[Path], None]] = (),
    ) -> None:
        self._config = config
        self._settings = config.checkpoint
        self._root = config.run_dir / FOLDER
        self._state = state
        self._parts = parts
        self.last = last
        self.kept = 0
        self._interrupted = False
        self._signals = ExitStack()
        self.after = after
        self._copied: Mapping[str, Any] | None = (
            None  # the trainer's state, until it is in a checkpoint
        )
        self._buckets: list[Mapping[str, Any]] = []  # its tensors, with checkpoint.async
        self._specs: dict[str, TensorSpec] = {}  # of those that are written
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._later = ThreadPoolExecutor(1, "checkpoint-copy")
        self._passed: list[Future[None]] = []  # calls of `after`
        self._writing: Future[None] = Future()
        self._writing.set_result(None)

    def __enter__(self) -> "Checkpoints":
        if self._settings.every_steps:
            self._signals.enter_context(first(CTRL_C, self._interrupt))
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        self._signals.close()
        self._thread.shutdown()
        self._later.shutdown()
        if kind is None:
            self._writing.result()
            self._raise_passed()

    def copy(self, step: int, *, last: bool = False) -> dict[str, float]:
        """Copy the idle trainer's state where a checkpoint is due; return time/checkpoint."""
        every = self._settings.every_steps
        if (
            every == 0
            or step == self.last
            or not (last or self._interrupted or step // every > self.last // every)
        ):
            return {}
        start = time.perf_counter()
        self._writing.result()
        self.last = step
        with self._disk_errors():
            for leftover in self._root.glob(".*"):
                shutil.rmtree(leftover, ignore_errors=True)
            partial_of(self._folder).mkdir(parents=True)
            self._specs.clear()
            self._copied = self._state(
                self._buckets.append if self._settings.in_background else self._write
            )
        return {"time/checkpoint": note("time/checkpoint", start)}

    def complete(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Make a checkpoint of what `copy` took, metrics, and the state of all parts."""
        if self._writing.done():
            self._writing.result()
        self._raise_passed()
        if self._copied is None:
            return
        known = {name: value for name, value in metrics.items() if value is not None}
        state = {
            "step": step,
            "config": self._config.as_dict(),
            "day": str(DAY),
            "metrics": {name: value for name, value in known.items() if math.isfinite(value)},
            "trainer": self._copied,
            "parts": {name: part.state() for name, part in self._parts.items()},
        }
        self._copied = None
        self._writing = self._thread.submit(self._finish, state)
        if self._interrupted or not self._settings.in_background:
            self._writing.result()
        if self._interrupted:
            raise KeyboardInterrupt

    def _interrupt(self) -> None:
        self._interrupted = True
        os.write(
            2,
            b"\ninterrupted: after this step at the latest the run ends, with a checkpoint; Ctrl-C again ends it now\n",
        )

    @property
    def _folder(self) -> Path:
        return self._root / f"step_{self.last:06d}"

    def _write(self, bucket: Mapping[str, Any]) -> None:
        self._specs |= manifest.specs(bucket.items())
        write_bucket(partial_of(self._folder), bucket)

    def _finish(self, state: Mapping[str, Any]) -> None:
        partial = partial_of(self._folder)
        with self._disk_errors():
            while self._buckets:
                self._write(self._buckets.pop(0))
            text = json.dumps(state)
            (partial / STATE_FILE).write_text(text, encoding="utf-8")
            (partial / COMPLETE_FILE).write_text(
                manifest.total_checksum(self._specs, text), encoding="utf-8"
            )
            complete_folder(self._folder)
        self._passed += [self._later.submit(one, self._folder) for one in self.after]
        self._later.submit(self._tidy, self._folder, f"step_{self.kept:06d}")

    def _tidy(self, newest: Path, kept: str) -> None:
        """Remove old checkpoints, but none after `newest`, which are not passed on yet."""
        known = [folder for folder in complete(self._root) if folder <= newest]
        for old in known[: -self._settings.keep]:
            if old.name != kept:
                try:
                    remove_folder(old)
                except OSError as error:
                    log.warning(
                        "can't remove %s: %s; it is tried again with the next checkpoint",
                        old,
                        error,
                    )

    def _raise_passed(self) -> None:
        """Raise what a call of `after` has raised."""
        done = [call for call in self._passed if call.done()]
        self._passed = [call for call in self._passed if not call.done()]
        for call in done:
            call.result()

    @contextmanager
    def _disk_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            shutil.rmtree(partial_of(self._folder), ignore_errors=True)
            advice = f"{remedy(error) or 'is the disk well?'}; or set another run.dir, or checkpoint.every_steps=0"
            raise TrainerError(
                f"can't write a checkpoint to {self._root}: {error}; {advice}"
            ) from error
