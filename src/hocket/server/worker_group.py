"""Receive broadcast weight versions inside the engine's processes; collective.py has the engine's half."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import torch

from hocket.protocol import CollectiveSource, GroupAddress, weight_group
from hocket.protocol.weight_group import Part, WeightGroup
from hocket.server.vllm_api import answered


class GroupReceiver:
    """Methods of a worker that takes broadcasts, too."""

    rank: int
    device: torch.device | None
    _hocket_take: Callable[..., dict[str, Any]]  # loads the parts of a version
    hocket_group: "tuple[str, Future[WeightGroup]] | None" = None  # that it is in, or joining

    @answered
    def hocket_join_group(self, message: str, size: int) -> bool:
        """Begin to join the trainer's weight group and leave any other; return whether it has joined.

        A thread joins, so that the engine goes on: whatever listens there may never answer.
        """
        address = GroupAddress.model_validate_json(message)
        name, joined = self.hocket_group or ("", None)
        if joined is not None and name == address.name:
            return joined.done() and joined.result() is not None
        if joined is not None:
            joined.add_done_callback(_leave)
        self.hocket_group = None
        device = self.device if self.device is not None and address.backend == "nccl" else torch.device("cpu")
        if address.device is not None and weight_group.gpu_id(device) == address.device:
            raise RuntimeError(
                "trainer and server are on the same GPU, which NCCL can't connect: give each its own "
                "(CUDA_VISIBLE_DEVICES), or set sync.backend=disk"
            )
        self.hocket_group = (address.name, Future())
        arguments = (self.hocket_group[1], address, 1 + self.rank, size, device)
        # A daemon: the process would wait for an executor's thread before it ends.
        threading.Thread(target=_join, args=arguments, name="join", daemon=True).start()
        return False

    @answered
    def hocket_load_group(self, message: str, compare: bool = False) -> dict[str, Any]:
        """Load the tensors that the trainer sends as `hocket_load_disk` does; leave the group where that fails."""
        source = CollectiveSource.model_validate_json(message)
        name, joined = self.hocket_group or ("", None)
        assert joined is not None, "the engine has it join first"
        assert name == source.group.name, "the engine has it join first"
        group = joined.result()
        try:
            # The group is closed before the second thread has ended, which may be waiting for a bucket.
            return self._hocket_take(_receive(group, source), source.adapter, compare, group.close)
        except BaseException:
            self.hocket_group = None
            raise


def _join(joined: "Future[WeightGroup]", address: GroupAddress, rank: int, size: int, device: torch.device) -> None:
    try:
        group = WeightGroup(
            store=weight_group.find_store(address.host, address.port, address.timeout_s),
            name=address.name,
            rank=rank,
            size=size,
            device=device,
            address=weight_group.address_towards(address.host, address.port),
            timeout_s=address.timeout_s,
        )
    except BaseException as error:  # noqa: BLE001 - raised where the result is read
        joined.set_exception(error)
    else:
        joined.set_result(group)


def _leave(joined: "Future[WeightGroup]") -> None:
    if joined.exception() is None:
        joined.result().close()


def _receive(group: WeightGroup, source: CollectiveSource) -> Iterator[Part]:
    """Yield the tensors of each bucket, verified, with their specs. Raises RuntimeError that names the bucket."""
    sizes = [weight_group.num_bytes(bucket) for bucket in source.buckets]
    flat = torch.empty(sizes[0], dtype=torch.uint8, device=group.device)  # there must be room before anything is sent
    group.announce(source.turn)
    for number, bucket in enumerate(source.buckets, 1):
        if number > 1:
            flat = torch.empty(sizes[number - 1], dtype=torch.uint8, device=group.device)
        try:
            group.broadcast(flat)
        except RuntimeError as error:
            raise RuntimeError(f"bucket {number}/{len(source.buckets)} did not come: {error}") from error
        yield weight_group.unpack(flat, bucket)
