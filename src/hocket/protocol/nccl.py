"""Broadcast tensors in buckets over a process group of their own.

A bucket is one array of bytes: its tensors, each at a multiple of 16, then their checksums. Every wait has a deadline,
and either end can close the group at any moment.
"""

import contextlib
import dataclasses
import datetime
import os
import re
import socket
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as distributed
from torch import Tensor

from hocket.common.machine import family_of
from hocket.errors import SyncError, cause_of
from hocket.protocol import TensorLayout, TensorSpec, manifest

dist: Any = distributed  # its type stubs lack some public classes
Store = Any
Named = Sequence[tuple[str, Tensor]]
BucketPart = tuple[Named, dict[str, TensorSpec]]

BUCKET_BYTES = 256 << 20  # of a bucket, about
_BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"
_ENVIRONMENT = threading.Lock()  # groups are made in several threads
_ALIGNMENT = 16
_CHECKSUM_BYTES = 8


def layout(named: Named) -> list[TensorLayout]:
    return [
        TensorLayout(name=name, dtype=manifest.dtype_name(t.dtype), shape=list(t.shape))
        for name, t in named
    ]


def num_bytes(bucket: Sequence[TensorLayout]) -> int:
    return sum(map(_padded, bucket)) + _CHECKSUM_BYTES * len(bucket)


def pack(named: Named, device: torch.device) -> tuple[Tensor, dict[str, TensorSpec]]:
    """Return the bucket of these tensors, uint8 [num_bytes] on `device`, and their specs."""
    bucket = layout(named)
    flat = torch.empty(num_bytes(bucket), dtype=torch.uint8, device=device)
    views, checksums = _views(flat, bucket)
    for (_, view), (_, tensor) in zip(views, named, strict=True):
        view.copy_(tensor)
    specs = {name: manifest.spec(tensor) for name, tensor in named}
    checksums.copy_(_numbers(specs))
    return flat, specs


def unpack(flat: Tensor, bucket: Sequence[TensorLayout]) -> BucketPart:
    """Return a bucket's tensors, views of it, and their specs. Raises SyncError where a checksum differs."""
    named, checksums = _views(flat, bucket)
    specs = {name: manifest.spec(tensor) for name, tensor in named}
    changed = (checksums.cpu() != _numbers(specs)).nonzero()
    if len(changed):
        raise SyncError(f"the bytes of tensor {named[int(changed[0])][0]!r} changed on their way")
    return named, specs


def _numbers(specs: dict[str, TensorSpec]) -> Tensor:
    """Return the checksums, int64 [n]."""
    return torch.tensor(
        [int(spec.checksum, 16) for spec in specs.values()], dtype=torch.uint64
    ).view(torch.int64)


@dataclasses.dataclass(eq=False)
class WeightGroup:
    """Rank 0, the trainer, and a server's workers; the constructor waits until all have joined."""

    store: Store  # from make_store on rank 0, or find_store
    name: str  # never used before
    device: torch.device
    address: str  # of this machine, as the others can reach it
    _: dataclasses.KW_ONLY
    rank: int
    size: int
    timeout_s: float  # of joining, and of every later wait

    def __post_init__(self) -> None:
        self._own_store = dist.PrefixStore(self.name, self.store)
        self.announce(0)
        timeout = datetime.timedelta(seconds=self.timeout_s)
        if self.device.type == "cpu":
            gloo = dist.ProcessGroupGloo._Options()
            gloo._timeout = timeout
            gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=self.address)]
            self._group = dist.ProcessGroupGloo(self._own_store, self.rank, self.size, gloo)
        else:
            torch.cuda.set_device(self.device)
            nccl = dist.ProcessGroupNCCL.Options()
            nccl._timeout = timeout
            nccl.config.blocking = 0  # else it waits for ever for a rank that is gone
            # Else NCCL's watchdog ends the process past a deadline.
            with _ENVIRONMENT:
                before = os.environ.get(_BLOCKING_WAIT)
                os.environ[_BLOCKING_WAIT] = "1"
                try:
                    self._group = dist.ProcessGroupNCCL(self._own_store, self.rank, self.size, nccl)
                finally:
                    del os.environ[_BLOCKING_WAIT]
                    if before is not None:
                        os.environ[_BLOCKING_WAIT] = before
            try:
                self.broadcast(
                    torch.zeros(1, dtype=torch.uint8, device=self.device)
                )  # NCCL connects no earlier
            except BaseException:
                self.close()
                raise

    def announce(self, number: int) -> None:
        """Announce that this rank is about to receive transfer `number`; 0: to join."""
        self._own_store.set(
            f"transfer {number}/{self.rank}", "1"
        )  # the group's own keys begin with numbers

    def broadcast(self, flat: Tensor) -> None:
        """Send rank 0's bytes to all. Raises RuntimeError past the deadline."""
        group = self._group
        if group is None:
            raise RuntimeError("the group is closed")
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # a setting of each thread
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        group.broadcast([flat], options).wait()

    def close(self) -> None:
        """Leave the group: ranks that wait for this one fail."""
        group, self._group = self._group, None
        if group is not None:
            with contextlib.suppress(RuntimeError):  # it is broken already
                group.abort()


def make_store(address: str, timeout_s: float) -> Store:
    """Return a key-value store on a free port of this address."""
    listener = socket.create_server((address, 0), family=family_of(address))
    timeout = datetime.timedelta(seconds=timeout_s)
    port = listener.getsockname()[1]
    return dist.TCPStore(
        address,
        port,
        None,
        True,
        timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def find_store(host: str, port: int, timeout_s: float) -> Store:
    """Connect to the store of rank 0. Raises RuntimeError past the deadline."""
    timeout = datetime.timedelta(seconds=timeout_s)
    return dist.TCPStore(host, port, None, False, timeout, wait_for_workers=False)


def announced(store: Store, name: str, number: int, ranks: Iterable[int]) -> bool:
    return bool(
        dist.PrefixStore(name, store).check([f"transfer {number}/{rank}" for rank in ranks])
    )


def address_towards(host: str, port: int) -> str:
    """Return this machine's address towards another; nothing is sent. Raises OSError."""
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def why_broken(error: Exception) -> str:
    """Return the cause without the place in gloo's source with which it begins, and the joke at its end."""
    return re.sub(r"^\[.*?\] *|\. .*", "", cause_of(error))


def gpu_id(device: torch.device) -> str | None:
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None


def _padded(item: TensorLayout) -> int:
    return -(-_empty(item).nbytes // _ALIGNMENT) * _ALIGNMENT


def _empty(item: TensorLayout) -> Tensor:
    return torch.empty(item.shape, dtype=getattr(torch, item.dtype), device="meta")


def _views(flat: Tensor, bucket: Sequence[TensorLayout]) -> tuple[list[tuple[str, Tensor]], Tensor]:
    """Return a bucket's tensors and checksums, int64 [n], as views of it."""
    *parts, checksums = torch.split(flat, [*map(_padded, bucket), _CHECKSUM_BYTES * len(bucket)])
    named = []
    for item, part in zip(bucket, parts, strict=True):
        empty = _empty(item)
        named.append((item.name, part[: empty.nbytes].view(empty.dtype).view(empty.shape)))
    return named, checksums.view(torch.int64)
