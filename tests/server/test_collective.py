"""Weights straight from memory into a running server's engine: right to the last tensor, and never wedged by a failure.

The trainer's side is the real CollectiveTransport, fed from a transformers model.
"""

import socket
import statistics
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tests.server.test_adapters import adapters_come_and_are_used, load_by_collective

from hocket.errors import HocketError
from hocket.protocol import ReloadResponse

pytestmark = pytest.mark.engine


def deliver_well(server: Any, source: Any, *settings: str) -> None:
    """Loads, and compares what the workers then compute with, from a second broadcast."""
    ((checksum, answer),) = server.deliver(source, *settings, compare=True).answers.values()
    assert isinstance(answer, ReloadResponse), answer
    assert (answer.version, answer.checksum) == (server.next_version - 1, checksum)


def test_experts_travel_under_the_names_of_their_checkpoint(servers: Any, kit: Any) -> None:
    server = servers("experts float32")
    server.model = kit.make_experts(seed=9)
    deliver_well(server, kit.Source.of(server.model))
    assert max(server.gaps()) < 1e-4


def break_off(server: Any, source: Any, bucket: int) -> None:
    """Loses the trainer before a bucket, as the kernel closes a killed one's connections."""
    source.before = lambda number: source.transport.close() if number == bucket else None
    ((_, answer),) = server.deliver(source).answers.values()
    assert isinstance(answer, HocketError)
    server.wait_until(lambda health: health["status"] == "failed")


def test_both_workers_of_a_tensor_parallel_engine_receive_adapters_and_after_a_failure_weights(
    servers: Any, kit: Any
) -> None:
    server = servers.take("parallel float32 lora")
    try:
        assert server.health()["workers"] == 2
        adapters_come_and_are_used(server, kit, load_by_collective)
        break_off(server, kit.Source.of(kit.make_model(tied=True, seed=405)), bucket=3)
        old, new = server.model, kit.make_model(tied=True, seed=305)
        deliver_well(server, kit.Source.of(new))
        assert max(server.gaps(model=new)) < 1e-4
        assert statistics.mean(server.gaps(model=old)) > 0.3
        # By disk, too: each worker reads its part.
        version = server.publish_and_load(kit.make_model(tied=True, seed=307))["version"]
        assert max(server.gaps()) < 1e-4
        server.assert_compares(version, f"v{version:06d}")
    finally:
        server.stop()  # its workers never rest: tests after it would take twice as long


@pytest.mark.parametrize("in_flight", ["keep", "drain", "abort"])
def test_requests_in_flight_are_kept_drained_or_aborted(server: Any, kit: Any, in_flight: str) -> None:
    def load(seed: int) -> Any:
        server.model = kit.make_model(tied=True, seed=seed)
        deliver_well(server, kit.Source.of(server.model), f"sync.in_flight={in_flight}")
        return server.model

    kit.load_amid_requests(server, server.model, load, in_flight=in_flight)
    assert max(server.gaps()) < 1e-4


def test_whatever_a_vanished_trainer_leaves_half_loaded_the_next_update_is_whole(server: Any, kit: Any) -> None:
    # vLLM collects a layer's tensors until all are there, and would go on with those of the update that broke.
    for bucket, size in ((2, 3), (3, 4), (4, 3), (5, 4), (6, 3), (7, 4), (7, 3)):
        break_off(server, kit.Source.of(kit.make_model(tied=True, seed=330 + bucket), per_bucket=size), bucket)
        server.model = kit.make_model(tied=True, seed=340 + bucket)
        deliver_well(server, kit.Source.of(server.model))
        assert max(server.gaps()) < 1e-4


def test_the_engine_goes_on_while_its_workers_wait_for_a_trainer_that_never_comes(server: Any, kit: Any) -> None:
    buckets = [[item.model_dump() for item in bucket] for bucket in kit.Source.of(server.model).layouts]

    def load(port: int, name: str, timeout_s: float) -> Any:
        address = {"host": "127.0.0.1", "port": port, "device": None, "timeout_s": timeout_s}
        source = {"kind": "nccl", "group": {"name": name, **address}, "turn": 1, "buckets": buckets}
        return server.client.post("/reload_weights", json={"version": server.new_version(), "source": source})

    with socket.create_server(("127.0.0.1", 0)) as mute, ThreadPoolExecutor(1) as thread:
        port = mute.getsockname()[1]
        joining = thread.submit(load, port, "never", 10.0)
        connections = [mute.accept() for _ in range(2)]  # of the server, which tries the address, and of its worker
        assert len(server.generate(prompts=[[5]], n=8, sampling={"max_tokens": 20})["completions"][0]) == 8
        assert not joining.done()
        server.publish_and_load(kit.make_model(tied=True, seed=350))  # waits until they have given up
        assert (joining.result().status_code, joining.result().json()["error"]["code"]) == (409, "no_group")
        assert len(connections) == 2
    refused = load(port, "nobody listens there now", 60.0)  # is found out at once, and the workers are not even told
    assert refused.json()["error"]["code"] == "no_group"
    assert server.health()["status"] == "ready"
    assert max(server.gaps()) < 1e-4
