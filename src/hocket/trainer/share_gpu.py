"""Move tensors off the device and back in place, bit for bit, while servers use the GPU.

Their storages are emptied and filled again, so views and aliases of a tensor stay valid.
DeepSpeed's `offload_states` lacks ZeRO-0, bfloat16 with float32 gradients, and torch's AdamW at
ZeRO-3.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

_LIBRARIES = ("deepspeed.", "torch.optim.", "bitsandbytes.")  # their objects are searched too
_SMALLEST_PIECE = 1 << 20  # bytes; a smaller remainder is a piece of its own
Offloaded = Sequence[tuple[torch.UntypedStorage, Sequence[Tensor]]]
"""Emptied storages, each with the pieces of its bytes on the CPU."""


def tensors_in(*roots: Any) -> Iterator[Tensor]:
    """Yield every tensor within reach of the roots, gradients included."""
    seen: set[int] = set()
    pending = deque(roots)
    while pending:
        value = pending.popleft()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            yield value
            pending.append(value.grad if value.is_leaf else None)
            pending.append(vars(value))  # DeepSpeed keeps tensors in attributes of parameters
        elif isinstance(value, Mapping):
            pending.extend(value.values())
        elif isinstance(value, list | tuple | set | frozenset | deque):
            pending.extend(value)
        elif type(value).__module__.startswith(_LIBRARIES):
            pending.append(getattr(value, "__dict__", None))


def offload(tensors: Iterator[Tensor], device: torch.device) -> Offloaded:
    """Copy the storages of tensors on the device to the CPU, and empty them.

    The tensors must not be used until `onload`.
    """
    torch.get_device_module(device).synchronize(device)  # any stream may have written last
    moved = []
    for tensor in tensors:
        if tensor.device != device:
            continue
        storage = tensor.untyped_storage()
        # A storage that several tensors share is empty from the second on.
        if not storage.nbytes() or not storage.resizable():
            continue
        hosts = []
        for piece in _bytes(storage, device).split_with_sizes(sizes(storage.nbytes())):
            host = torch.empty(len(piece), dtype=torch.uint8, pin_memory=device.type == "cuda")
            host.copy_(piece)
            hosts.append(host)
        storage.resize_(0)
        moved.append((storage, hosts))
    torch.cuda.empty_cache()  # does nothing on a CPU
    return moved


def onload(moved: Offloaded, device: torch.device) -> None:
    """Fill the storages again that `offload` has emptied."""
    for storage, hosts in moved:
        lengths = [len(host) for host in hosts]
        storage.resize_(sum(lengths))
        pieces = _bytes(storage, device).split_with_sizes(lengths)
        for host, piece in zip(hosts, pieces, strict=True):
            piece.copy_(host, non_blocking=True)
    # The copies must have read the pinned memory before the caller frees it.
    torch.get_device_module(device).synchronize(device)


def sizes(num_bytes: int) -> list[int]:
    """Divide a number of bytes into powers of two, and a small remainder.

    torch rounds pinned memory up to a power of two, so other sizes would waste memory. With
    pinned_max_round_threshold_mb instead, torch 2.13 may cache memory that is too short.
    """
    pieces = []
    for bit in reversed(range(num_bytes.bit_length())):
        power = 1 << bit
        if num_bytes & power and power >= _SMALLEST_PIECE:
            pieces.append(power)
    pieces.append(num_bytes % _SMALLEST_PIECE)
    return pieces


def _bytes(storage: torch.UntypedStorage, device: torch.device) -> Tensor:
    """Make a view of a storage as a tensor of bytes."""
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
