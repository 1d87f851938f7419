"""Log to Weights & Biases, or to Trackio, which has the same interface and keeps runs on this
machine."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from hocket.observe.loggers import COLUMNS, Table, logger

Mode = Literal["online", "offline"]


@logger("wandb")
class Wandb:
    """Writes to the run of a project that has this run's id."""

    package = "wandb"

    def __init__(
        self,
        *,
        run_dir: Path,
        run_id: str,
        config: Mapping[str, Any],
        project: str = "hocket",
        mode: Mode | None = None,  # None: WANDB_MODE, else online
    ) -> None:
        import wandb

        mode = mode or os.environ.get("WANDB_MODE", "online")  # type: ignore[assignment]  # it checks its variable
        # Without a key, and with `prompt`, it would wait for one in the terminal.
        if mode == "online" and not wandb.login(prompt=False, verify=False):
            raise ValueError(
                "it knows no key: type `wandb login`, or set {name: wandb, mode: offline}"
            )
        same = {"id": run_id, "name": run_dir.name, "resume": "allow"}
        quiet = {"console": "off", "silent": True}
        self._table = wandb.Table
        self._run: Any = wandb.init(
            dir=run_dir, project=project, mode=mode, config=dict(config), settings=quiet, **same
        )
        # Its own counter of steps never goes back, as a resumed run does.
        self._run.define_metric("*", step_metric="step")
        if self._run.offline:
            self.where = f"wandb sync {self._run.settings.sync_dir}"
        else:
            self.where = str(self._run.url)

    def metrics(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._run.log(dict(metrics) | {"step": step})

    def table(self, step: int, name: str, rows: Table) -> None:
        self.metrics(step, {name: self._table(list(COLUMNS), rows)})

    def summary(self, values: Mapping[str, Any]) -> None:
        self._run.summary.update({"run": dict(values)})

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


@logger("trackio")
class Trackio(Wandb):
    """Writes to a run of Trackio."""

    package = "trackio"

    def __init__(
        self, *, run_dir: Path, run_id: str, config: Mapping[str, Any], project: str = "hocket"
    ) -> None:
        import trackio

        self._table = trackio.Table
        self._run = trackio.init(project, run_id, config=dict(config), resume="allow")
        self.where = f"trackio show --project {project}"

    def metrics(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._run.log(dict(metrics), step=step)

    def summary(self, values: Mapping[str, Any]) -> None:
        numbers = {
            f"summary/{name}": value
            for name, value in values.items()
            if isinstance(value, int | float)
        }
        self.metrics(int(values["steps"]), numbers)

    def close(self, *, failed: bool) -> None:
        self._run.finish()
