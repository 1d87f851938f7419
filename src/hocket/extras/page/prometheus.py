"""Write the state of runs in the text format of Prometheus: gauges with the label `run`."""

from collections.abc import Iterable, Sequence

from prometheus_client import generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from hocket.extras.page.reader import RunReader
from hocket.formats import METRICS
from hocket.observe.metrics import alarms


def text(runs: Sequence[RunReader]) -> bytes:
    """Write metrics, alarms and servers as they were read last."""
    return generate_latest(_Gauges(runs))


class _Gauges(Collector):
    def __init__(self, runs: Sequence[RunReader]) -> None:
        self._runs = runs

    def collect(self) -> Iterable[GaugeMetricFamily]:
        metric = GaugeMetricFamily(
            "hocket_metric", "its newest value: docs/reference/metrics.md", labels=["run", "metric"]
        )
        alarm = GaugeMetricFamily(
            "hocket_alarm", "1: it is outside its healthy range", labels=["run", "metric"]
        )
        server = GaugeMetricFamily(
            "hocket_server", "as the trainer knows it", labels=["run", "server", "metric"]
        )
        seen = GaugeMetricFamily(
            "hocket_seen_timestamp_seconds", "end of the newest step", labels=["run"]
        )
        for run in self._runs:
            name = run.folder.resolve().name
            for key, value in run.newest.items():
                metric.add_metric([name, key], value)
            for key in alarms(run.newest) | run.unhealthy:
                alarm.add_metric([name, key], 1)
            for url, known in run.servers.items():
                for key, number in known.items():
                    if isinstance(number, int | float):
                        server.add_metric([name, url, key], number)
            if run.newest:
                seen.add_metric([name], (run.folder / METRICS).stat().st_mtime)
        return metric, alarm, server, seen
