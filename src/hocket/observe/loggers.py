"""Bind the loggers of `observe.loggers`, each in a thread of its own: none can slow or stop the run."""

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Protocol

from hocket.common.registry import Registry, need, options_of
from hocket.config import LoggerSpec
from hocket.observe.rows import row_of
from hocket.types import Group

CLOSE_S = 30.0  # at most, until a logger has all records
MAX_WAITING = 1000  # records of a logger that is slow
MAX_CHARACTERS = 2000  # of a text in a table
COLUMNS = ("id", "prompt", "completion", "answer", "reward", "parts", "finish_reason", "num_tokens", "error", "note")
"""Of a table of rollouts."""
TABLES = {"step": "rollouts", "eval": "eval/rollouts"}
Table = list[list[Any]]


class Logger(Protocol):
    """Passes a run on; it may block and raise. Other arguments than these are its options in the config."""

    package: ClassVar[str]  # that it needs
    where: str  # what people look at

    def __init__(self, *, run_dir: Path, run_id: str, config: Mapping[str, Any]) -> None:
        """Begin a run, or go on with that of `run_id`."""

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def table(self, step: int, name: str, rows: Table) -> None:
        """Take rollouts of a step ("rollouts") or its evaluation ("eval/rollouts"), with the columns COLUMNS."""

    def summary(self, values: Mapping[str, Any]) -> None: ...

    def close(self, *, failed: bool) -> None: ...


GIVEN = ("run_dir", "run_id", "config")
LOGGERS: Registry[Callable[..., Logger]] = Registry(
    "logger",
    tensorboard="hocket.observe.tensorboard",
    wandb="hocket.observe.wandb",
    trackio="hocket.observe.wandb",
    mlflow="hocket.observe.mlflow",
)
logger = LOGGERS.register
Say = Callable[[str], None]


def bound(specs: Sequence[LoggerSpec]) -> list[Callable[..., Logger]]:
    """Return makers with their options. Raise ConfigError for an unknown logger or option, or a missing package."""
    return [_bound(spec.name, spec.model_extra or {}) for spec in specs]


def _bound(name: str, given: Mapping[str, Any]) -> Callable[..., Logger]:
    target: Any = LOGGERS.get(name)
    options = options_of(f"logger {name}", target, given, section="observe.loggers", keys=GIVEN)
    need(f"observe.loggers: {name}", target.package)
    return partial(target, **options)


def started(specs: Sequence[LoggerSpec], say: Say, **run: Any) -> list["InThread"]:
    """Return loggers of a run: its GIVEN. Raise ConfigError as `bound`."""
    return [InThread(spec, partial(make, **run), say) for spec, make in zip(specs, bound(specs), strict=True)]


class InThread:
    """A logger in a thread of its own, which gets each record and is never waited for, but for CLOSE_S at the end.

    What fails, or is left out as the logger is slow, is said once.
    """

    def __init__(self, spec: LoggerSpec, make: Callable[[], Logger], say: Say) -> None:
        self._spec = spec
        self._make = make
        self._say = say
        self._told: set[str] = set()
        self._calls = queue.Queue[Callable[[Logger], None]](MAX_WAITING)
        self._open = True
        self._thread = threading.Thread(target=self._work, name=spec.name, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        try:
            passes_on = self._make()
            self._say(f"logger {self._spec.name}: {passes_on.where}")
        except BaseException as error:  # noqa: BLE001 - some end the process
            return self._tell("can't be used, and the run goes on without it", error)
        while self._open:
            call = self._calls.get()
            try:
                call(passes_on)
            except BaseException as error:  # noqa: BLE001 - the same
                self._tell("could not take a record", error)

    def _tell(self, what: str, why: object) -> None:
        if what not in self._told:
            self._told.add(what)
            self._say(f"logger {self._spec.name} {what}: {str(why) or repr(why)}")

    def _put(self, call: Callable[[Logger], None], patience_s: float = 0.0) -> None:
        if not self._thread.is_alive():
            return
        try:
            self._calls.put(call, patience_s > 0, patience_s)
        except queue.Full:
            self._tell("is too slow", f"{MAX_WAITING} records wait for it, newer ones are left out")

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._put(lambda one: one.metrics(step, metrics))

    def rollouts(self, name: str, groups: Sequence[Group]) -> None:
        """Pass on some of the rollouts of "step_000010" or "eval_000010"."""
        kind, _, number = name.partition("_")
        step = int(number)
        if kind == "step" and step % self._spec.rollouts_every and step != 1:
            return
        pairs = ((group, *pair) for group in groups for pair in zip(group.rollouts, group.scores, strict=True))
        found = [row_of(*pair) for pair in islice(pairs, self._spec.rollouts)]
        rows = [[_short(row[name]) for name in COLUMNS] for row in found]
        self._put(lambda one: one.table(step, TABLES[kind], rows))

    def summary(self, values: Mapping[str, Any]) -> None:
        self._put(lambda one: one.summary(values))

    def close(self, *, failed: bool) -> None:
        def end(one: Logger) -> None:
            self._open = False
            one.close(failed=failed)

        deadline = time.monotonic() + CLOSE_S
        self._put(end, CLOSE_S)
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._tell("is not done", f"{self._calls.qsize()} records still wait for it after {CLOSE_S:g} s")


def _short(value: Any) -> Any:
    if isinstance(value, dict):
        return ", ".join(f"{name} {number:.4g}" for name, number in value.items())
    return value if value is None or isinstance(value, int | float) else str(value)[:MAX_CHARACTERS]
