"""Say what runs are at in the text format of Prometheus, from the newest records of their folders."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hocket.observe.metrics import METRICS as TABLE
from hocket.observe.metrics import alarms
from hocket.observe.rows import METRICS, TIMELINE, parsed

TAIL_BYTES = 1 << 18  # of a growing file: the steps since the last evaluation, mostly
MEANINGS = {metric.name: metric.meaning for metric in TABLE}
BOUNDED = {metric.name for metric in TABLE if (metric.low, metric.high) != (None, None)}
OF_SERVER = ("up", "version", "in_flight", "waiting", "kv_use", "kv_tokens")
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Labels = Mapping[str, str]


def text(run_dirs: Iterable[Path]) -> str:
    """Return each metric's newest value, phases, alarms and servers; all are gauges with the label `run`."""
    families: dict[str, list[str]] = {}
    for folder in run_dirs:
        for name, labels, value, meaning in _samples(folder):
            name = "hocket_" + re.sub(r"\W", "_", name)
            told = {"run": folder.resolve().name, **labels}.items()
            lines = families.setdefault(name, [f"# HELP {name} {_escaped(meaning)}", f"# TYPE {name} gauge"])
            quoted = ",".join(f'{key}="{_escaped(one)}"' for key, one in told)
            lines.append(f"{name}{{{quoted}}} {_number(value)}")
    return "".join(line + "\n" for lines in families.values() for line in lines)


def _samples(run_dir: Path) -> Iterator[tuple[str, Labels, float | None, str]]:
    """Yield name, labels, value and meaning."""
    newest: dict[str, Any] = {}
    for record in _tail(run_dir / METRICS):
        newest |= record
    for name, value in newest.items():
        kind, _, rest = name.partition("/")
        if kind == "time":
            yield "phase_seconds", {"phase": rest}, value, "seconds of a phase of the newest step; docs/metrics.md"
        else:
            yield name, {}, value, MEANINGS.get(name, "its newest value; docs/metrics.md")
    finite = {name: math.nan if value is None else value for name, value in newest.items()}
    found = alarms(finite)
    for name in sorted(BOUNDED & finite.keys()):
        yield "alarm", {"metric": name}, name in found, "1: the metric is outside its healthy range"
    seen: dict[str, Any] = {}
    for row in _tail(run_dir / TIMELINE):
        seen |= row
    if "end" in seen:
        yield "seen_timestamp_seconds", {}, seen["end"], "Unix time of the end of the newest step"
    for server in seen.get("servers", ()):
        for name in OF_SERVER:
            if name in server:
                yield f"server_{name}", {"server": server["url"]}, server[name], "as the trainer knows it"


def _tail(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the last rows of a growing file; none if it is missing."""
    try:
        with path.open("rb") as file:
            end = file.seek(0, 2)
            file.seek(max(0, end - TAIL_BYTES))
            lines = file.read().decode(errors="replace")
    except FileNotFoundError:
        return
    yield from parsed(lines)


def _number(value: float | None) -> str:
    return "NaN" if value is None else repr(float(value))


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
