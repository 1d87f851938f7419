"""Log to MLflow: to MLFLOW_TRACKING_URI, else to a database beside the run folder."""

import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hocket.config import leaves
from hocket.observe.loggers import COLUMNS, Table, logger

TAG = "hocket_run"  # the tag by which a resumed run is recognized
AT_ONCE = 100  # the most parameters that MLflow takes in a request


@logger("mlflow")
class Mlflow:
    """Writes to the run of an experiment that has this run's tag, and makes it if there is none."""

    package = "mlflow"

    def __init__(
        self, *, run_dir: Path, run_id: str, config: Mapping[str, Any], experiment: str = "hocket"
    ) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        beside = run_dir.parent.resolve()
        uri = os.environ.get("MLFLOW_TRACKING_URI", f"sqlite:///{beside}/mlflow.db")
        self.where = f"mlflow ui --backend-store-uri {uri}"
        self._metric = Metric
        self._client: Any = MlflowClient(uri)
        known = self._client.get_experiment_by_name(experiment)
        if known:
            number = known.experiment_id
        else:
            folder = f"file://{beside}/mlflow" if uri.startswith("sqlite:") else None
            number = self._client.create_experiment(experiment, folder)
        runs = self._client.search_runs([number], f"tags.{TAG} = '{run_id}'")
        if runs:
            run = runs[0]
        else:
            run = self._client.create_run(number, tags={TAG: run_id}, run_name=run_dir.name)
        self._id = run.info.run_id
        params = [
            Param(key, str(value))
            for key, value in leaves(config).items()
            if key not in run.data.params
        ]
        for start in range(0, len(params), AT_ONCE):
            self._client.log_batch(self._id, params=params[start : start + AT_ONCE])
        self._client.update_run(self._id, "RUNNING")
        self._client.log_dict(self._id, dict(config), "config.yaml")

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        rows = []
        for name, value in metrics.items():
            allowed = re.sub(r"[^\w/ .:-]", "_", name)  # the characters that MLflow takes
            rows.append(self._metric(allowed, value, now, step))
        self._client.log_batch(self._id, metrics=rows)

    def table(self, step: int, name: str, rows: Table) -> None:
        columns = {}
        for place, column in enumerate(COLUMNS):
            columns[column] = [row[place] for row in rows]
        self._client.log_table(self._id, columns, f"{name}/step_{step:06d}.json")

    def summary(self, values: Mapping[str, Any]) -> None:
        self._client.log_dict(self._id, dict(values), "summary.json")

    def close(self, *, failed: bool) -> None:
        self._client.set_terminated(self._id, "FAILED" if failed else "FINISHED")
