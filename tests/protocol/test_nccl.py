"""Buckets worked out by hand, and real groups over gloo between the threads of one process."""

import ipaddress
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any
from unittest.mock import DEFAULT, Mock

import psutil
import pytest
import torch

from hocket.errors import SyncError
from hocket.protocol import manifest, nccl
from support.processes import wait_for

CPU = torch.device("cpu")
BROADCAST = nccl.WeightGroup.broadcast.__code__
NAMED = [
    ("matrix", torch.arange(6, dtype=torch.float32).view(2, 3)),  # 24 bytes, 32 with padding
    ("half", torch.tensor([1.5, -2.0, 3.25], dtype=torch.bfloat16)),  # 6 bytes: 16
    ("scalar", torch.tensor(7.0)),  # 4 bytes: 16
    ("empty", torch.empty(0, 5)),  # none
    ("turned", torch.arange(4, dtype=torch.float16).view(2, 2).t()),  # 8 bytes, not in the order of memory: 16
]


def test_what_is_packed_is_unpacked_bit_by_bit_with_the_specs_of_both_ends_alike() -> None:
    layout = nccl.layout(NAMED)
    assert nccl.layout([(name, tensor.to("meta")) for name, tensor in NAMED]) == layout  # it needs no data
    flat, sent = nccl.pack(NAMED, CPU)
    # Each tensor at a multiple of 16 bytes, in the order of its elements, and then a checksum each.
    assert (flat.dtype, len(flat)) == (torch.uint8, nccl.num_bytes(layout))
    assert len(flat) == 32 + 16 + 16 + 0 + 16 + 5 * 8
    assert flat[64:72].view(torch.float16).tolist() == [0, 2, 1, 3]
    checksums = [int(manifest.tensor_checksum(tensor), 16) for _, tensor in NAMED]
    assert [value % 2**64 for value in flat[80:].view(torch.int64).tolist()] == checksums
    named, received = nccl.unpack(flat, layout)
    assert received == sent == {name: manifest.spec(tensor) for name, tensor in NAMED}
    for (name, tensor), (wanted_name, wanted) in zip(named, NAMED, strict=True):
        assert (name, tensor.dtype, tensor.shape) == (wanted_name, wanted.dtype, wanted.shape)
        assert torch.equal(tensor, wanted)
    assert named[0][1].data_ptr() == flat.data_ptr()  # a view: nothing is copied


@pytest.mark.parametrize(
    ("place", "name"),
    [(0, "matrix"), (23, "matrix"), (37, "half"), (51, "scalar"), (65, "turned"), (80, "matrix")],  # 80: its checksum
)
def test_a_flipped_byte_is_found_and_its_tensor_named(place: int, name: str) -> None:
    flat, _ = nccl.pack(NAMED, CPU)
    flat[place] ^= 0xFF
    with pytest.raises(SyncError, match=f"the bytes of tensor '{name}' changed on their way"):
        nccl.unpack(flat, nccl.layout(NAMED))


def join(store: Any, rank: int, timeout_s: float = 10.0, size: int = 2) -> nccl.WeightGroup:
    return nccl.WeightGroup(store, "g", CPU, "127.0.0.1", rank=rank, size=size, timeout_s=timeout_s)


def joined(store: Any, size: int = 2, timeout_s: float = 10.0) -> list[nccl.WeightGroup]:
    """Returns the groups of all ranks, each as in a process of its own: with its own connection to the store."""
    stores = [store, *(nccl.find_store("127.0.0.1", store.port, 10) for _ in range(1, size))]
    with ThreadPoolExecutor(size) as threads:
        joining = [threads.submit(join, stores[rank], rank, timeout_s, size) for rank in range(size)]
        return [group.result(30) for group in joining]


