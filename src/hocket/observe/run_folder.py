"""Write a run's files: config, metrics, ledger, rollouts, summary, reports, copies of plugins.

A killed run leaves every line that it wrote; whole files are replaced atomically.
"""

import contextlib
import json
import math
import os
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from hocket import config as config_module
from hocket.common.files import flush, write_atomically
from hocket.common.registry import Plugin, Registry, load_plugins
from hocket.config import Config
from hocket.errors import ConfigError, DataError
from hocket.formats import (
    GROWING,
    LEDGER,
    METRICS,
    PLUGINS,
    ROLLOUTS,
    SUMMARY,
    TRAINED,
    EvalValues,
    LedgerRow,
    MetricsRow,
    PluginRow,
    Summary,
)
from hocket.observe import loggers
from hocket.observe.rows import (
    append,
    read_metrics,
    read_text,
    reading,
    step_of,
    with_format,
    without_format,
    write_rollouts,
)
from hocket.types import Group

COPIES = "plugins"  # folder of the copies of plugin files
REPORTS: Registry[Callable[[Path], None]] = Registry("report", page="hocket.extras.page.page")
report = REPORTS.register
"""Register a function that writes a report into the run folder (decorator).

It is called with the folder once the run has ended or failed.

Args:
    name: its name; no setting names it.

Example: a plugin file that writes which step had the highest reward.

    @report("highest")
    def write(folder: Path) -> None:
        steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        highest = max(steps, key=lambda step: step.get("reward/mean") or 0.0)
        (folder / "highest.txt").write_text(f"step {highest['step']}")
"""


