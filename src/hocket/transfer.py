"""Tensors in buckets over a process group of their own: the same few lines on both ends of the weight hand-over.

A bucket is one flat array of bytes, sent with a single broadcast: its tensors one after the other, each at a multiple
of 16 bytes, then their checksums. The group stands beside every other one of its process (DeepSpeed's, vLLM's), has
a deadline for every wait, and can be closed by either end at any moment. Knows nothing of models, versions or HTTP.
"""

import contextlib
import datetime
import os
import socket
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import torch
import torch.distributed as distributed
from torch import Tensor

from hocket import manifest
from hocket.errors import SyncError
from hocket.protocol import TensorLayout, TensorSpec

# torch.distributed names only some of its public classes in its type stubs.
dist: Any = distributed
Store = Any
Backend = Literal["nccl", "gloo"]
Named = Sequence[tuple[str, Tensor]]

JOINING = "joining"
"""What a rank announces that is about to connect with the others."""
_ENVIRONMENT = threading.Lock()
"""Groups are made by several threads, of which none may undo what another has set."""
_ALIGNMENT = 16
_CHECKSUM_BYTES = 8


def layout(named: Named) -> list[TensorLayout]:
    """Describes tensors, which may be on the meta device."""
    return [TensorLayout(name=name, dtype=manifest.dtype_name(t.dtype), shape=list(t.shape)) for name, t in named]


def num_bytes(bucket: Sequence[TensorLayout]) -> int:
    """Returns the length of a packed bucket."""
    return sum(_padded(item) for item in bucket) + _CHECKSUM_BYTES * len(bucket)


def pack(named: Named, device: torch.device) -> tuple[Tensor, dict[str, TensorSpec]]:
    """Returns the bucket of these tensors, uint8 [num_bytes] on `device`, and what is in it."""
    bucket = layout(named)
    flat = torch.empty(num_bytes(bucket), dtype=torch.uint8, device=device)
    specs = {name: manifest.spec(tensor) for name, tensor in named}
    for item, (_, tensor), place in zip(bucket, named, _places(bucket), strict=True):
        _view(flat, item, place).copy_(tensor)
    checksums = [_signed(specs[item.name].checksum) for item in bucket]
    _checksums(flat, len(bucket)).copy_(torch.tensor(checksums, dtype=torch.int64).view(torch.uint8))
    return flat, specs


def unpack(flat: Tensor, bucket: Sequence[TensorLayout]) -> tuple[list[tuple[str, Tensor]], dict[str, TensorSpec]]:
    """Returns the tensors of a bucket, as views of it, and their specs.

    Raises:
        SyncError: the bytes of a tensor are not those that its checksum was made of.
    """
    named = [(item.name, _view(flat, item, place)) for item, place in zip(bucket, _places(bucket), strict=True)]
    specs = {name: manifest.spec(tensor) for name, tensor in named}
    checksums = _checksums(flat, len(bucket)).cpu().clone().view(torch.int64).tolist()
    for item, checksum in zip(bucket, checksums, strict=True):
        if _signed(specs[item.name].checksum) != checksum:
            raise SyncError(f"the bytes of tensor {item.name!r} changed on their way")
    return named, specs


