"""Move tensors off the device and back, in place: every view and alias stays what it is, bit for bit.

DeepSpeed's `offload_states` knows neither ZeRO-0, nor bfloat16 with float32 gradients, nor torch's AdamW at ZeRO-3.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

_LIBRARIES = ("deepspeed.", "torch.optim.", "bitsandbytes.")  # whose objects are searched too
_REST = 1 << 20
Offloaded = Sequence[
    tuple[torch.UntypedStorage, Sequence[Tensor]]
]  # emptied storages, each with its bytes on the CPU


def tensors_in(*roots: Any) -> Iterator[Tensor]:
    """Yield every tensor in reach of the roots, gradients included."""
    seen: set[int] = set()
    left = deque(roots)
    while left:
        value = left.popleft()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            yield value
            left += (value.grad if value.is_leaf else None, vars(value))
        elif isinstance(value, Mapping):
            left += value.values()
        elif isinstance(value, list | tuple | set | frozenset | deque):
            left += value
        elif type(value).__module__.startswith(_LIBRARIES):
            left.append(getattr(value, "__dict__", None))


def offload(tensors: Iterator[Tensor], device: torch.device) -> Offloaded:
    """Empty the storages of tensors on the device; none may be used until `onload`."""
    torch.get_device_module(device).synchronize(device)  # whichever stream wrote last
    moved = []
    here = (tensor.untyped_storage() for tensor in tensors if tensor.device == device)
    for storage in here:  # one that several tensors share is empty from the second on
        if storage.nbytes() and storage.resizable():
            pieces = _bytes(storage, device).split_with_sizes(sizes(storage.nbytes()))
            hosts = [
                torch.empty(len(piece), dtype=torch.uint8, pin_memory=device.type == "cuda")
                for piece in pieces
            ]
            for host, piece in zip(hosts, pieces, strict=True):
                host.copy_(piece)
            storage.resize_(0)
            moved.append((storage, hosts))
    torch.cuda.empty_cache()  # does nothing on a CPU
    return moved


def onload(moved: Offloaded, device: torch.device) -> None:
    for storage, hosts in moved:
        lengths = [len(host) for host in hosts]
        storage.resize_(sum(lengths))
        for host, piece in zip(
            hosts, _bytes(storage, device).split_with_sizes(lengths), strict=True
        ):
            piece.copy_(host, non_blocking=True)
    torch.get_device_module(device).synchronize(
        device
    )  # the copies have read what may now be freed


def sizes(num_bytes: int) -> list[int]:
    """Return summands of num_bytes: powers of two, to which torch rounds pinned memory up, and a small rest.

    With pinned_max_round_threshold_mb, torch 2.13 may cache memory that is too short.
    """
    powers = [
        1 << bit for bit in reversed(range(num_bytes.bit_length())) if num_bytes & 1 << bit >= _REST
    ]
    return [*powers, num_bytes % _REST]


def _bytes(storage: torch.UntypedStorage, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
