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

TRAINER = "trainer"
NAMES = {
    "time/batch": ("servers", "generate"),
    "time/eval": ("servers", "eval"),
    "time/generate": (TRAINER, "wait"),  # for tokens
    "time/reward": (TRAINER, "reward"),  # for scores alone
} | {f"time/{name}": (TRAINER, name) for name in ("turn", "check", "measure", "train", "sync", "checkpoint")}
"""Span → who and name in the file."""


class Timeline(AbstractContextManager["Timeline"]):
    """Writes the spans that it hears of. `last_step`: the last finished one; `servers`: what is known of each one.

    `also` get a step and all spans since the step before.
    """

    def __init__(
        self,
        run_dir: Path,
        last_step: Callable[[], int],
        servers: Callable[[], Sequence[Mapping[str, Any]]] = tuple,
    ) -> None:
        self._path = run_dir / TIMELINE
        self._last_step = last_step
        self._servers = servers
        self.also: list[Callable[[int, Sequence[Span]], None]] = []
        self._spans: list[Span] = []
        LISTENERS.append(self._spans.append)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append the spans since the step before, in the order of their beginning, and the servers."""
        spans = self._spans[:]
        del self._spans[: len(spans)]  # and none that another thread adds meanwhile
        unix = time.time() - time.perf_counter()
        rows: list[dict[str, Any]] = []
        for span in sorted(spans, key=lambda span: span.start):
            if span.name in NAMES:
                who, name = NAMES[span.name]
                where = {"step": step, "name": name, "who": who}
                rows.append(where | {"start": round(unix + span.start, 6), "end": round(unix + span.end, 6)})
        append(self._path, [*rows, *self._of_servers(step)])
        for told in self.also:
            told(step, spans)

    def note_servers(self) -> None:
        """Append what is known of the servers, within a step."""
        append(self._path, self._of_servers(self._last_step() + 1))

    def _of_servers(self, step: int) -> list[dict[str, Any]]:
        servers = self._servers()
        return [{"step": step, "time": round(time.time(), 6), "servers": servers}] if servers else []

    def __exit__(self, *exc_info: object) -> None:
        LISTENERS.remove(self._spans.append)
