"""Write timeline.jsonl: the spans of servers and trainer, and the state of the servers.

    {"step": 3, "name": "train", "who": "trainer", "start": 1764000001.5, "end": 1764000002.25}
    {"step": 3, "time": 1764000003.0, "servers": [{"url": "http://127.0.0.1:8000", ...}]}

Seconds are Unix time by the trainer's clock. A step's lines are written at its end. Where batches
are generated ahead, a step's batch was begun in an earlier step: that span of the servers overlaps
the trainer's. The state of the servers is also written when a server is lost.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hocket.common.files import write_atomically
from hocket.common.tasks import LISTENERS, Span
from hocket.formats import TIMELINE, ServerRow, ServersRow, SpanRow, TimelineRow
from hocket.observe.rows import append
from hocket.run_part import Joined, RunPart, run_part

TRAINER = "trainer"
TRACE = "trace.json"
NAMES = {
    "time/batch": ("servers", "generate"),
    "time/eval": ("servers", "eval"),
    "time/generate": (TRAINER, "wait"),  # for tokens
    "time/reward": (TRAINER, "reward"),  # for scores alone
} | {
    f"time/{name}": (TRAINER, name)
    for name in ("record", "turn", "check", "measure", "samples", "train", "checkpoint", "sync")
}
"""For each span, who has it and its name in the file."""


class Timeline(RunPart):
    """Writes the spans that `timed` measures; those of the steps `traced` into trace.json, too.

    `last_step` returns the last finished step, `servers` the state of each server.
    """

    def __init__(
        self,
        run_dir: Path,
        last_step: Callable[[], int],
        servers: Callable[[], Sequence[ServerRow]] = tuple,
        traced: range = range(0),
    ) -> None:
        self._run_dir = run_dir
        self._last_step = last_step
        self._servers = servers
        self._traced = traced
        self._kept: list[Span] = []  # of the traced steps
        self._spans: list[Span] = []
        LISTENERS.append(self._spans.append)

    def recorded(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append the spans since the step before, ordered by their start, and the servers."""
        spans = self._spans[:]
        del self._spans[: len(spans)]  # but none that another thread has added meanwhile
        unix = time.time() - time.perf_counter()
        rows: list[TimelineRow] = []
        for span in sorted(spans, key=lambda span: span.start):
            if span.name in NAMES:
                who, name = NAMES[span.name]
                row: SpanRow = {
                    "step": step,
                    "name": name,
                    "who": who,
                    "start": round(unix + span.start, 6),
                    "end": round(unix + span.end, 6),
                }
                rows.append(row)
        append(self._run_dir / TIMELINE, [*rows, *self._of_servers(step)])
        if step in self._traced:
            self._kept += spans
            write_atomically(self._run_dir / TRACE, json.dumps({"traceEvents": events(self._kept)}))

    def servers_changed(self) -> None:
        """Append the state of the servers, within a step."""
        append(self._run_dir / TIMELINE, self._of_servers(self._last_step() + 1))

    def _of_servers(self, step: int) -> list[ServersRow]:
        servers = self._servers()
        if not servers:
            return []
        return [{"step": step, "time": round(time.time(), 6), "servers": servers}]

    def close(self) -> None:
        LISTENERS.remove(self._spans.append)


@run_part("timeline")
def timeline(run: Joined) -> RunPart:
    folder = run.folder
    return Timeline(
        folder.path, lambda: folder.last_step, run.servers.states, run.config.observe.traced
    )


def events(spans: Sequence[Span]) -> list[dict[str, Any]]:
    """Convert spans to Chrome's events, in microseconds of Unix time.

    A process has as many lanes (threads) as it has spans at the same time.
    """
    unix = time.time() - time.perf_counter()
    converted: list[dict[str, Any]] = []
    processes: dict[str, int] = {}  # the number of each
    lanes: list[list[list[float]]] = []  # by process and lane, the ends of the spans that are open
    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
        if span.who not in processes:
            processes[span.who] = len(lanes)
            lanes.append([])
            event: dict[str, Any] = {"name": "process_name", "ph": "M", "args": {"name": span.who}}
            converted.append(event | {"pid": processes[span.who], "tid": 0})
        process = processes[span.who]
        event = {
            "name": span.name.removeprefix("time/"),
            "ph": "X",
            "ts": (unix + span.start) * 1e6,
            "dur": (span.end - span.start) * 1e6,
            "pid": process,
            "tid": _lane(lanes[process], span),
        }
        converted.append(event)
    return converted


def _lane(lanes: list[list[float]], span: Span) -> int:
    """Choose the first lane that is free, or whose open spans contain this span."""
    for number, ends in enumerate(lanes):
        while ends and ends[-1] <= span.start:
            ends.pop()
        if not ends or span.end <= ends[-1]:
            ends.append(span.end)
            return number
    lanes.append([span.end])
    return len(lanes) - 1
