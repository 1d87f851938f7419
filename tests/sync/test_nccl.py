"""The collective transport against the real receiving half of a worker, over gloo, without an engine or HTTP."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from hocket import config as config_module
from hocket.errors import ServerError, TrainerError
from hocket.protocol import CollectiveSource, GroupAddress, ReloadRequest, ReloadResponse, manifest, nccl
from hocket.server import vllm_weights
from hocket.server.worker import WorkerExtension
from hocket.sync.nccl import CollectiveTransport
from hocket.sync.transports import Answer
from support.servers import FakeServer
from support.weights import FakeTrainer

BUCKETS = (
    {"a": torch.arange(4 << 20, dtype=torch.float32).view(2, -1)},  # more than a socket buffers
    {"b": torch.tensor([1.5, -2.0, 3.0], dtype=torch.bfloat16), "c": torch.tensor(7.0)},
    {"d": torch.ones(5, 3, dtype=torch.float16).t(), "e": torch.empty(0, 2)},
)
TENSORS = FakeTrainer(*BUCKETS).weights
CHECKSUM = manifest.total_checksum(manifest.specs(TENSORS.items()))
# 16 MiB and a checksum; 16 + 16 bytes and two; 32 + 0 and two.
NUM_BYTES = (16 << 20) + 8 + 32 + 16 + 32 + 16


class Worker(WorkerExtension):
    """One process of an engine; its model is a dict."""

    def __init__(self, rank: int) -> None:
        self.rank, self.device = rank, torch.device("cpu")
        self.model: dict[str, Tensor] = {}
        self.fails_at: str | None = None

    def load(self, weights: Iterator[tuple[str, Tensor]], adapter: None) -> None:
        for name, tensor in weights:
            if name == self.fails_at:
                raise ValueError(f"no memory is left for {name}")
            self.model[name] = tensor.clone()


class GroupServer(FakeServer):
    """Loads what its workers receive in a group, with the deadline and the errors of a real server."""

    def __init__(self, number: int = 1, workers: int = 1) -> None:
        super().__init__(f"http://127.0.0.1:{number}")
        self.processes, self.workers = [Worker(rank) for rank in range(workers)], workers
        self.stopped: str | None = None  # nothing answers; "receiving": once it has said that it is about to receive

    @property
    def joins(self) -> int:
        """In how many groups it was."""
        return len({request.source.group.name for request in self.requests})

    async def reload(self, request: ReloadRequest, timeout_s: float) -> ReloadResponse:
        assert isinstance(request.source, CollectiveSource)
        message = request.source.model_dump_json()
        address, size = request.source.group.model_dump_json(), 1 + self.workers
        try:
            async with asyncio.timeout(timeout_s):
                while False in [value_of(worker.hocket_join_group, address, size) for worker in self.processes]:
                    await asyncio.sleep(0.01)
                if self.stopped is not None:
                    for group in (worker.hocket_group for worker in self.processes if self.stopped == "receiving"):
                        assert group is not None
                        group[1].result().announce(request.source.turn)
                    await asyncio.Event().wait()
                loading = [asyncio.to_thread(value_of, worker.hocket_load_group, message) for worker in self.processes]
                answers = await asyncio.gather(*loading)
        except TimeoutError:
            raise ServerError(f"{self.url}/reload_weights did not finish in {timeout_s:g} s", code="timeout") from None
        except Exception as error:
            raise ServerError(f"{self.url}: loading failed: {error}", code="reload_failed", status=500) from error
        assert all(answer == answers[0] and answer["different"] == [] for answer in answers)
        loaded = {name: answers[0][name] for name in ("checksum", "num_tensors")}
        return ReloadResponse(version=request.version, seconds=0.1, session=self.session, **loaded)


def value_of(method: Any, *arguments: Any) -> Any:
    """What the engine makes of a worker's answer."""
    answer = method(*arguments)
    if "error" in answer:
        raise RuntimeError(answer["error"])
    return answer["value"]


