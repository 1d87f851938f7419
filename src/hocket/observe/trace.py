"""Write trace.json: the steps of observe.trace over all processes, by one clock, for ui.perfetto.dev or chrome://tracing."""

import json
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from hocket.common.files import write_atomically
from hocket.common.tasks import LISTENERS, Span

FILE = "trace.json"


class Trace(AbstractContextManager["Trace"]):
    """Keeps the spans of the chosen steps; each process is a row, with as many lanes as it does things at a time."""

    def __init__(self, run_dir: Path, steps: range) -> None:
        self._path = run_dir / FILE
        self._steps = steps
        self._heard: list[Span] = []
        self._spans: list[Span] = []
        LISTENERS.append(self._heard.append)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write what is known so far, if the step is one of them."""
        heard = self._heard[:]
        del self._heard[: len(heard)]  # and none that another thread adds meanwhile
        if step in self._steps:
            self._spans += heard
            write_atomically(self._path, json.dumps({"traceEvents": events(self._spans)}))

    def __exit__(self, *exc_info: object) -> None:
        LISTENERS.remove(self._heard.append)


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
