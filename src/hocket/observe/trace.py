"""Write trace.json: the steps of observe.trace over all processes, by one clock, for ui.perfetto.dev or chrome://tracing."""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hocket.common.files import write_atomically
from hocket.common.tasks import Span

FILE = "trace.json"


class Trace:
    """Keeps the spans of the chosen steps; each process is a row, with as many lanes as it does things at a time."""

    def __init__(self, run_dir: Path, steps: range) -> None:
        self._path = run_dir / FILE
        self._steps = steps
        self._spans: list[Span] = []

    def step(self, step: int, spans: Sequence[Span]) -> None:
        """Write what is known so far, if the step is one of them."""
        if step in self._steps:
            self._spans += spans
            write_atomically(self._path, json.dumps({"traceEvents": events(self._spans)}))


def events(spans: list[Span]) -> list[dict[str, Any]]:
    """Return Chrome's events: microseconds of Unix time."""
    unix = time.time() - time.perf_counter()
    found: list[dict[str, Any]] = []
    lanes: dict[str, list[list[float]]] = {}  # of each process, in each lane the ends of what is open
    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
        if span.who not in lanes:
            named = {"name": "process_name", "ph": "M", "args": {"name": span.who}}
            found.append({**named, "pid": len(lanes), "tid": 0})
        mine = lanes.setdefault(span.who, [])
        place = {"pid": [*lanes].index(span.who), "tid": _lane(mine, span)}
        when = {"ts": (unix + span.start) * 1e6, "dur": (span.end - span.start) * 1e6}
        found.append({"name": span.name.removeprefix("time/"), "ph": "X", **when, **place})
    return found


def _lane(lanes: list[list[float]], span: Span) -> int:
    """Return the first lane that is free, or where the span lies within what is open."""
    for number, ends in enumerate(lanes):
        while ends and ends[-1] <= span.start:
            ends.pop()
        if not ends or span.end <= ends[-1]:
            ends.append(span.end)
            return number
    lanes.append([span.end])
    return len(lanes) - 1
