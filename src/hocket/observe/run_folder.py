"""Write and read a run's files: config, metrics, ledger, rollouts, summary, report; pass them on to loggers.

A killed run leaves every line it wrote; whole files are replaced atomically.
"""

import contextlib
import json
import math
import os
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

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

COPIES = "plugins"  # folder
REPORTS: Registry[Callable[[Path], None]] = Registry("report", page="hocket.extras.page.page")
report = REPORTS.register
"""Decorator of a function that writes a report of a run into its folder, when the run has ended or failed.

Example: a plugin that says which step had the highest reward.

    @report("highest")
    def write(folder: Path) -> None:
        steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        highest = max(steps, key=lambda step: step.get("reward/total") or 0.0)
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
        self._added: list[
            MetricsRow
        ] = []  # of history, what this process has finished: loggers take it
        self._loggers = loggers.started(
            config.observe.loggers,
            self._added,
            say,
            run_dir=self.path,
            run_id=trainer_id(self.path),
            config=config.as_dict(),
        )
        (self.path / ROLLOUTS).mkdir(parents=True, exist_ok=True)
        write_atomically(self.path / "config.yaml", config_module.to_yaml(config.as_dict()))
        for name in GROWING:
            (self.path / name).touch()
        self.history: list[MetricsRow] = []  # one record per finished step
        self.changed_plugins = keep_plugins(
            self.path, load_plugins(config.plugins)
        )  # since the run before

    def __exit__(self, failed: object, *exc_info: object) -> None:
        """Write the report of a run that fails, too."""
        loggers.close(self._loggers, failed=bool(failed))
        if failed:
            self._report()

    @property
    def last_step(self) -> int:
        return step_of(self.history[-1]) if self.history else -1

    def finish(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append a step to metrics.jsonl (null: not finite)."""
        row: MetricsRow = {"step": step}
        for name, value in metrics.items():
            row[name] = value if math.isfinite(value) else None
        self.history.append(row)
        append(self.path / METRICS, [row])
        self._added.append(row)

    def ledger(self, step: int, entries: Iterable[LedgerRow]) -> None:
        """Append what became of prompts in a step to ledger.jsonl."""
        append(self.path / LEDGER, ({"step": step, **entry} for entry in entries))

    def rollouts(self, name: str, groups: Sequence[Group]) -> None:
        """Write rollouts/NAME.jsonl; nothing without groups."""
        if groups:
            write_rollouts(self.path, name, groups)

    def skipped(self, step: int) -> Path:
        """Return the file that keeps the batch of a step that was not finite."""
        return self.path / "skipped" / f"step_{step:06d}.json"

    def summary(
        self, *, final_version: int, more: Iterable[Mapping[str, Any]] = ()
    ) -> dict[str, Any]:
        """Write summary.json, which has `more` too, and the reports; return the summary."""
        first, *later = map(_evaluation, self.history)
        measured = [evaluation for evaluation in later if evaluation]
        summary: Summary = {
            "before": first,
            "after": measured[-1] if measured else {},
            "steps": self.last_step,
            "updated": sum(map(_updated, self.history)),
            "train_seconds": math.fsum(row.get("time/step") or 0.0 for row in self.history),
            "seed": self._seed,
            "final_version": final_version,
            "plugins": kept_plugins(self.path),
        }
        content: dict[str, Any] = {**summary}
        for entries in more:
            content |= entries
        write_atomically(self.path / SUMMARY, json.dumps(with_format(content), indent=1) + "\n")
        self._report()
        return content

    def _report(self) -> None:
        """Write the reports; one that fails is said, as the run has ended, and its own error is the one to raise."""
        for write in REPORTS.each():
            try:
                write(self.path)
            except Exception as error:  # noqa: BLE001 - of the user's code, too
                self._say(
                    f"WARNING: a report of {self.path} was not written: {type(error).__name__}: {error}"
                )

    def state(self) -> dict[str, Any]:
        """Flush the growing files to disk; return the last step and their bytes."""
        paths = [self.path / name for name in GROWING]
        for path in paths:
            flush(path)
        return {"step": self.last_step, "bytes": {path.name: path.stat().st_size for path in paths}}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Remove the records written after `state`. Raise ConfigError if older ones are missing."""
        for name in GROWING:  # whatever a state names
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

        # Rollouts of later steps; a file with another name is the user's.
        for file in (*self.path.glob(f"{ROLLOUTS}/*"), *self.path.glob(f"{TRAINED}/*")):
            match = re.fullmatch(r"(?:step|eval)_(\d+)\.jsonl", file.name)
            if match and int(match[1]) > state["step"]:
                file.unlink()


def keep_plugins(run_dir: Path, plugins: Sequence[Plugin]) -> list[str]:
    """Write plugins.json and a copy of each file under `plugins`; return a sentence for each that has changed.

    config.yaml names their functions, these say what they are.
    """
    before = {row["path"]: row for row in kept_plugins(run_dir)}
    rows: list[PluginRow] = []
    changes = []
    for plugin in plugins:
        copy = f"{COPIES}/{Path(plugin.path).stem}-{plugin.sha256[:8]}.py"
        (run_dir / COPIES).mkdir(exist_ok=True)
        write_atomically(run_dir / copy, plugin.text)
        registers = list(plugin.registers)
        rows.append(
            {"path": plugin.path, "sha256": plugin.sha256, "registers": registers, "copy": copy}
        )
        old = before.get(plugin.path, rows[-1])
        if old["sha256"] != plugin.sha256:
            hashes = f"was {old['sha256'][:8]} and is {plugin.sha256[:8]}"
            changes.append(
                f"plugin {plugin.path} {hashes}; the one before: {run_dir / old['copy']}"
            )
    if rows != list(before.values()):
        write_atomically(
            run_dir / PLUGINS, json.dumps([with_format(row) for row in rows], indent=1) + "\n"
        )
    return changes


def kept_plugins(run_dir: Path) -> list[PluginRow]:
    """Read plugins.json; none where it is missing. Raise DataError where it is damaged."""
    path = run_dir / PLUGINS
    plugins: list[PluginRow] = []
    with reading(path):
        for content in json.loads(read_text(path) or "[]"):
            row = without_format(content, path)
            plugins.append(
                {
                    "path": row["path"],
                    "sha256": row["sha256"],
                    "registers": row["registers"],
                    "copy": row["copy"],
                }
            )
    return plugins


def trainer_id(run_dir: Path) -> str:
    """Return the id by which servers know a run; it stays in the folder, for a resumed one."""
    path = run_dir / "trainer_id"
    if not path.exists():
        run_dir.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{secrets.token_hex(8)}")
        partial.write_text(f"{run_dir.name[:64]}-{secrets.token_hex(4)}", encoding="utf-8")
        with contextlib.suppress(FileExistsError):  # another rank was faster
            os.link(partial, path)
        partial.unlink()
    text = read_text(path)
    if not re.fullmatch(".+-[0-9a-f]{8}", text):
        raise DataError(f"{path} is damaged: remove it, and servers take this run for a new one")
    return text


def _evaluation(row: MetricsRow) -> EvalValues:
    """Return the eval/* metrics of a step: {"greedy": 0.5, ...}."""
    return {
        name.removeprefix("eval/"): value for name, value in row.items() if name.startswith("eval/")
    }


def _updated(step: MetricsRow) -> bool:
    """Say whether a step changed the weights."""
    return (
        "time/train" in step and step.get("train/updates") != 0 and step.get("train/skipped") != 1
    )
