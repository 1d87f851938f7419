"""The processes that train together: who this one is, and how rank 0 tells the others what to do.

Works under plain `python` (one rank), `torchrun` and the `deepspeed` launcher, which all set RANK, WORLD_SIZE and
LOCAL_RANK. Commands and reports go over a gloo group of their own, beside the group that gradients use.
"""

import atexit
import base64
import contextlib
import datetime
import os
import re
import sys
import threading
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from hocket.errors import TrainerError

T = TypeVar("T")
FAILURE = "hocket/failure"
"""Key under which the first rank that fails tells the others why."""
WATCH_S = 2.0
GRACE_S = 15.0
"""How long a rank may take to notice by itself that another one failed; NCCL may wait for a lost rank for ever."""


class Ranks:
    """Connects to the other ranks; the constructor returns once all of them are there.

    Args:
        timeout_s: deadline of every wait between ranks, this first one included.

    Attributes:
        destroy: ends communication without a word to the others; a library with groups of its own may replace it.
    """

    def __init__(self, timeout_s: float) -> None:
        # Under a launcher every collective would print that its Python entry point is on its way out.
        warnings.filterwarnings("ignore", message=r"`torch\.distributed\.", category=FutureWarning)
        self.rank = int(os.environ.setdefault("RANK", "0"))
        self.size = int(os.environ.setdefault("WORLD_SIZE", "1"))
        self.local_rank = int(os.environ.setdefault("LOCAL_RANK", "0"))
        self.timeout_s = timeout_s
        self.destroy: Callable[[], None] = dist.destroy_process_group
        self._left = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="hocket-ranks", daemon=True)
        self._store: Any = dist.HashStore()  # type: ignore[attr-defined]  # public, but not in __all__
        timeout = datetime.timedelta(seconds=timeout_s)
        if torch.cuda.is_available():
            self.device = torch.device("cuda", self.local_rank)
        else:
            self.device = torch.device("cpu")
            _share_cores()
        self._num_threads = torch.get_num_threads()
        self.use_this_thread()
        backend = "nccl" if self.device.type == "cuda" else "gloo"
        with self.deadline("waiting for the other ranks to start"):
            if self.size > 1:  # one alone needs no port
                self._store, _, _ = next(dist.rendezvous("env://", timeout=timeout))  # type: ignore[attr-defined]
            dist.init_process_group(backend, store=self._store, rank=self.rank, world_size=self.size, timeout=timeout)
            self._control = dist.new_group(backend="gloo", timeout=timeout)
        if self.size > 1:
            self._watcher.start()
            atexit.register(self._stop_watching)  # a thread within the store's C++ would abort a process that ends

    def use_this_thread(self) -> None:
        """Sets what torch keeps for each thread alone: the device, and how many cores a computation takes."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        torch.set_num_threads(self._num_threads)

    def new_group(self) -> dist.ProcessGroup:
        """Returns one more group of all ranks, for gradients, with the same deadline."""
        group: dist.ProcessGroup = dist.new_group(timeout=datetime.timedelta(seconds=self.timeout_s))
        return group

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which drives."""
        return self.rank == 0

    def broadcast(self, value: T) -> T:
        """Returns rank 0's value on every rank."""
        if self.size == 1:
            return value
        box: list[Any] = [value]
        dist.broadcast_object_list(box, src=0, group=self._control)
        result: T = box[0]
        return result

    def gather(self, value: T) -> list[T]:
        """Returns every rank's value on rank 0, in the order of ranks; nothing elsewhere."""
        box: list[Any] | None = [None] * self.size if self.is_main else None
        dist.gather_object(value, box, dst=0, group=self._control)
        return box or []

    def sum_in_place(self, tensor: Tensor) -> None:
        """Replaces a tensor on this rank's device by its sum over ranks."""
        dist.all_reduce(tensor)

    def broadcast_in_place(self, tensor: Tensor) -> None:
        """Replaces a tensor on this rank's device by rank 0's."""
        dist.broadcast(tensor, src=0)

    def sum(self, values: list[float]) -> list[float]:
        """Returns the sums over ranks, position by position, in float64."""
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total, group=self._control)
        result: list[float] = total.tolist()
        return result

    def smallest(self, value: int) -> int:
        """Returns the smallest of the ranks' values on every rank."""
        least = torch.tensor(value)
        dist.all_reduce(least, op=dist.ReduceOp.MIN, group=self._control)
        return int(least)

    def barrier(self) -> None:
        """Returns once every rank is here."""
        dist.barrier(group=self._control)

    def close(self) -> None:
        """Parts from the other ranks together; a rank that just left could make them fail on their way out."""
        self._stop_watching()
        self.barrier()
        self.destroy()

    def deadline(self, doing: str) -> "_Deadline":
        """Context in which failed communication is raised as a TrainerError that says what was going on.

        Any other error ends the common work: the other ranks are told.
        """
        return _Deadline(self, doing)

    def leave(self, failure: str | None = None) -> None:
        """Says that this rank goes because of an error; with `failure`, its own, which the others will then name."""
        self._stop_watching()
        if failure is not None:
            with contextlib.suppress(RuntimeError):  # rank 0, which keeps what ranks say, may be gone
                self._store.compare_set(FAILURE, "", f"rank {self.rank} failed: {failure}")

    def failure(self) -> str | None:
        """Returns why a rank has failed, where one has said so."""
        with contextlib.suppress(RuntimeError):  # likewise
            if self._store.check([FAILURE]):
                return str(self._store.get(FAILURE).decode())
        return None

    def _stop_watching(self) -> None:
        self._left.set()
        if self._watcher.is_alive():
            self._watcher.join(GRACE_S)

    def _watch(self) -> None:
        while not self._left.wait(WATCH_S):
            failure = self.failure()
            if failure is not None and not self._left.wait(GRACE_S):
                print(f"hocket: rank {self.rank} ends, for {failure}", file=sys.stderr, flush=True)
                os._exit(1)


