"""Receive broadcast versions inside the engine's processes; nccl.py is the server's half."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch

from hocket.common.tasks import in_own_thread
from hocket.protocol import CollectiveSource, GroupAddress, nccl
from hocket.protocol.nccl import BucketPart, WeightGroup
from hocket.server.vllm_api import answered


class GroupReceiver:
    """Methods of a worker that receive broadcasts; the server calls them by `collective_rpc`."""

    rank: int
    device: torch.device
    _hocket_take: Callable[..., dict[str, Any]]  # loads the parts of a version (worker.py)
    # The name of the group that the worker is in, or joins, and the group once it has joined.
    hocket_group: "tuple[str, Future[WeightGroup]] | None" = None

    @answered
    def hocket_join_group(self, message: str, size: int) -> bool:
        """Join the trainer's group, and leave any other; returns True once it has joined.

        A thread joins, as the trainer may never answer. The server calls this until it is done.
        """
        address = GroupAddress.model_validate_json(message)
        if self.hocket_group is not None and self.hocket_group[0] != address.name:
            self.hocket_group[1].add_done_callback(_leave)  # once it has joined, if it has not yet
            self.hocket_group = None
        if self.hocket_group is None:
            device = _device_for(address, self.device)
            rank = 1 + self.rank  # rank 0 is the trainer
            joining = in_own_thread(partial(_join, address, rank, size, device))
            self.hocket_group = address.name, joining
        _, joined = self.hocket_group
        return joined.done() and joined.result() is not None

    @answered
    def hocket_load_group(
        self, message: str, checksum: str = "", compare: bool = False
    ) -> dict[str, Any]:
        """Load a version that the trainer broadcasts, as `hocket_load_disk` does one in a folder.

        The worker leaves the group where that fails.
        """
        source = CollectiveSource.model_validate_json(message)
        assert self.hocket_group is not None, "the engine has it join first"
        name, joined = self.hocket_group
        assert name == source.group.name, "it is in another group"
        group = joined.result()

        def leave() -> None:
            # Closing the group wakes the thread that may be waiting for a bucket.
            self.hocket_group = None
            group.close()

        parts = _receive(group, source)
        return self._hocket_take(parts, source.adapter, checksum, compare, leave, source.partial)


def _device_for(address: GroupAddress, worker_device: torch.device) -> torch.device:
    """Choose the device that receives: the CPU where the trainer sends from it, else the worker's.

    Raises RuntimeError where trainer and worker use the same GPU.
    """
    if address.device is None:
        return torch.device("cpu")
    if nccl.gpu_id(worker_device) == address.device:
        raise RuntimeError(
            "trainer and server are on the same GPU, which NCCL can't connect: give each its own "
            "(CUDA_VISIBLE_DEVICES), or set sync.backend=disk"
        )
    return worker_device


def _join(address: GroupAddress, rank: int, size: int, device: torch.device) -> WeightGroup:
    store = nccl.find_store(address.host, address.port, address.timeout_s)
    local_address = nccl.address_towards(address.host, address.port)
    return WeightGroup(
        store,
        address.name,
        device,
        local_address,
        rank=rank,
        size=size,
        timeout_s=address.timeout_s,
    )


def _leave(joined: "Future[WeightGroup]") -> None:
    if joined.exception() is None:
        joined.result().close()


def _receive(group: WeightGroup, source: CollectiveSource) -> Iterator[BucketPart]:
    """Yield the tensors of each bucket, verified, with their specs.

    Raises RuntimeError with the number of a bucket that does not come.
    """
    for number, bucket in enumerate(source.buckets, 1):
        flat = torch.empty(nccl.num_bytes(bucket), dtype=torch.uint8, device=group.device)
        # The trainer sends once every worker has announced that it has memory for the first bucket.
        if number == 1:
            group.announce(source.turn)
        try:
            group.broadcast(flat)
        except RuntimeError as error:
            message = f"bucket {number}/{len(source.buckets)} did not come: {error}"
            raise RuntimeError(message) from error
        yield nccl.unpack(flat, bucket)