class WeightGroup:
    """A process group that carries weights from rank 0, the trainer, to the workers of one server.

    The constructor returns once all of them are there.

    Args:
        store: where the members find each other; rank 0 has made it (`make_store`), the others reach it (`find_store`).
        name: of this attempt, the same on all ranks and never used before.
        address: of this machine, as the others can reach it.
        timeout_s: deadline of this and of every later wait.
    """

    def __init__(
        self,
        store: Store,
        *,
        name: str,
        rank: int,
        size: int,
        backend: Backend,
        device: torch.device,
        address: str,
        timeout_s: float,
    ) -> None:
        self.name = name
        self.device = device
        self._rank = rank
        self._store = dist.PrefixStore(name, store)
        self.announce(JOINING)
        timeout = datetime.timedelta(seconds=timeout_s)
        if backend == "gloo":
            gloo = dist.ProcessGroupGloo._Options()
            gloo._timeout = timeout
            gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
            self._group = dist.ProcessGroupGloo(self._store, rank, size, gloo)
        else:
            torch.cuda.set_device(device)
            nccl = dist.ProcessGroupNCCL.Options()
            nccl._timeout = timeout
            with _blocking_waits():
                self._group = dist.ProcessGroupNCCL(self._store, rank, size, nccl)

    def announce(self, what: str) -> None:
        """Tells the others, without waiting for them, where this rank is."""
        self._store.set(f"{what}/{self._rank}", "1")

    def broadcast(self, flat: Tensor) -> None:
        """Sends rank 0's bytes to all; returns when they are there. Raises RuntimeError past the deadline."""
        group = self._group
        if group is None:
            raise RuntimeError("the group is closed")
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # which each thread has to say for itself
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        group.broadcast([flat], options).wait()

    def close(self) -> None:
        """Leaves the group; whoever waits for this rank fails at once, or as soon as a running broadcast is over."""
        group, self._group = self._group, None
        if group is not None:
            with contextlib.suppress(RuntimeError):  # it is broken already
                group.abort()


def make_store(address: str, timeout_s: float) -> Store:
    """Returns a key-value store that listens on a free port of this address only."""
    listener = socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
    timeout = datetime.timedelta(seconds=timeout_s)
    port = listener.getsockname()[1]
    return dist.TCPStore(address, port, None, True, timeout, wait_for_workers=False, master_listen_fd=listener.detach())


def find_store(host: str, port: int, timeout_s: float) -> Store:
    """Connects to a store that `make_store` has made. Raises RuntimeError past the deadline."""
    timeout = datetime.timedelta(seconds=timeout_s)
    return dist.TCPStore(host, port, None, False, timeout, wait_for_workers=False)


def announced(store: Store, name: str, what: str, ranks: Iterable[int]) -> bool:
    """Tells whether all these ranks of a group have announced something."""
    return bool(dist.PrefixStore(name, store).check([f"{what}/{rank}" for rank in ranks]))


def receiving(turn: int) -> str:
    """Names what a rank announces that is about to receive the group's transfer number `turn`."""
    return f"receiving {turn}"


def address_towards(host: str, port: int) -> str:
    """Returns this machine's own address on the way to another one; nothing is sent. Raises OSError."""
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def gpu_id(device: torch.device) -> str | None:
    """Returns what tells this GPU from every other one, None for a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None


@contextlib.contextmanager
def _blocking_waits() -> Iterator[None]:
    """Has a group that is made now raise past its deadline in the waiting thread, rather than end the process."""
    name = "TORCH_NCCL_BLOCKING_WAIT"
    with _ENVIRONMENT:
        before = os.environ.get(name)
        os.environ[name] = "1"
        try:
            yield
        finally:
            if before is None:
                del os.environ[name]
            else:
                os.environ[name] = before


def _padded(item: TensorLayout) -> int:
    size: int = torch.empty(item.shape, dtype=getattr(torch, item.dtype), device="meta").nbytes
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _places(bucket: Sequence[TensorLayout]) -> list[int]:
    places, end = [], 0
    for item in bucket:
        places.append(end)
        end += _padded(item)
    return places


def _view(flat: Tensor, item: TensorLayout, place: int) -> Tensor:
    like = torch.empty(item.shape, dtype=getattr(torch, item.dtype), device="meta")
    return flat[place : place + like.nbytes].view(like.dtype).view(like.shape)


def _checksums(flat: Tensor, count: int) -> Tensor:
    return flat[flat.numel() - _CHECKSUM_BYTES * count :]


def _signed(checksum: str) -> int:
    value = int(checksum, 16)
    return value - (1 << 64) if value >= 1 << 63 else value