def randomness(device: torch.device) -> dict[str, str]:
    """Returns the state of this process's random number generators, ready for JSON."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return {name: base64.b64encode(state.numpy().tobytes()).decode() for name, state in states.items()}


def restore_randomness(saved: Mapping[str, str], device: torch.device) -> None:
    """Goes back to what `randomness` gave."""
    states = {name: torch.tensor(list(base64.b64decode(text)), dtype=torch.uint8) for name, text in saved.items()}
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)


def _share_cores() -> None:
    """Takes half of the cores, shared by the ranks of this machine; OMP_NUM_THREADS overrides it.

    An engine that generates on the same cores needs the other half: threads that wait for each other's core make a step
    many times slower.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // 2 // local_size))


class _Deadline:
    def __init__(self, ranks: Ranks, doing: str) -> None:
        self.ranks, self.doing = ranks, doing

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if not isinstance(error, Exception):
            return
        if not isinstance(error, RuntimeError) or not _is_communication(error):
            self.ranks.leave(f"{type(error).__name__}: {error}")
            return
        self.ranks.leave()
        rank, failure = self.ranks.rank, self.ranks.failure()
        if failure is not None:
            raise TrainerError(f"rank {rank} stopped while {self.doing}, for {failure}") from error
        reason = re.sub(r"^\[.*?\] *|\. .*", "", str(error).splitlines()[0])  # gloo's source line, its jokes
        raise TrainerError(
            f"rank {rank} lost the other ranks while {self.doing}: {reason}. Another rank has ended, and its output "
            f"says why, or did not answer within trainer.collective_timeout_s={self.ranks.timeout_s:g}"
        ) from error


def _is_communication(error: RuntimeError) -> bool:
    # gloo raises plain RuntimeErrors that begin with the place in its source
    return isinstance(error, dist.DistError) or "gloo" in str(error).lower() or "nccl" in str(error).lower()
