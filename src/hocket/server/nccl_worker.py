"""Receive broadcast versions inside the engine's processes; nccl.py has the engine's half."""

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
    """Methods of a worker that takes broadcasts, too."""

    rank: int
    device: torch.device
    _hocket_take: Callable[..., dict[str, Any]]  # loads the parts of a version
    hocket_group: "tuple[str, Future[WeightGroup]] | None" = None  # that it is in, or joining

    @answered
    def hocket_join_group(self, message: str, size: int) -> bool:
        """Leave any other group, join the trainer's in a thread, as it may never answer; return whether it is done."""
        address = GroupAddress.model_validate_json(message)
        name, joined = self.hocket_group or ("", Future())
        if name != address.name:
            joined.add_done_callback(_leave)
            self.hocket_group = None
            device = _device_for(address, self.device)
            joined = in_own_thread(partial(_join, address, 1 + self.rank, size, device))
            self.hocket_group = address.name, joined
        return joined.done() and joined.result() is not None

    @answered
    def hocket_load_group(
        self, message: str, checksum: str = "", compare: bool = False
    ) -> dict[str, Any]:
        """Load what the trainer sends as `hocket_load_disk` does; leave the group where that fails."""
        source = CollectiveSource.model_validate_json(message)
        name, joined = self.hocket_group or ("", Future())
        assert name == source.group.name, "the engine has it join first"
        group = joined.result()

        def leave() -> None:  # before the thread ends, which may wait for a bucket
            self.hocket_group = None
            group.close()

        return self._hocket_take(
            _receive(group, source), source.adapter, checksum, compare, leave, source.partial
        )


def _device_for(address: GroupAddress, own: torch.device) -> torch.device:
    if address.device is None:
        return torch.device("cpu")
    if nccl.gpu_id(own) == address.device:
        raise RuntimeError(
            "trainer and server are on the same GPU, which NCCL can't connect: give each its own "
            "(CUDA_VISIBLE_DEVICES), or set sync.backend=disk"
        )
    return own


def _join(address: GroupAddress, rank: int, size: int, device: torch.device) -> WeightGroup:
    store = nccl.find_store(address.host, address.port, address.timeout_s)
    own = nccl.address_towards(address.host, address.port)
    return WeightGroup(
        store, address.name, device, own, rank=rank, size=size, timeout_s=address.timeout_s
    )


def _leave(joined: "Future[WeightGroup]") -> None:
    if joined.exception() is None:
        joined.result().close()


def _receive(group: WeightGroup, source: CollectiveSource) -> Iterator[BucketPart]:
    """Yield each bucket's tensors, verified, and specs. Raises RuntimeError that names the bucket."""
    for number, bucket in enumerate(source.buckets, 1):
        flat = torch.empty(nccl.num_bytes(bucket), dtype=torch.uint8, device=group.device)
        if number == 1:  # there is room for it: the trainer may send
            group.announce(source.turn)
        try:
            group.broadcast(flat)
        except RuntimeError as error:
            raise RuntimeError(
                f"bucket {number}/{len(source.buckets)} did not come: {error}"
            ) from error
        yield nccl.unpack(flat, bucket)