def started(call: Callable[..., Any], *arguments: Any) -> "Future[Any]":
    """Runs a call in a daemon thread: should it hang, the test fails and does not hang."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(call(*arguments))
        except BaseException as error:  # noqa: BLE001 - it is the future's
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def test_every_member_receives_what_rank_0_sends_and_what_all_announce() -> None:
    store = nccl.make_store("127.0.0.1", 10)
    assert not nccl.announced(store, "g", 0, [1])  # without waiting
    groups = joined(store, size=3)
    groups[1].announce(1)
    wait_for(lambda: nccl.announced(store, "g", 1, [1]), "what was sent through another connection")
    for name, number, ranks in (("g", 0, [1, 2, 3]), ("other", 0, [1]), ("g", 1, [1, 2]), ("g", 2, [1])):
        assert not nccl.announced(store, name, number, ranks)
    assert nccl.announced(store, "g", 0, [0, 1, 2])
    flat, specs = nccl.pack(NAMED, CPU)
    for _ in range(2):
        received = [torch.empty_like(flat) for _ in groups[1:]]
        waiting = [started(group.broadcast, empty) for group, empty in zip(groups[1:], received, strict=True)]
        groups[0].broadcast(flat)
        for done, copy in zip(waiting, received, strict=True):
            done.result(10)
            assert nccl.unpack(copy, nccl.layout(NAMED))[1] == specs
    for group in groups:
        group.close()
        group.close()  # which is no error


@pytest.mark.parametrize(("waits", "leave"), [(1, [0]), (0, [1]), (1, [1, 0])])
def test_whoever_waits_for_a_member_that_leaves_fails_at_once_and_can_leave_itself(
    waits: int, leave: list[int]
) -> None:
    groups = joined(nccl.make_store("127.0.0.1", 10), timeout_s=120.0)
    waiting = started(groups[waits].broadcast, torch.empty(64 << 20, dtype=torch.uint8))
    wait_for(lambda: BROADCAST in [frame.f_code for frame in sys._current_frames().values()], "it waits")
    for leaving in [started(groups[rank].close) for rank in leave]:
        leaving.result(5)
    with pytest.raises(RuntimeError):
        waiting.result(30)  # far less than the deadline
    with pytest.raises(RuntimeError, match="the group is closed"):
        groups[leave[0]].broadcast(torch.empty(16, dtype=torch.uint8))


@pytest.mark.parametrize("wait", ["to send", "to receive", "to join", "for a store"])
def test_whoever_does_not_come_is_waited_for_until_the_deadline_and_no_longer(wait: str) -> None:
    store = nccl.make_store("127.0.0.1", 10)
    groups = joined(store, timeout_s=1.0)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    lonely = nccl.make_store("127.0.0.1", 1.0)
    large = torch.empty(64 << 20, dtype=torch.uint8)  # more than sockets buffer, or a sender would have ended already
    calls: dict[str, tuple[Any, ...]] = {
        "to send": (groups[0].broadcast, large),
        "to receive": (groups[1].broadcast, large),
        "to join": (join, lonely, 0, 1.0),
        "for a store": (nccl.find_store, "127.0.0.1", port, 1.0),
    }
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=r"(?i)timed? ?out"):
        started(*calls[wait]).result(30)
    assert time.monotonic() - start > 0.9


def test_store_and_group_listen_on_the_given_address_only() -> None:
    store = nccl.make_store("127.0.0.1", 10)
    groups = joined(store)
    listening = [c.laddr for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    assert nccl.address_towards("127.0.0.1", store.port) == "127.0.0.1"
    assert store.port in {address.port for address in listening}
    assert len(listening) >= 3  # the store, and one of each rank
    assert {ipaddress.ip_address(address.ip).is_loopback for address in listening} == {True}
    for group in groups:
        group.close()


BLOCKING = "TORCH_NCCL_BLOCKING_WAIT"


@pytest.mark.parametrize("before", [None, "0"])
def test_over_nccl_a_group_connects_as_it_is_made_and_not_without_a_deadline(
    before: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # torch for CPUs has no NCCL: this holds what it is asked for. tests/e2e/test_gpu.py has the real one.
    monkeypatch.setattr(nccl, "dist", dist := Mock())
    for name in ("set_device", "is_available"):
        monkeypatch.setattr(torch.cuda, name, Mock())
    monkeypatch.setattr(torch, "zeros", lambda *_, **options: options["device"])
    blocking = list[str | None]()
    dist.ProcessGroupNCCL.side_effect = lambda *_: blocking.append(os.environ.get(BLOCKING)) or DEFAULT
    if before is None:
        monkeypatch.delenv(BLOCKING, raising=False)
    else:
        monkeypatch.setenv(BLOCKING, before)
    device = torch.device("cuda", 0)
    group = nccl.WeightGroup(Mock(), "a", device, "10.0.0.1", rank=0, size=2, timeout_s=2.5)
    made = dist.ProcessGroupNCCL
    assert made.Options.return_value.config.blocking == 0
    assert made.Options.return_value._timeout.total_seconds() == 2.5
    assert (blocking, os.environ.get(BLOCKING)) == (["1"], before)
    (sent, _), _ = made.return_value.broadcast.call_args
    assert sent == [device]
    made.return_value.broadcast.return_value.wait.assert_called_once_with()
    group.close()
