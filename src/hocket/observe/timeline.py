"""Write timeline.jsonl: what servers and trainer did when; what was known of servers, also when one was lost.

    {"step": 3, "name": "train", "who": "trainer", "start": 1764000001.5, "end": 1764000002.25}
    {"step": 3, "time": 1764000003.0, "servers": [{"url": "http://127.0.0.1:8000", "up": true, ...}]}

Seconds are Unix time by the trainer's clock. A step's lines are written at its end. Its batch began in an earlier step,
where batches are played ahead: that span of the servers overlaps the trainer's.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from hocket.common.tasks import LISTENERS, Span
from hocket.observe.rows import TIMELINE, append

SERVERS = {"time/batch": "generate", "time/eval": "eval"}
TRAINER = {
    "time/generate": "wait",  # for tokens
    "time/reward": "reward",  # for scores alone
    "time/turn": "turn",
    "time/check": "check",
    "time/measure": "measure",
    "time/train": "train",
    "time/sync": "sync",
    "time/checkpoint": "checkpoint",
}
"""Span → name in the file."""


class Timeline(AbstractContextManager["Timeline"]):
    """Writes the spans that it hears of. `last_step`: the last finished one; `servers`: what is known of each one."""

    def __init__(
        self,
        run_dir: Path,
        last_step: Callable[[], int],
        servers: Callable[[], Sequence[Mapping[str, Any]]] = tuple,
    ) -> None:
        self._path = run_dir / TIMELINE
        self._last_step = last_step
        self._servers = servers
        self._spans: list[Span] = []
        LISTENERS.append(self._spans.append)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append the spans since the step before, in the order of their beginning, and the servers."""
        spans = self._spans[:]
        del self._spans[: len(spans)]  # and none that another thread adds meanwhile
        unix = time.time() - time.perf_counter()
        rows: list[dict[str, Any]] = []
        for who, names in {"servers": SERVERS, "trainer": TRAINER}.items():
            for span in spans:
                if span.name in names:
                    where = {"step": step, "name": names[span.name], "who": who}
                    rows.append(where | {"start": round(unix + span.start, 6), "end": round(unix + span.end, 6)})
        rows.sort(key=lambda row: row["start"])
        append(self._path, [*rows, *self._of_servers(step)])

    def note_servers(self) -> None:
        """Append what is known of the servers, within a step."""
        append(self._path, self._of_servers(self._last_step() + 1))

    def _of_servers(self, step: int) -> list[dict[str, Any]]:
        servers = self._servers()
        return [{"step": step, "time": round(time.time(), 6), "servers": servers}] if servers else []

    def __exit__(self, *exc_info: object) -> None:
        LISTENERS.remove(self._spans.append)