@pytest.fixture(autouse=True)
def model_is_a_dict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_weights, "load", Worker.load)


def make(timeout_s: float = 400.0, **options: Any) -> tuple[FakeTrainer, CollectiveTransport]:
    """Returns a transport whose deadlines are far beyond that of `deliver`: what must not wait for them does not."""
    config = config_module.load(None, [f"sync.timeout_s={timeout_s}"])
    trainer: Any = FakeTrainer(*BUCKETS)
    return trainer, CollectiveTransport(trainer, config.sync, **options)


async def deliver(
    transport: CollectiveTransport,
    version: int,
    *servers: GroupServer,
    compare: bool = False,
    num_bytes: int = NUM_BYTES,
) -> list[Answer]:
    """Delivers so many bytes; the checksum is of all weights, in any case."""
    async with asyncio.timeout(60):
        delivery = await transport.deliver(version, servers, compare=compare)  # type: ignore[arg-type]
    assert delivery.metrics["sync/mebibytes"] * 2**20 == num_bytes
    assert [checksum for checksum, _ in delivery.answers.values()] == [CHECKSUM] * len(servers)
    return [answer for _, answer in delivery.answers.values()]


def assert_holds(server: GroupServer, answer: Answer, version: int) -> None:
    assert isinstance(answer, ReloadResponse), answer
    assert (answer.version, answer.checksum, answer.num_tensors) == (version, CHECKSUM, 5)
    for worker in server.processes:
        assert worker.model.keys() == TENSORS.keys()
        for name, tensor in TENSORS.items():
            assert worker.model[name].dtype == tensor.dtype
            assert torch.equal(worker.model[name], tensor)
        worker.model.clear()


async def test_every_worker_of_every_server_gets_every_tensor_bit_by_bit() -> None:
    _, transport = make()
    servers = [GroupServer(1), GroupServer(2, workers=2)]
    for version in (1, 2, 3):
        for server, answer in zip(servers, await deliver(transport, version, *servers), strict=True):
            assert_holds(server, answer, version)
    for server in servers:
        assert server.joins == 1  # one group for all versions
        assert [request.source.turn for request in server.requests] == [1, 2, 3]
        names = [[item.name for item in bucket] for bucket in server.requests[0].source.buckets]
        assert names == [["a"], ["b", "c"], ["d", "e"]]


