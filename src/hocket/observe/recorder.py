"""Everything a run leaves behind, in its run folder: config, metrics, rollouts, summary, TensorBoard, report.

Lines are flushed as they are written, so a run that is killed leaves all it had; whole files are replaced atomically.
"""

import contextlib
import importlib.util
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hocket import config as config_module
from hocket import records
from hocket.config import Config
from hocket.errors import ConfigError
from hocket.observe.report import read_lines, write_report
from hocket.system import flush, write_atomically
from hocket.types import Group

_LINES = ("metrics.jsonl", "ledger.jsonl")
"""Files that grow by lines, and are taken back to a length."""


class Recorder:
    """Writes one run. Use it as a context manager.

    Args:
        config: the resolved config, written to config.yaml.

    Raises:
        ConfigError: the run folder holds a run already, and it is not to be resumed.
    """

    def __init__(self, config: Config) -> None:
        self.run_dir = config.run_dir
        if (self.run_dir / "metrics.jsonl").exists() and not config.checkpoint.resume:
            raise ConfigError(
                f"{self.run_dir} holds a run already; go on with it by checkpoint.resume=true, choose another run.dir, "
                "or remove that folder"
            )
        (self.run_dir / "rollouts").mkdir(parents=True, exist_ok=True)
        write_atomically(self.run_dir / "config.yaml", config_module.dump(config))
        self._metrics = (self.run_dir / "metrics.jsonl").open("a", encoding="utf-8")
        self._board = _tensorboard(self.run_dir) if config.observe.tensorboard else None

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._metrics.close()
        if self._board is not None:
            self._board.close()
        if exc_info[0] is not None:  # what there is until then
            write_report(self.run_dir)

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Appends {"step": ..., name: value, ...} to metrics.jsonl; a value that is not finite becomes null."""
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self._metrics.write(json.dumps({"step": step, **finite}) + "\n")
        self._metrics.flush()
        if self._board is not None:
            for name, value in metrics.items():
                self._board.add_scalar(name, value, step)
            self._board.flush()

    def ledger(self, step: int, entries: Iterable[Mapping[str, Any]]) -> None:
        """Appends {"step": ..., **entry} of each to ledger.jsonl."""
        with (self.run_dir / "ledger.jsonl").open("a", encoding="utf-8") as file:
            file.writelines(json.dumps({"step": step, **entry}) + "\n" for entry in entries)

    def skipped(self, step: int) -> Path:
        """Returns the file for what was trained on in a step, should it be skipped."""
        return self.run_dir / "skipped" / f"step_{step:06d}.json"

    def history(self) -> list[dict[str, Any]]:
        """Returns what metrics.jsonl holds: one record per step, the oldest first."""
        return read_lines(self.run_dir / "metrics.jsonl")

    def state(self) -> dict[str, Any]:
        """Returns how far the files of the run go; what they hold is then on the disk."""
        paths = [path for name in _LINES if (path := self.run_dir / name).exists()]
        for path in paths:
            flush(path)
        steps = [record["step"] for record in self.history()]
        return {"step": steps[-1] if steps else -1, "bytes": {path.name: path.stat().st_size for path in paths}}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Takes back what was recorded after `state`. Raises ConfigError where what was recorded before is gone."""
        for path in (self.run_dir / name for name in _LINES):
            size = state["bytes"].get(path.name, 0)
            if (path.stat().st_size if path.exists() else 0) < size:
                raise ConfigError(
                    f"{path} has lost records of before step {state['step']}; can't go on in {self.run_dir}"
                )
            if path.exists():
                os.truncate(path, size)
        (self.run_dir / "summary.json").unlink(missing_ok=True)  # of an end that is none any more
        for file in (self.run_dir / "rollouts").glob("*_*.jsonl"):
            if int(file.stem.rpartition("_")[2]) > state["step"]:
                file.unlink()
        if self._board is not None:
            self._board.close()
            self._board = _tensorboard(self.run_dir, purge_step=state["step"] + 1)

    def rollouts(self, name: str, groups: Sequence[Group]) -> None:
        """Writes rollouts/NAME.jsonl, one line per rollout; no file where there is none."""
        if groups:
            write_atomically(self.run_dir / "rollouts" / f"{name}.jsonl", records.lines_of(groups))

    def summary(self, **values: Any) -> dict[str, Any]:
        """Writes summary.json and the report page; returns the summary."""
        write_atomically(self.run_dir / "summary.json", json.dumps(values, indent=1) + "\n")
        write_report(self.run_dir)
        return values


def _tensorboard(run_dir: Path, purge_step: int | None = None) -> Any | None:
    if importlib.util.find_spec("tensorboard") is None:
        return None
    with contextlib.redirect_stderr(None):  # its import warns of a missing TensorFlow
        from torch.utils.tensorboard import SummaryWriter
    return SummaryWriter(log_dir=str(run_dir / "tensorboard"), purge_step=purge_step)
