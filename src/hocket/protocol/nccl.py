"""Broadcast tensors in buckets over a process group of their own.

A bucket is one array of bytes: its tensors, each at a multiple of 16, then their checksums. Every
wait has a deadline, and either end can close the group at any moment.
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
Store = Any  # a torch.distributed.Store
Named = Sequence[tuple[str, Tensor]]  # tensors with their names
BucketPart = tuple[Named, dict[str, TensorSpec]]  # the tensors of a bucket, and their specs by name

BUCKET_BYTES = 256 << 20  # the size that a bucket has, about
_BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"
_ENVIRONMENT = threading.Lock()  # held while os.environ is changed: threads make groups at once
_ALIGNMENT = 16  # bytes; a multiple of every dtype's size
_CHECKSUM_BYTES = 8


def layout(named: Named) -> list[TensorLayout]:
    """Describe a bucket of these tensors, in their order."""
    items = []
    for name, tensor in named:
        dtype = manifest.dtype_name(tensor.dtype)
        items.append(TensorLayout(name=name, dtype=dtype, shape=list(tensor.shape)))
    return items


def num_bytes(bucket: Sequence[TensorLayout]) -> int:
    """Compute the size of a bucket."""
    return sum(map(_padded_bytes, bucket)) + _CHECKSUM_BYTES * len(bucket)


def pack(named: Named, device: torch.device) -> tuple[Tensor, dict[str, TensorSpec]]:
    """Copy tensors into a bucket, uint8 [num_bytes] on `device`; return it, and their specs.

    The checksums are of the tensors, not of the copies, so that a faulty copy is noticed.
    """
    bucket = layout(named)
    flat = torch.empty(num_bytes(bucket), dtype=torch.uint8, device=device)
    views, checksums = _views(flat, bucket)
    for (_, view), (_, tensor) in zip(views, named, strict=True):
        view.copy_(tensor)
    specs = {name: manifest.spec(tensor) for name, tensor in named}
    checksums.copy_(_checksum_words(specs))
    return flat, specs


def unpack(flat: Tensor, bucket: Sequence[TensorLayout]) -> BucketPart:
    """Read a bucket: its tensors, as views of it, and their specs.

    Raises SyncError where the bytes of a tensor do not have the checksum that came with them.
    """
    named, checksums = _views(flat, bucket)
    specs = {name: manifest.spec(tensor) for name, tensor in named}
    changed = (checksums.cpu() != _checksum_words(specs)).nonzero()
    if len(changed):
        name, _ = named[int(changed[0])]
        raise SyncError(f"the bytes of tensor {name!r} changed on their way")
    return named, specs


def _checksum_words(specs: dict[str, TensorSpec]) -> Tensor:
    """Convert checksums from hexadecimal digits to the words of a bucket, int64 [n]."""
    words = [int(spec.checksum, 16) for spec in specs.values()]
    return torch.tensor(words, dtype=torch.uint64).view(torch.int64)


@dataclasses.dataclass(eq=False)
class WeightGroup:
    """A process group of the trainer, which is rank 0, and a server's workers.

    The constructor waits until all ranks have joined. On CPUs the group is gloo's, else NCCL's.
    Each rank makes its own, and then all call the same broadcasts in the same order:

        store = make_store(address, timeout_s)  # on rank 0; elsewhere find_store(host, port, ...)
        group = WeightGroup(store, "weights 1", device, address, rank=0, size=2, timeout_s=60.0)
        group.broadcast(flat)
        group.close()
    """

    store: Store  # from make_store on rank 0, or find_store
    name: str  # a name that no earlier group of this store has had
    device: torch.device
    address: str  # this machine's address, as the others can reach it
    _: dataclasses.KW_ONLY
    rank: int
    size: int  # number of ranks
    timeout_s: float  # deadline of joining, and of every later wait

    def __post_init__(self) -> None:
        self._prefix_store = dist.PrefixStore(self.name, self.store)
        self.announce(0)
        if self.device.type == "cpu":
            self._group = self._join_gloo()
            return
        self._group = self._join_nccl()
        try:
            # NCCL does not connect before the first broadcast.
            self.broadcast(torch.zeros(1, dtype=torch.uint8, device=self.device))
        except BaseException:
            self.close()
            raise

    def _join_gloo(self) -> Any:
        options = dist.ProcessGroupGloo._Options()
        options._timeout = datetime.timedelta(seconds=self.timeout_s)
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=self.address)]
        return dist.ProcessGroupGloo(self._prefix_store, self.rank, self.size, options)

    def _join_nccl(self) -> Any:
        torch.cuda.set_device(self.device)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = datetime.timedelta(seconds=self.timeout_s)
        options.config.blocking = 0  # else NCCL waits for ever for a rank that is gone
        # The group reads this variable as it is made. Without it, NCCL's watchdog would end the
        # whole process past a deadline, in place of an error in the thread that waits.
        with _ENVIRONMENT:
            before = os.environ.get(_BLOCKING_WAIT)
            os.environ[_BLOCKING_WAIT] = "1"
            try:
                return dist.ProcessGroupNCCL(self._prefix_store, self.rank, self.size, options)
            finally:
                del os.environ[_BLOCKING_WAIT]
                if before is not None:
                    os.environ[_BLOCKING_WAIT] = before

    def announce(self, number: int) -> None:
        """Announce that this rank is about to receive transfer `number`; 0: to join."""
        # The word keeps these keys apart from those of the group itself, which begin with numbers.
        self._prefix_store.set(_announcement(number, self.rank), "1")

    def broadcast(self, flat: Tensor) -> None:
        """Send rank 0's bytes to all. Raises RuntimeError past the deadline."""
        group = self._group
        if group is None:
            raise RuntimeError("the group is closed")
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # each thread has its own current device
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        group.broadcast([flat], options).wait()

    def close(self) -> None:
        """Leave the group, once or again: ranks that wait for this one fail."""
        group, self._group = self._group, None
        if group is not None:
            with contextlib.suppress(RuntimeError):  # the group is broken already
                group.abort()


