"""Receive weights inside the engine's processes.

vLLM mixes `WorkerExtension` into its worker class; its methods are called through `collective_rpc`. Importing this
module in a process that was started for it ties that to its parent.
"""

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from hocket.protocol import AdapterConfig, CollectiveSource, GroupAddress, TensorSpec, manifest, weight_group
from hocket.protocol.weight_group import WeightGroup
from hocket.server import vllm_api, vllm_weights

Part = tuple[Sequence[tuple[str, torch.Tensor]], dict[str, TensorSpec]]
"""Tensors of a version with their specs."""


def _answer(method: Callable[..., Any]) -> Callable[..., dict[str, Any]]:
    """Make a method return {"value": ...}, or {"error": ...} where it raises.

    After an exception vLLM would take the other workers' answers for those to later calls.
    """

    @functools.wraps(method)
    def answer(*args: Any) -> dict[str, Any]:
        try:
            return {"value": method(*args)}
        except Exception as error:  # noqa: BLE001 - the engine raises it again
            return {"error": str(error) or type(error).__name__}

    return answer


class WorkerExtension:
    """Methods that hocket adds to vLLM's worker. Messages are JSON: vLLM carries plain types only."""

    rank: int
    device: torch.device | None
    hocket_group: "tuple[str, Future[WeightGroup]] | None" = None  # that it is in, or joining

    @_answer
    def hocket_load_disk(self, folder: str, adapter: str, compare: bool = False) -> dict[str, Any]:
        """Load every tensor of the folder into the paused model, in place; with an AdapterConfig, beside it.

        Returns the checksum of the tensors that went in. After an error the model is unusable until a load succeeds.
        With `compare` it changes nothing, and also returns the names of what differs.
        """
        with _ahead(_read(Path(folder))) as parts:
            return self._hocket_load(parts, AdapterConfig.model_validate_json(adapter) if adapter else None, compare)

    @_answer
    def hocket_join_group(self, message: str, size: int) -> bool:
        """Begin to join the trainer's weight group and leave any other, or go on; return whether it has joined.

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

    @_answer
    def hocket_load_group(self, message: str, compare: bool = False) -> dict[str, Any]:
        """Load the tensors that the trainer sends as `hocket_load_disk` does; leave the group where that fails."""
        source = CollectiveSource.model_validate_json(message)
        name, joined = self.hocket_group or ("", None)
        assert joined is not None, "the engine has it join first"
        assert name == source.group.name, "the engine has it join first"
        group = joined.result()
        try:
            # The group is closed before the second thread has ended, which may be waiting for a bucket.
            with _ahead(_receive(group, source), give_up=group.close) as parts:
                return self._hocket_load(parts, source.adapter, compare)
        except BaseException:
            self.hocket_group = None
            raise

    @_answer
    def hocket_drop_adapter(self) -> None:
        """Have every request use the model's weights without an adapter."""
        vllm_weights.drop_adapter(self)

    def _hocket_load(self, parts: Iterator[Part], adapter: AdapterConfig | None, compare: bool) -> dict[str, Any]:
        specs: dict[str, TensorSpec] = {}
        weights, different = _tensors(parts, specs), list[str]()
        if compare:
            different = vllm_weights.compare(self, weights, adapter)
        else:
            vllm_weights.load(self, weights, adapter)
        return {"checksum": manifest.total_checksum(specs), "num_tensors": len(specs), "different": different}


def _join(joined: "Future[WeightGroup]", address: GroupAddress, rank: int, size: int, device: torch.device) -> None:
    """Join a weight group; `joined` gets it, or the error."""
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


@contextmanager
def _ahead(parts: Iterator[Part], give_up: Callable[[], None] = lambda: None) -> Iterator[Iterator[Part]]:
    """Make the next two parts in a second thread while one is used; `give_up` interrupts it where the body raises."""
    with ThreadPoolExecutor(1, "weights ahead") as thread:
        coming = [thread.submit(next, parts, None) for _ in range(2)]

        def take() -> Iterator[Part]:
            while (part := coming.pop(0).result()) is not None:
                coming.append(thread.submit(next, parts, None))
                yield part

        try:
            yield take()
        except BaseException:
            give_up()
            raise


def _read(folder: Path) -> Iterator[Part]:
    """Yield each tensor of a published version with its spec."""
    for name, tensor in manifest.tensors(folder):
        yield [(name, tensor)], {name: manifest.spec(tensor)}


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


def _tensors(parts: Iterator[Part], specs: dict[str, TensorSpec]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of all parts in turn, and add their specs to `specs`."""
    for named, made in parts:
        specs |= made
        for _, tensor in named:
            if tensor.is_cuda:  # made on another thread's stream: not used anew before this one has read it
                tensor.record_stream(torch.cuda.current_stream())
        yield from named


vllm_api.die_with_parent_process()
vllm_api.allow_amx()
