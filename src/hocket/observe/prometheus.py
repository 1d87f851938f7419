"""Say what runs are at in the text format of Prometheus: gauges with the label `run`."""

import re
from collections.abc import Iterable, Iterator, Mapping

from hocket.observe.metrics import METRICS as TABLE
from hocket.observe.metrics import alarms
from hocket.observe.reader import RunReader
from hocket.observe.rows import METRICS

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PHASE = "seconds of a phase of the newest step: docs/metrics.md"
ALARM = "1: the metric is outside its healthy range"
SEEN = "Unix time of the end of the newest step"
MEANINGS = {metric.name: metric.meaning for metric in TABLE}
BOUNDED = {metric.name for metric in TABLE if metric.advice}
Sample = tuple[str, Mapping[str, str], float, str]


def text(runs: Iterable[RunReader]) -> str:
    """Return metrics, phases, alarms and servers as they were read last."""
    families: dict[str, list[str]] = {}
    for run in runs:
        for name, labels, value, meaning in _samples(run):
            name = "hocket_" + re.sub(r"\W", "_", name)
            lines = families.setdefault(name, [f"# HELP {name} {_escaped(meaning)}", f"# TYPE {name} gauge"])
            told = {"run": run.folder.resolve().name, **labels}.items()
            quoted = ",".join(f'{key}="{_escaped(one)}"' for key, one in told)
            lines.append(f"{name}{{{quoted}}} {float(value)!r}")
    return "".join(line + "\n" for lines in families.values() for line in lines)


def _samples(run: RunReader) -> Iterator[Sample]:
    """Yield name, labels, value and meaning."""
    if run.steps:
        yield "step", {}, run.steps[-1], "the newest finished step"
        yield "seen_timestamp_seconds", {}, (run.folder / METRICS).stat().st_mtime, SEEN
    unhealthy = alarms(run.newest)
    for name, value in run.newest.items():
        kind, _, rest = name.partition("/")
        if kind == "time":
            yield "phase_seconds", {"phase": rest}, value, PHASE
        else:
            yield name, {}, value, MEANINGS.get(name, "its newest value: docs/metrics.md")
        if name in BOUNDED:
            yield "alarm", {"metric": name}, name in unhealthy, ALARM
    for url, server in run.servers.items():
        for name, value in server.items():
            if isinstance(value, int | float):
                yield f"server_{name}", {"server": url}, value, "as the trainer knows it"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
