"""Bind the loggers of `observe.loggers`, each in a thread of its own: none can slow or stop the run."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Protocol

from hocket.common.registry import Registry, need, options_of
from hocket.config import LoggerSpec
from hocket.formats import ROLLOUTS, SUMMARY, MetricsRow, RolloutRow
from hocket.observe.rows import read_summary, scan_rollouts, step_of

LOOK_S = 0.5  # between looks for new steps
CLOSE_S = 30.0  # at most, until all loggers have all steps
MAX_CHARACTERS = 2000  # of a text in a table
COLUMNS = (
    "id",
    "prompt",
    "completion",
    "answer",
    "reward",
    "parts",
    "finish_reason",
    "num_tokens",
    "error",
    "note",
)
"""Columns of a table of rollouts."""
TABLES = {"step": "rollouts", "eval": "eval/rollouts"}
Table = list[list[Any]]


class Logger(Protocol):
    """Passes a run on; it may block and raise. Other arguments than these are its options in the config."""

    package: ClassVar[str]  # that it needs
    where: str  # what people look at

    def __init__(self, *, run_dir: Path, run_id: str, config: Mapping[str, Any]) -> None:
        """Begin a run, or go on with that of `run_id`."""

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the finite metrics of a step."""

    def table(self, step: int, name: str, rows: Table) -> None:
        """Take rollouts of a step ("rollouts") or its evaluation ("eval/rollouts"), with the columns COLUMNS."""

    def summary(self, values: Mapping[str, Any]) -> None:
        """Take summary.json of a run that has ended well."""

    def close(self, *, failed: bool) -> None:
        """End the run: nothing comes any more."""


GIVEN = ("run_dir", "run_id", "config")
LOGGERS: Registry[Callable[..., Logger]] = Registry(
    "logger",
    tensorboard="hocket.extras.loggers.tensorboard",
    wandb="hocket.extras.loggers.wandb",
    trackio="hocket.extras.loggers.wandb",
    mlflow="hocket.extras.loggers.mlflow",
)
logger = LOGGERS.register
Say = Callable[[str], None]


def bound(specs: Sequence[LoggerSpec]) -> list[Callable[..., Logger]]:
    """Return makers with their options. Raise ConfigError for an unknown logger or option, or a missing package."""
    makers: list[Callable[..., Logger]] = []
    for spec in specs:
        target: Any = LOGGERS.get(spec.name)
        called = f"logger {spec.name}"
        options = options_of(
            called, target, spec.model_extra, section="observe.loggers", keys=GIVEN
        )
        need(f"observe.loggers: {spec.name}", target.package)
        makers.append(partial(target, **options))
    return makers


def started(
    specs: Sequence[LoggerSpec], steps: list[MetricsRow], say: Say, **run: Any
) -> list["InThread"]:
    """Return loggers of a run: its GIVEN, and the list to which it adds its steps. Raise ConfigError as `bound`."""
    threads = []
    for spec, make in zip(specs, bound(specs), strict=True):
        threads.append(InThread(spec, partial(make, **run), steps, run["run_dir"], say))
    return threads


def close(loggers: Sequence["InThread"], *, failed: bool) -> None:
    """End loggers side by side; leave those behind that are not done after CLOSE_S."""
    for one in loggers:
        one.failed = failed
        one.ended.set()
    deadline = time.monotonic() + CLOSE_S
    for one in loggers:
        one.join(max(0.0, deadline - time.monotonic()))
        if one.is_alive():
            one.report(
                "is not done",
                f"{len(one.steps) - one.done} steps still wait for it after {CLOSE_S:g} s",
            )


class InThread(threading.Thread):
    """Passes on the steps that a run adds to a list, and the rollouts and the summary that lie in its folder by then.

    Nothing waits for it, but `close`. What the logger fails at is said once.
    """

    def __init__(
        self,
        spec: LoggerSpec,
        make: Callable[[], Logger],
        steps: list[MetricsRow],
        run_dir: Path,
        say: Say,
    ) -> None:
        super().__init__(name=spec.name, daemon=True)
        self._spec = spec
        self._make = make
        self.steps = steps
        self._run_dir = run_dir
        self._say = say
        self._reported: set[str] = set()  # what it fails at
        self.done = 0  # steps
        self.failed = False
        self.ended = threading.Event()
        self.start()

    def run(self) -> None:
        try:
            logger = self._make()
            self._say(f"logger {self.name}: {logger.where}")
        except BaseException as error:  # noqa: BLE001 - some end the process
            return self.report("can't be used, and the run goes on without it", error)
        for call in self._calls(logger):
            try:
                call()
            except BaseException as error:  # noqa: BLE001 - the same
                self.report("could not take a record", error)

    def _calls(self, one: Logger) -> Iterator[Callable[[], None]]:
        """Yield the calls of a logger as the run goes on, the last one after its end."""
        ended = False
        while not ended:
            ended = self.ended.wait(LOOK_S)  # before it looks, so that it sees the last step
            for record in self.steps[self.done :]:
                step = step_of(record)
                metrics = {name: value for name, value in record.items() if value is not None}
                del metrics["step"]
                yield partial(one.metrics, step, metrics)
                for kind in TABLES:
                    yield partial(self._table, one, step, kind)
                self.done += 1
        yield partial(self._summary, one)
        yield partial(one.close, failed=self.failed)

    def _table(self, one: Logger, step: int, kind: str) -> None:
        if kind == "step" and step % self._spec.rollouts_every and step != 1:
            return
        path = self._run_dir / ROLLOUTS / f"{kind}_{step:06d}.jsonl"
        rows = [_cells(row) for row in islice(scan_rollouts(path), self._spec.rollouts)]
        if rows:
            one.table(step, TABLES[kind], rows)

    def _summary(self, one: Logger) -> None:
        if (self._run_dir / SUMMARY).exists():
            one.summary(read_summary(self._run_dir))

    def report(self, what: str, why: object) -> None:
        """Say once what the logger fails at."""
        if what not in self._reported:
            self._reported.add(what)
            self._say(f"logger {self.name} {what}: {str(why) or repr(why)}")


def _cells(row: RolloutRow) -> list[Any]:
    columns: Mapping[str, object] = row
    return [_cell(columns[name]) for name in COLUMNS]


def _cell(value: object) -> Any:
    """Return a value as loggers can show it: a number, None, or a text."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {number:.4g}" for name, number in value.items())
    return value if value is None or isinstance(value, int | float) else str(value)[:MAX_CHARACTERS]
