"""Log to Weights & Biases, or to Trackio, which keeps runs on this machine and has the same tables."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from hocket.observe.loggers import COLUMNS, Table, logger

PROJECT = "hocket"


@logger("wandb")
class Wandb:
    package = "wandb"

    def __init__(
        self,
        *,
        run_dir: Path,
        run_id: str,
        config: Mapping[str, Any],
        project: str = PROJECT,
        entity: str | None = None,
        group: str | None = None,
        tags: tuple[str, ...] = (),
        mode: Literal["online", "offline"] | None = None,  # None: WANDB_MODE, else online
    ) -> None:
        import wandb

        is_online = mode == "online" or (mode is None and "WANDB_MODE" not in os.environ)
        if is_online and not wandb.login(prompt=False, verify=False):  # else it would ask in the terminal
            raise ValueError("it knows no key: type `wandb login`, or set {name: wandb, mode: offline}")
        self._table = wandb.Table
        self._run: Any = wandb.init(
            dir=run_dir,
            id=run_id,
            resume="allow",
            name=run_dir.name,
            config=dict(config),
            project=project,
            entity=entity,
            group=group,
            tags=tags,
            mode=mode,
            settings={"console": "off", "silent": True},
        )
        self._run.define_metric("*", step_metric="step")  # its own counter never goes back, as a resumed run does
        self.where = f"wandb sync {self._run.settings.sync_dir}" if self._run.offline else str(self._run.url)

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({**metrics, "step": step})

    def table(self, step: int, name: str, rows: Table) -> None:
        self._run.log({name: self._table(list(COLUMNS), [list(row) for row in rows]), "step": step})

    def summary(self, values: Mapping[str, Any]) -> None:
        self._run.summary.update({"run": dict(values)})

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


@logger("trackio")
class Trackio:
    package = "trackio"

    def __init__(
        self,
        *,
        run_dir: Path,
        run_id: str,
        config: Mapping[str, Any],
        project: str = PROJECT,
        group: str | None = None,
        space_id: str | None = None,  # of a Hugging Face Space to send it to
    ) -> None:
        import trackio

        self._table = trackio.Table
        self._run: Any = trackio.init(
            name=run_id, resume="allow", config=dict(config), project=project, group=group, space_id=space_id
        )
        self.where = f"trackio show --project {project}"

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def table(self, step: int, name: str, rows: Table) -> None:
        self._run.log({name: self._table(list(COLUMNS), [list(row) for row in rows])}, step=step)

    def summary(self, values: Mapping[str, Any]) -> None:
        numbers = {name: value for name, value in values.items() if isinstance(value, int | float)}
        self._run.log({f"summary/{name}": value for name, value in numbers.items()}, step=int(values["steps"]))

    def close(self, *, failed: bool) -> None:
        self._run.finish()
