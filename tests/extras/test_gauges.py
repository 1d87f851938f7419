"""hocket's gauges at /metrics of a server."""

from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from hocket.extras.gauges import Gauges
from support import fakes


def test_gauges_say_what_health_says() -> None:
    class Engine:
        def health(self) -> Any:
            return fakes.health(status="updating", version=7, in_flight=3)

    registry = CollectorRegistry()
    gauges: Any = Gauges()
    gauges.engine = Engine()
    registry.register(gauges)
    families = text_string_to_metric_families(generate_latest(registry).decode())
    found = {(sample.name, *sample.labels.values()): sample.value for one in families for sample in one.samples}
    status = {("hocket_status", name): name == "updating" for name in ("ready", "updating", "asleep", "failed")}
    assert found == status | {("hocket_weight_version",): 7, ("hocket_in_flight",): 3, ("hocket_kv_tokens",): 4096}