class RunFolder(contextlib.AbstractContextManager["RunFolder"]):
    """The files of one run, in a folder that is its own (observe/owner.py).

    Example:

        with RunFolder(config) as folder:
            folder.finish(1, {"reward/mean": 0.5})
            folder.summary(final_version=1)
    """

    def __init__(self, config: Config, say: Callable[[str], None] = print) -> None:
        self.path = config.run_dir
        self._say = say
        self._seed = config.trainer.seed
        self._new_rows: list[MetricsRow] = []  # of steps that this process has finished
        self._loggers = loggers.start(
            config.observe.loggers,
            self._new_rows,  # each logger takes them from here
            say,
            run_dir=self.path,
            run_id=trainer_id(self.path),
            config=config.as_dict(),
        )
        (self.path / ROLLOUTS).mkdir(parents=True, exist_ok=True)
        write_atomically(self.path / "config.yaml", config_module.to_yaml(config.as_dict()))
        for name in GROWING:
            (self.path / name).touch()
        self.history: list[MetricsRow] = []  # rows of all finished steps of the run
        # A sentence for each plugin file that has changed since the folder was last used.
        self.changed_plugins = keep_plugins(self.path, load_plugins(config.plugins))

    def __exit__(self, failed: object, *exc_info: object) -> None:
        """End the loggers, and write the reports of a run that fails."""
        loggers.close(self._loggers, failed=bool(failed))
        if failed:
            self._report()

    @property
    def last_step(self) -> int:
        """The number of the last finished step; -1 before the first."""
        return step_of(self.history[-1]) if self.history else -1

    def finish(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append the row of a finished step to metrics.jsonl; None stands for NaN and infinities."""
        row: MetricsRow = {"step": step}
        for name, value in metrics.items():
            row[name] = value if math.isfinite(value) else None
        self.history.append(row)
        append(self.path / METRICS, [row])
        self._new_rows.append(row)

    def ledger(self, step: int, entries: Iterable[LedgerRow]) -> None:
        """Append the outcomes of prompts in a step to ledger.jsonl."""
        append(self.path / LEDGER, ({"step": step, **entry} for entry in entries))

    def rollouts(self, name: str, groups: Sequence[Group]) -> None:
        """Write rollouts/NAME.jsonl; nothing without groups."""
        if groups:
            write_rollouts(self.path, name, groups)

    def skipped(self, step: int) -> Path:
        """Name the file for the batch of a step whose loss or gradient is not finite."""
        return self.path / "skipped" / f"step_{step:06d}.json"

    def summary(
        self, *, final_version: int, more: Iterable[Mapping[str, Any]] = ()
    ) -> dict[str, Any]:
        """Write summary.json, with the keys of `more` besides its own, and the reports.

        Returns the content of summary.json.
        """
        evaluations = [_evaluation(row) for row in self.history]
        after = [evaluation for evaluation in evaluations[1:] if evaluation]
        summary: Summary = {
            "before": evaluations[0],
            "after": after[-1] if after else {},
            "steps": self.last_step,
            "updated": sum(map(_updated, self.history)),
            "train_seconds": math.fsum(row.get("time/step") or 0.0 for row in self.history),
            "seed": self._seed,
            "final_version": final_version,
            "plugins": kept_plugins(self.path),
        }
        content: dict[str, Any] = dict(summary)
        for entries in more:
            content |= entries
        write_atomically(self.path / SUMMARY, json.dumps(with_format(content), indent=1) + "\n")
        self._report()
        return content

    def _report(self) -> None:
        """Write the reports. One that fails is a warning: it must not hide the run's own error."""
        for write in REPORTS.each():
            try:
                write(self.path)
            except Exception as error:  # noqa: BLE001 - a report may be a user's code
                cause = f"{type(error).__name__}: {error}"
                self._say(f"WARNING: a report of {self.path} was not written: {cause}")

    def state(self) -> dict[str, Any]:
        """Flush the growing files to disk. Returns the last step, and the size of each file."""
        paths = [self.path / name for name in GROWING]
        for path in paths:
            flush(path)
        return {"step": self.last_step, "bytes": {path.name: path.stat().st_size for path in paths}}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Remove what was written after a `state`. Raises ConfigError if older rows are missing."""
        for name in GROWING:  # no other file that a state may name
            size = state["bytes"].get(name, 0)
            path = self.path / name
            if path.stat().st_size < size:
                advice = "bring the file back, or start a new run.dir"
                raise ConfigError(
                    f"{path} has lost records from before step {state['step']}; {advice}"
                )
            os.truncate(path, size)
        with reading(self.path / METRICS):
            self.history[:] = sorted(read_metrics(self.path), key=step_of)
        (self.path / SUMMARY).unlink(missing_ok=True)  # the run continues past that end

        # Rollouts of later steps. A file with another name is the user's.
        for folder in (ROLLOUTS, TRAINED):
            for file in self.path.glob(f"{folder}/*"):
                match = re.fullmatch(r"(?:step|eval)_(\d+)\.jsonl", file.name)
                if match and int(match[1]) > state["step"]:
                    file.unlink()


def keep_plugins(run_dir: Path, plugins: Sequence[Plugin]) -> list[str]:
    """Copy the plugin files into a run folder, and list them in plugins.json.

    The functions that config.yaml names can be read there. Returns a sentence for each file that
    has changed since the folder was last used.
    """
    kept = kept_plugins(run_dir)
    kept_by_path = {row["path"]: row for row in kept}
    rows: list[PluginRow] = []
    changes = []
    for plugin in plugins:
        copy = f"{COPIES}/{Path(plugin.path).stem}-{plugin.sha256[:8]}.py"
        (run_dir / COPIES).mkdir(exist_ok=True)
        write_atomically(run_dir / copy, plugin.text)
        row = PluginRow(
            path=plugin.path, sha256=plugin.sha256, registers=list(plugin.registers), copy=copy
        )
        rows.append(row)
        old = kept_by_path.get(plugin.path)
        if old is not None and old["sha256"] != plugin.sha256:
            hashes = f"was {old['sha256'][:8]} and is {plugin.sha256[:8]}"
            before = f"the one before: {run_dir / old['copy']}"
            changes.append(f"plugin {plugin.path} {hashes}; {before}")
    if rows != kept:
        text = json.dumps([with_format(row) for row in rows], indent=1)
        write_atomically(run_dir / PLUGINS, text + "\n")
    return changes


def kept_plugins(run_dir: Path) -> list[PluginRow]:
    """Read plugins.json; [] if it is missing. Raises DataError for a damaged file."""
    path = run_dir / PLUGINS
    plugins: list[PluginRow] = []
    with reading(path):
        for content in json.loads(read_text(path) or "[]"):
            row = without_format(content, path)
            plugins.append(cast(PluginRow, {key: row[key] for key in PluginRow.__annotations__}))
    return plugins


def trainer_id(run_dir: Path) -> str:
    """Get the id by which servers know a run, and make it if there is none; a resumed run keeps it.

    Raises DataError for a damaged file.
    """
    path = run_dir / "trainer_id"
    if not path.exists():
        run_dir.mkdir(parents=True, exist_ok=True)
        # A link appears with its whole content, and only the first rank's call succeeds.
        partial = path.with_name(f".{secrets.token_hex(8)}")
        partial.write_text(f"{run_dir.name[:64]}-{secrets.token_hex(4)}", encoding="utf-8")
        with contextlib.suppress(FileExistsError):
            os.link(partial, path)
        partial.unlink()
    text = read_text(path)
    if not re.fullmatch(".+-[0-9a-f]{8}", text):
        raise DataError(f"{path} is damaged: remove it, and servers take this run for a new one")
    return text


def _evaluation(row: MetricsRow) -> EvalValues:
    """Select the eval/* metrics of a step: {"greedy": 0.5, ...}."""
    values = {}
    for name, value in row.items():
        if name.startswith("eval/"):
            values[name.removeprefix("eval/")] = value
    return values


def _updated(row: MetricsRow) -> bool:
    """Check whether a step changed the weights."""
    was_trained = "time/train" in row and row.get("train/updates") != 0
    return was_trained and row.get("train/skipped") != 1