def _announcement(number: int, rank: int) -> str:
    """Name the key by which a rank announces a transfer."""
    return f"transfer {number}/{rank}"


def make_store(address: str, timeout_s: float) -> Store:
    """Serve a key-value store on a free port of this address."""
    # The socket is made here, since a TCPStore's own would listen on all addresses.
    listener = socket.create_server((address, 0), family=family_of(address))
    timeout = datetime.timedelta(seconds=timeout_s)
    port = listener.getsockname()[1]
    return dist.TCPStore(
        address,
        port,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def find_store(host: str, port: int, timeout_s: float) -> Store:
    """Connect to the store of rank 0. Raises RuntimeError past the deadline."""
    timeout = datetime.timedelta(seconds=timeout_s)
    return dist.TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False)


def announced(store: Store, name: str, number: int, ranks: Iterable[int]) -> bool:
    """Check, without waiting, whether all these ranks of group `name` announced a transfer."""
    keys = [_announcement(number, rank) for rank in ranks]
    return bool(dist.PrefixStore(name, store).check(keys))


def address_towards(host: str, port: int) -> str:
    """Find the address by which another machine reaches this one. Raises OSError."""
    # Connecting a datagram socket chooses the route to the other machine, and sends nothing.
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def why_broken(error: Exception) -> str:
    """Shorten an error of a group to the first sentence of its cause: torch's end with a joke."""
    cause = re.sub(r"^\[.*?\] *", "", cause_of(error))  # gloo's begin with a place in its source
    return cause.partition(". ")[0]


def gpu_id(device: torch.device) -> str | None:
    """Identify a GPU by its UUID, the same in all processes; None for a CPU."""
    if device.type != "cuda":
        return None
    return str(torch.cuda.get_device_properties(device).uuid)


def _padded_bytes(item: TensorLayout) -> int:
    """Round a tensor's size up to a multiple of the alignment."""
    return -(-_empty(item).nbytes // _ALIGNMENT) * _ALIGNMENT


def _empty(item: TensorLayout) -> Tensor:
    """Make a tensor of this dtype and shape that has no data."""
    return torch.empty(item.shape, dtype=getattr(torch, item.dtype), device="meta")


def _views(flat: Tensor, bucket: Sequence[TensorLayout]) -> tuple[list[tuple[str, Tensor]], Tensor]:
    """View a bucket's bytes as its named tensors, and their checksums, int64 [n]."""
    sizes = [_padded_bytes(item) for item in bucket]
    sizes.append(_CHECKSUM_BYTES * len(bucket))
    parts = torch.split(flat, sizes)
    named = []
    for item, part in zip(bucket, parts[:-1], strict=True):
        empty = _empty(item)
        named.append((item.name, part[: empty.nbytes].view(empty.dtype).view(empty.shape)))
    return named, parts[-1].view(torch.int64)
