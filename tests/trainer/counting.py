"""Counts the bytes that torch allocates on the CPU, whose allocator keeps no record."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class _Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's is untyped
    """Follows the storages that operators allocate."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self.alive: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {v.untyped_storage()._cdata for v in tree_iter((args, kwargs)) if isinstance(v, torch.Tensor)}
        for value in tree_iter(result):
            if isinstance(value, torch.Tensor):
                storage = value.untyped_storage()
                if storage._cdata not in given and storage._cdata not in self.alive:
                    self.alive.add(storage._cdata)
                    self.now += storage.nbytes()
                    weakref.finalize(storage, self.gone, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return result

    def gone(self, key: int, num_bytes: int) -> None:
        self.alive.discard(key)
        self.now -= num_bytes


def peak_bytes(work: Callable[[], object]) -> int:
    counting = _Counting()
    with counting:
        work()
    return counting.peak
