"""Show hocket's own gauges beside vLLM's at /metrics of a server."""

from collections.abc import Iterator
from typing import get_args

from prometheus_client import REGISTRY
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from hocket.protocol import Status
from hocket.server.engine import Engine
from hocket.server.parts import Server, server_part


class Gauges(Collector):
    """The fields of /health of this process's engine, read at each request of Prometheus."""

    engine: Engine

    def describe(self) -> list[Metric]:
        return []  # else `collect` would be called at once, before there is an engine

    def collect(self) -> Iterator[Metric]:
        health = self.engine.health()
        yield _gauge(
            "weight_version",
            "version of the weights that new tokens are sampled with",
            health.version,
        )
        yield _gauge("in_flight", "completions under way", health.in_flight)
        yield _gauge("kv_tokens", "tokens that fit into the KV cache", health.kv_tokens)
        status = GaugeMetricFamily("hocket_status", "1: what the server is at", labels=["status"])
        for name in get_args(Status):
            status.add_metric([name], name == health.status)
        yield status


def _gauge(name: str, meaning: str, value: float) -> Metric:
    return GaugeMetricFamily(f"hocket_{name}", meaning, value)


GAUGES = Gauges()
REGISTRY.register(GAUGES)


@server_part("metrics")
def install(server: Server) -> None:
    GAUGES.engine = server.engine
