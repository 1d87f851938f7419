"""Read a run folder, of this process or another, while it grows: metrics in columns, phases, servers, alarms."""

import json
import math
import time
from array import array
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hocket.observe import browse, plugin_files
from hocket.observe.metrics import alarms
from hocket.observe.rows import METRICS, TIMELINE, parsed, read_text, reading

MAX_COLUMNS = 800  # of curves, at once: means of several steps each in a longer run
SILENCE_S = 60.0  # after which an owner without a sign of life is gone
NUM_PHASES = 100  # newest lines of the timeline that are shown
TOTALS = {"tokens": "rollout/tokens", "seconds": "time/step"}  # other x axes → what they sum up


class Tail:
    """Gives what a file of JSON lines has got since the last look."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = 0  # bytes that were read
        self._last = b""  # the line before them

    def is_rewritten(self) -> bool:
        """Return whether what was read is there no more: the run went on from an earlier step."""
        with suppress(FileNotFoundError), self._path.open("rb") as file:
            file.seek(self._at - len(self._last))
            return file.read(len(self._last)) != self._last
        return self._at > 0

    def lines(self) -> Iterator[str]:
        with suppress(FileNotFoundError), self._path.open("rb") as file:
            file.seek(self._at)
            for line in file:
                if line.endswith(b"\n"):  # else it is being written
                    self._last = line
                    self._at += len(line)
                    yield line.decode(errors="replace")


class RunReader:
    """One run, as far as it has been read. Its memory grows with the number of steps alone."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.reads = 0  # how often it was read from its beginning
        self._restart()

    def _restart(self) -> None:
        self.reads += 1
        self._metrics = Tail(self.folder / METRICS)
        self._timeline = Tail(self.folder / TIMELINE)
        self.steps = array("q")
        self.columns = {name: array("d") for name in TOTALS}  # and metrics: NaN where a step has none
        self.newest: dict[str, float] = {}  # of each metric the newest value
        self.alarms: dict[str, dict[str, Any]] = {}  # by metric
        self.servers: dict[str, dict[str, Any]] = {}  # by URL
        self._phases: deque[str] = deque(maxlen=NUM_PHASES)

    def look(self) -> None:
        """Read what has come."""
        if self._metrics.is_rewritten() or self._timeline.is_rewritten():
            self._restart()
        with reading(self.folder / METRICS):
            for line in self._metrics.lines():
                for record in parsed(line):
                    if isinstance(record.get("step"), int):
                        self._add(record)
        with reading(self.folder / TIMELINE):
            for line in self._timeline.lines():
                if '"servers": [' not in line:
                    self._phases.append(line)
                    continue
                for row in parsed(line):
                    for server in row["servers"]:
                        self._note(row["step"], server)

    def _add(self, record: Mapping[str, Any]) -> None:
        known = {name: math.nan if value is None else float(value) for name, value in record.items()}
        step = int(known.pop("step"))
        self.steps.append(step)  # first: it may be no step
        self.newest |= known
        for name, text in alarms(known).items():
            count = self.alarms.get(name, {"count": 0})["count"]
            self.alarms[name] = {"count": count + 1, "last": step, "text": text}
        for name, of_step in TOTALS.items():
            so_far = self.columns[name][-1] if self.columns[name] else 0.0
            known[name] = so_far + max(0.0, known.get(of_step, 0.0))  # max: of NaN 0
        for name in known.keys() - self.columns.keys():
            self.columns[name] = array("d", [math.nan]) * (len(self.steps) - 1)
        for name, column in self.columns.items():
            column.append(known.get(name, math.nan))

    def _note(self, step: int, server: Mapping[str, Any]) -> None:
        """Remember what is known of a server, and when it was lost or came back."""
        known = self.servers.setdefault(server["url"], {"changes": []})
        if known.get("up") != server["up"]:
            known["changes"].append([step, server["up"]])
        known |= server

    def data(self) -> dict[str, Any]:
        """Return all that a page shows at first."""
        return self.news(-1) | {
            "name": self.folder.resolve().name,
            "config": read_text(self.folder / "config.yaml"),
            "plugins": plugin_files.texts(self.folder),
            "rollouts": browse.steps(self.folder),
        }

    def news(self, step: int) -> dict[str, Any]:
        """Return what a page shows of the run as a whole, and the curves after `step`."""
        with reading(self.folder / "summary.json"):
            summary = json.loads(read_text(self.folder / "summary.json") or "null")
        state = "stopped"
        with suppress(FileNotFoundError):
            if time.time() - (self.folder / "owner.json").stat().st_mtime < SILENCE_S:  # by this machine's clock
                state = "running"
        return {
            "state": "finished" if summary else state,
            "summary": summary,
            "alarms": self.alarms,
            "servers": self.servers,
            "phases": parsed("".join(self._phases)),
            "curves": self.curves(step + 1),
        }

    def curves(self, first: float, last: float = math.inf) -> dict[str, Sequence[float | None]]:
        """Return each metric from step `first` to `last`: at most MAX_COLUMNS means."""
        begin = bisect_left(self.steps, first)
        end = bisect_right(self.steps, last)
        size = max(1, math.ceil((end - begin) / MAX_COLUMNS))
        parts = [slice(at, min(at + size, end)) for at in range(begin, end, size)]
        return {
            "first": [self.steps[part.start] for part in parts],
            "step": [self.steps[part.stop - 1] for part in parts],
            **{name: [_mean(column[part]) for part in parts] for name, column in self.columns.items()},
            **{name: [_short(self.columns[name][part.stop - 1]) for part in parts] for name in TOTALS},
        }


def _mean(values: Sequence[float]) -> float | None:
    finite = [*filter(math.isfinite, values)]
    return _short(sum(finite) / len(finite)) if finite else None


def _short(value: float) -> float:
    return float(f"{value:.6g}")