@pytest.mark.long
def test_a_worker_that_is_still_joining_does_not_keep_its_process_from_ending() -> None:
    store = nccl.make_store("127.0.0.1", 60)  # nobody else joins
    address = GroupAddress(host="127.0.0.1", port=store.port, name="g", device=None, timeout_s=600)
    code = f"""
import torch
from hocket.server.worker import WorkerExtension

worker = WorkerExtension()
worker.rank, worker.device = 0, torch.device("cpu")
print(worker.hocket_join_group({address.model_dump_json()!r}, 2), flush=True)
"""
    environment = {**os.environ, "PYTHONPATH": "src"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout == "{'value': False}\n", done.stderr


async def test_a_server_that_was_started_again_is_joined_again() -> None:
    _, transport = make()
    server = GroupServer()
    await deliver(transport, 1, server)
    server.processes, server.session = [Worker(0)], "s2"
    [answer] = await deliver(transport, 2, server)
    assert_holds(server, answer, 2)
    assert server.joins == 2
    assert server.requests[1].source.turn == 1


async def test_the_group_of_a_server_that_has_left_is_left() -> None:
    _, transport = make()
    leaves, stays = GroupServer(1), GroupServer(2)
    await deliver(transport, 1, leaves, stays)
    [group] = [link.group for server, link in transport._links.items() if server.url == leaves.url]
    leaves.is_closed = True
    stays.processes[0].model.clear()
    [answer] = await deliver(transport, 2, stays)
    assert_holds(stays, answer, 2)
    assert group._group is None
    assert [server.url for server in transport._links] == [stays.url]


@pytest.mark.parametrize(("asked", "joins"), [("health", 1), ("reload", 2)])
async def test_a_server_s_error_is_its_answer_at_once_and_disturbs_no_other(asked: str, joins: int) -> None:
    _, transport = make()
    server, other = GroupServer(1), GroupServer(2)
    server.errors = {asked: ServerError("the reason", code="no_group", status=503)}
    error, answer = await deliver(transport, 1, server, other)
    assert error is server.errors[asked]
    assert_holds(other, answer, 1)
    server.errors.clear()
    assert_holds(server, (await deliver(transport, 2, server))[0], 2)
    assert server.joins == joins  # both ends begin again


@pytest.mark.parametrize("tensor", ["a", "b", "e"])
async def test_a_server_that_fails_while_it_receives_says_why_at_once_and_disturbs_no_other(tensor: str) -> None:
    _, transport = make()
    server, other = GroupServer(1), GroupServer(2)
    server.processes[0].fails_at = tensor
    error, answer = await deliver(transport, 1, server, other)
    assert f"no memory is left for {tensor}" in str(error)
    assert_holds(other, answer, 1)
    server.processes[0].fails_at = None
    assert_holds(server, (await deliver(transport, 2, server))[0], 2)
    assert server.joins == 2


@pytest.mark.long
async def test_servers_that_stop_are_named_with_bucket_and_version_and_cost_no_other_its_deadline() -> None:
    _, transport = make(timeout_s=4)
    receiving, silent, other = GroupServer(1), GroupServer(2), GroupServer(3)
    await deliver(transport, 11, receiving, silent, other)
    other.processes[0].model.clear()
    receiving.stopped, silent.stopped = "receiving", "at once"
    first, second, third = await deliver(transport, 12, receiving, silent, other)
    assert "server http://127.0.0.1:1 did not take bucket 1/3 of version 12: 1 s passed; is it stopped?" in str(first)
    assert "/reload_weights did not finish" in str(first)
    assert "server http://127.0.0.1:2 did not begin to receive version 12 in 2 s" in str(second)
    assert "http://127.0.0.1:2/reload_weights did not finish in 4 s" in str(second)
    assert_holds(other, third, 12)


async def test_weights_that_can_not_be_gathered_are_an_error_and_no_server_is_left_waiting() -> None:
    trainer, transport = make()
    server = GroupServer()
    trainer.failures = [TrainerError("a rank has gone")]
    with pytest.raises(TrainerError, match="a rank has gone"):
        await deliver(transport, 1, server)
    async with asyncio.timeout(60):  # far less than the deadline
        while any(worker.hocket_group is not None for worker in server.processes):  # each has noticed, and left
            await asyncio.sleep(0.05)
    assert_holds(server, (await deliver(transport, 2, server))[0], 2)
    assert server.joins == 2


async def test_frozen_weights_go_once_to_each_server_and_all_are_compared() -> None:
    trainer, transport = make(freezes=True)
    trainer.num_trained = 1
    first, second = GroupServer(1), GroupServer(2)
    trained = (16 << 20) + 8
    for servers, compare, num_bytes in (
        ((first,), False, NUM_BYTES),
        ((first,), False, trained),
        ((first,), True, NUM_BYTES),
        ((first, second), False, NUM_BYTES),  # one has just come
        ((first, second), False, trained),
    ):
        for answer in await deliver(transport, 9, *servers, compare=compare, num_bytes=num_bytes):
            assert isinstance(answer, ReloadResponse)
            assert (answer.checksum, answer.num_tensors) == (CHECKSUM, 5)
        assert [server.requests[-1].source.partial for server in servers] == [num_bytes == trained] * len(servers)
    second.processes[0].hocket_held = {}  # as after a load that failed
    answers = await deliver(transport, 9, first, second, num_bytes=trained)
    assert isinstance(answers[0], ReloadResponse)
    assert "holds no version in full" in str(answers[1])
    await deliver(transport, 9, first, second)
    transport.close()
