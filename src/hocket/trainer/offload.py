"""Move tensors off the device and back, in place: every view and alias stays what it is, bit for bit.

DeepSpeed's own `offload_states` covers neither ZeRO-0, nor bfloat16 with float32 gradients (ZeRO-1), nor ZeRO-3 with
torch's AdamW. Emptying the storages, as FSDP does, works for all of them: flat buffers, partitions and parameters.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

_LIBRARIES = ("deepspeed.", "torch.optim.", "bitsandbytes.")  # their objects are searched too, not only containers
Offloaded = Sequence[tuple[torch.UntypedStorage, Tensor]]  # emptied storages, each with its bytes in CPU memory


def tensors_in(*roots: Any) -> Iterator[Tensor]:
    """Yield every tensor, gradient included, that can be reached from the roots."""
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
    """Empty the storages of the tensors that are on the device; none of them may be used until `onload`."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # whichever stream wrote last
    moved = []
    storages = {
        tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors if tensor.device == device
    }
    for storage in storages.values():
        if storage.nbytes() and storage.resizable():
            host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=device.type == "cuda")
            host.copy_(_bytes(storage, device))
            storage.resize_(0)
            moved.append((storage, host))
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return moved


def onload(moved: Offloaded, device: torch.device) -> None:
    """Fill the storages again."""
    for storage, host in moved:
        storage.resize_(host.numel())
        _bytes(storage, device).copy_(host, non_blocking=True)
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # the copies have read what may now be freed


def _bytes(storage: torch.UntypedStorage, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
