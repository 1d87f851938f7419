"""Log to TensorBoard's files in the run folder."""

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from hocket.config.sections import markdown_table
from hocket.observe.loggers import COLUMNS, Table, logger


@logger("tensorboard")
class TensorBoard:
    """Writes to the folder tensorboard of a run."""

    package = "tensorboard"

    def __init__(self, *, run_dir: Path, run_id: str, config: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter  # takes seconds

        self._make = SummaryWriter
        self.where = f"tensorboard --logdir {run_dir.parent}"
        self._folder = run_dir / "tensorboard"
        self._config = config
        self._board: Any = None

    def _from(self, step: int) -> Any:
        """Return the writer, opened so that it hides a resumed run's rows from `step` on."""
        if self._board is None:
            self._board = self._make(log_dir=str(self._folder), purge_step=step)
            self._board.add_text("config", _verbatim(_yaml(self._config)), step)
        return self._board

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        board = self._from(step)
        for name, value in metrics.items():
            board.add_scalar(name, value, step)
        board.flush()

    def table(self, step: int, name: str, rows: Table) -> None:
        cells = map(_cells, rows)
        self._from(step).add_text(name, markdown_table(COLUMNS, cells), step)

    def summary(self, values: Mapping[str, Any]) -> None:
        step = int(values["steps"])
        self._from(step).add_text("summary", _verbatim(_yaml(values)), step)

    def close(self, *, failed: bool) -> None:
        if self._board is not None:
            self._board.close()


def _cells(row: Sequence[Any]) -> list[str]:
    return [_verbatim(str(cell)) for cell in row]


def _yaml(values: Mapping[str, Any]) -> str:
    return yaml.safe_dump(dict(values), sort_keys=False)


def _verbatim(text: str) -> str:
    """Return Markdown that shows a text as it is; a hostile text can add no markup."""
    escaped = html.escape(text).replace("|", "&#124;").replace("`", "&#96;")
    return f"<code>{escaped}</code>".replace("\n", "<br>")
