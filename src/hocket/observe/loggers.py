"""Pass a run on to the loggers of `observe.loggers`.

Each works in a thread of its own, so that none can slow or stop the run.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Protocol

from hocket.common.registry import Registry, need, options_of
from hocket.config import LoggerSpec
from hocket.formats import ROLLOUTS, SUMMARY, MetricsRow
from hocket.observe.rows import read_summary, scan_rollouts, step_of

LOOK_S = 0.5  # seconds between looks for new steps
CLOSE_S = 30.0  # seconds that the end of a run waits for all loggers together
MAX_CHARACTERS = 2000  # of a text in a table
# Columns of a table of rollouts.
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
TABLES = {"step": "rollouts", "eval": "eval/rollouts"}  # start of a file's name → name of its table
Table = list[list[Any]]


class Logger(Protocol):
    """Passes a run on to a program for people. Further arguments of its constructor are options.

    It works in a thread of its own, and may block and raise.
    """

    package: ClassVar[str]  # the package that it needs
    where: str  # where people find what it has logged

    def __init__(self, *, run_dir: Path, run_id: str, config: Mapping[str, Any]) -> None:
        """Begin a run, or go on with that of `run_id`."""

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the finite metrics of a step."""

    def table(self, step: int, name: str, rows: Table) -> None:
        """Take rollouts of a step, "rollouts", or of its evaluation, "eval/rollouts".

        Rows have the columns COLUMNS.
        """

    def summary(self, values: Mapping[str, Any]) -> None:
        """Take summary.json of a run that has ended well."""

    def close(self, *, failed: bool) -> None:
        """End the run. This is the last call."""


RUN_ARGUMENTS = ("run_dir", "run_id", "config")
LOGGERS: Registry[Callable[..., Logger]] = Registry(
    "logger",
    tensorboard="hocket.extras.loggers.tensorboard",
    wandb="hocket.extras.loggers.wandb",
    trackio="hocket.extras.loggers.wandb",
    mlflow="hocket.extras.loggers.mlflow",
)
logger = LOGGERS.register
"""Register a class as a logger (decorator); `observe.loggers` names it.

Args:
    name: its name in `observe.loggers`.

Example: a plugin file whose logger writes a line per step to a file, for
`observe.loggers=[{name: lines, file: steps.txt}]`.

    from pathlib import Path

    from hocket.observe.loggers import logger


    @logger("lines")
    class Lines:
        package = "json"

        def __init__(self, *, run_dir: Path, run_id: str, config, file: str = "steps.txt"):
            self.path = run_dir / file
            self.where = str(self.path)

        def metrics(self, step: int, metrics) -> None:
            with self.path.open("a") as lines:
                lines.write(f"{step} {metrics.get('reward/mean')}\\n")

        def table(self, step: int, name: str, rows) -> None: ...

        def summary(self, values) -> None: ...

        def close(self, *, failed: bool) -> None: ...
"""
Say = Callable[[str], None]


def bind(specs: Sequence[LoggerSpec]) -> list[Callable[..., Logger]]:
    """Bind the options of each logger to its class; the caller adds RUN_ARGUMENTS.

    Raises ConfigError for an unknown logger or option, and for a missing package.
    """
    makers: list[Callable[..., Logger]] = []
    for spec in specs:
        target: Any = LOGGERS.get(spec.name)
        options = options_of(
            f"logger {spec.name}",
            target,
            spec.model_extra,
            section="observe.loggers",
            keys=RUN_ARGUMENTS,
        )
        need(f"observe.loggers: {spec.name}", target.package)
        makers.append(partial(target, **options))
    return makers


def start(
    specs: Sequence[LoggerSpec], steps: list[MetricsRow], say: Say, **run_arguments: Any
) -> list["LoggerThread"]:
    """Start the loggers of a run, which adds its steps to `steps`. Raises ConfigError as `bind`."""
    threads = []
    for spec, make in zip(specs, bind(specs), strict=True):
        make_logger = partial(make, **run_arguments)
        threads.append(LoggerThread(spec, make_logger, steps, run_arguments["run_dir"], say))
    return threads


def close(threads: Sequence["LoggerThread"], *, failed: bool) -> None:
    """End loggers side by side; leave those behind that are not done after CLOSE_S."""
    for thread in threads:
        thread.failed = failed
        thread.run_has_ended.set()
    deadline = time.monotonic() + CLOSE_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            num_waiting = len(thread.steps) - thread.num_done
            cause = f"{num_waiting} steps still wait for it after {CLOSE_S:g} s"
            thread.report("is not done", cause)


class LoggerThread(threading.Thread):
    """Passes on to a logger the steps that a run adds to a list, then the run's summary.

    Rollouts and summary are read from the run folder. An error of the logger is reported once.
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
        self._run_dir = run_dir
        self._say = say
        self._reported: set[str] = set()  # problems
        self.steps = steps
        self.num_done = 0  # steps that were passed on
        self.run_has_ended = threading.Event()
        self.failed = False  # whether the run has failed, once it has ended
        self.start()

    def run(self) -> None:
        try:
            logger = self._make()
            self._say(f"logger {self.name}: {logger.where}")
        except BaseException as error:  # noqa: BLE001 - some end the process
            self.report("can't be used, and the run goes on without it", error)
            return
        has_ended = False
        while not has_ended:
            # Look for steps after this wait, so that the last ones of the run are among them.
            has_ended = self.run_has_ended.wait(LOOK_S)
            for row in self.steps[self.num_done :]:
                step = step_of(row)
                metrics = {name: value for name, value in row.items() if value is not None}
                del metrics["step"]
                self._attempt(logger.metrics, step, metrics)
                for kind in TABLES:
                    self._attempt(self._table, logger, step, kind)
                self.num_done += 1
        self._attempt(self._summary, logger)
        self._attempt(logger.close, failed=self.failed)

    def _attempt(self, call: Callable[..., None], *args: Any, **options: Any) -> None:
        """Make a call that may use the logger; if it fails, the next calls are made all the same."""
        try:
            call(*args, **options)
        except BaseException as error:  # noqa: BLE001 - some end the process
            self.report("could not take a record", error)

    def _table(self, logger: Logger, step: int, kind: str) -> None:
        """Pass on the rollouts of a step, where they are due, or of its evaluation."""
        is_due = kind == "eval" or step == 1 or step % self._spec.rollouts_every == 0
        if not is_due:
            return
        path = self._run_dir / ROLLOUTS / f"{kind}_{step:06d}.jsonl"
        rows = []
        for row in islice(scan_rollouts(path), self._spec.rollouts):
            columns: Mapping[str, object] = row
            rows.append([_cell(columns[name]) for name in COLUMNS])
        if rows:
            logger.table(step, TABLES[kind], rows)

    def _summary(self, logger: Logger) -> None:
        if (self._run_dir / SUMMARY).exists():
            logger.summary(read_summary(self._run_dir))

    def report(self, problem: str, cause: object) -> None:
        """Print a problem of the logger, once."""
        if problem not in self._reported:
            self._reported.add(problem)
            self._say(f"logger {self.name} {problem}: {str(cause) or repr(cause)}")


def _cell(value: object) -> Any:
    """Convert a value to one that loggers can show: a number, None, or a text."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {number:.4g}" for name, number in value.items())
    if value is None or isinstance(value, int | float):
        return value
    return str(value)[:MAX_CHARACTERS]
