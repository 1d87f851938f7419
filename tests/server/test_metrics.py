"""hocket's gauges at /metrics, and vLLM's in /health."""

from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from hocket.server import vllm_api
from hocket.server.metrics import Gauges
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


def test_vllm_s_gauges_are_read_over_all_its_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = CollectorRegistry()
    monkeypatch.setattr("prometheus_client.REGISTRY", registry)
    assert vllm_api.load() == {}
    waiting = Gauge("vllm:num_requests_waiting", "", ["engine"], registry=registry)
    use = Gauge("vllm:kv_cache_usage_perc", "", ["engine"], registry=registry)
    for engine, value in (("0", 0.25), ("1", 0.5)):
        waiting.labels(engine).set(8 * value)
        use.labels(engine).set(value)
    assert vllm_api.load() == {"waiting": 6, "kv_use": 0.5}
    assert fakes.health(**vllm_api.load()).waiting == 6
