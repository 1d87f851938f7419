"""/metrics of a run: newest values, alarms and servers, read by Prometheus' own parser."""

import json
from pathlib import Path
from typing import Any

import pytest

from hocket.extras.page import prometheus
from hocket.extras.page.reader import RunReader

Samples = dict[tuple[str, ...], float]
SERVER = {
    "url": 'http://a"\\\n:1',
    "up": True,
    "state": "up",
    "reason": None,
    "version": 3,
    "waiting": 2,
    "kv_use": 0.25,
    "status": "ready",
}


def samples(run_dir: Path) -> Samples:
    """Returns each sample by its name and labels but `run`."""
    parser = pytest.importorskip("prometheus_client.parser")
    reader = RunReader(run_dir)
    reader.look()
    told = prometheus.text([reader]).decode()
    found: Samples = {}
    for family in parser.text_string_to_metric_families(told):
        assert family.type == "gauge"
        assert family.documentation
        for sample in family.samples:
            assert sample.labels.pop("run") == run_dir.name
            found[sample.name, *sample.labels.values()] = sample.value
    return found


def write(path: Path, *rows: dict[str, Any]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_run_says_its_newest_metrics_alarms_and_servers(tmp_path: Path) -> None:
    run = tmp_path / "mine"
    run.mkdir()
    assert samples(run) == {}  # before the first step
    first = {"step": 1, "eval/pass@1": 0.5, "rollout/truncated": 0.5, "reward/mean": 0.1}
    second = {"step": 2, "reward/mean": 0.2, "train/grad_norm": None, "time/train": 1.5, "rollout/reward_errors": 0.5}
    write(run / "metrics.jsonl", first, second)
    lost = {**SERVER, "up": False, "state": "lost", "reason": "it broke"}
    span = {"step": 2, "name": "train", "who": "trainer", "start": 1.0, "end": 2.0}
    write(
        run / "timeline.jsonl",
        {"step": 1, "time": 1.0, "servers": [lost]},
        span,
        {"step": 2, "time": 2.5, "servers": [SERVER]},
    )
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "reward')  # it is being written
    found = samples(run)
    assert str(found.pop(("hocket_metric", "train/grad_norm"))) == "nan"
    assert found.pop(("hocket_seen_timestamp_seconds",)) == (run / "metrics.jsonl").stat().st_mtime
    assert found == {
        ("hocket_metric", "step"): 2,
        ("hocket_metric", "eval/pass@1"): 0.5,
        ("hocket_metric", "reward/mean"): 0.2,
        ("hocket_metric", "rollout/truncated"): 0.5,
        ("hocket_metric", "rollout/reward_errors"): 0.5,
        ("hocket_metric", "time/train"): 1.5,
        ("hocket_metric", "tokens"): 0,
        ("hocket_metric", "seconds"): 0,
        ("hocket_alarm", "rollout/truncated"): 1,
        ("hocket_alarm", "rollout/reward_errors"): 1,
        ("hocket_server", "up", SERVER["url"]): 1,
        ("hocket_server", "version", SERVER["url"]): 3,
        ("hocket_server", "waiting", SERVER["url"]): 2,
        ("hocket_server", "kv_use", SERVER["url"]): 0.25,
    }
