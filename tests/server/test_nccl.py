"""Weights straight from memory into a running server's engine: right to the last tensor, and never wedged by a failure.

The trainer's side is the real CollectiveTransport, fed from a transformers model.
"""

import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from hocket.errors import HocketError
from hocket.protocol import ReloadResponse
from support.engines import Adapter, Source, error_of, make_experts, make_model
from support.tiny_server import TinyServer, adapters_come_and_are_used, load_amid_requests

pytestmark = pytest.mark.engine


def deliver_well(server: TinyServer, source: Source, *settings: str) -> Any:
    """Loads, and compares what the workers then compute with, from a second broadcast; returns the delivery."""
    delivery = server.deliver(source, *settings, compare=True)
    ((checksum, answer),) = delivery.answers.values()
    assert isinstance(answer, ReloadResponse), answer
    assert (answer.version, answer.checksum) == (server.next_version - 1, checksum)
    return delivery


@pytest.mark.long
def test_experts_travel_under_the_names_of_their_checkpoint(servers: Any) -> None:
    server = servers("experts float32")
    server.model = make_experts(seed=9)
    deliver_well(server, Source.of(server.model))
    server.assert_is()


def break_off(server: TinyServer, source: Source, bucket: int) -> None:
    """Loses the trainer before a bucket, as the kernel closes a killed one's connections."""
    source.before = lambda number: source.transport.close() if number == bucket else None
    ((_, answer),) = server.deliver(source).answers.values()
    assert isinstance(answer, HocketError)
    server.wait_until(lambda health: health["status"] == "failed")


@pytest.mark.long
def test_both_workers_of_a_tensor_parallel_engine_receive_adapters_and_after_a_failure_weights(servers: Any) -> None:
    server = servers.take("parallel float32 lora")

    def load(adapter: Adapter) -> ReloadResponse:
        delivery = deliver_well(server, Source(adapter.tensors.items(), adapter=adapter.config))
        # The adapter alone: A and B of rank 4 in both blocks, and at most 24 bytes of padding and checksum per tensor.
        numbers = sum(tensor.numel() for tensor in adapter.tensors.values())
        sent = delivery.metrics["sync/mebibytes"] * 2**20
        assert 4 * numbers <= sent <= 4 * numbers + 24 * len(adapter.tensors)
        ((_, answer),) = delivery.answers.values()
        return answer  # type: ignore[no-any-return]

    try:
        assert server.health()["workers"] == 2
        adapters_come_and_are_used(server, load)
        break_off(server, Source.of(make_model(seed=405)), bucket=3)
        new = make_model(seed=305)
        deliver_well(server, Source.of(new))
        server.assert_is(new)
        server.assert_is_not(server.model)
        # By disk, too: each worker reads its part.
        version = server.publish_and_load(make_model(seed=307)).version
        server.assert_is()
        server.assert_compares(version)
    finally:
        server.stop()  # its workers never rest: tests after it would take twice as long


@pytest.mark.long
@pytest.mark.parametrize("in_flight", ["keep", "drain", "abort"])
def test_requests_in_flight_are_kept_drained_or_aborted(server: TinyServer, in_flight: str) -> None:
    def load(seed: int) -> Any:
        server.model = make_model(seed=seed)
        deliver_well(server, Source.of(server.model), f"sync.in_flight={in_flight}")
        return server.model

    load_amid_requests(server, server.model, load, in_flight=in_flight)
    server.assert_is()


@pytest.mark.long
def test_whatever_a_vanished_trainer_leaves_half_loaded_the_next_update_is_whole(server: TinyServer) -> None:
    # vLLM collects a layer's tensors until all are there, and would go on with those of the update that broke.
    for bucket, size in ((2, 3), (3, 4), (4, 3), (5, 4), (6, 3), (7, 4), (7, 3)):
        break_off(server, Source.of(make_model(seed=330 + bucket), per_bucket=size), bucket)
        server.model = make_model(seed=340 + bucket)
        deliver_well(server, Source.of(server.model))
        server.assert_is()


@pytest.mark.long
def test_the_engine_goes_on_while_its_workers_wait_for_a_trainer_that_never_comes(server: TinyServer) -> None:
    buckets = [[item.model_dump() for item in bucket] for bucket in Source.of(server.model).layouts]

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
        server.publish_and_load(make_model(seed=350))  # waits until they have given up
        assert error_of(joining.result()) == (409, "no_group")
        assert len(connections) == 2
    refused = load(port, "nobody listens there now", 60.0)  # is found out at once, and the workers are not even told
    assert error_of(refused) == (409, "no_group")
    assert server.health()["status"] == "ready"
    server.assert_is()
