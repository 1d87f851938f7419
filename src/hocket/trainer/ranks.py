"""The processes that train together: the ranks.

Under plain `python` there is one; `torchrun` and the `deepspeed` launcher start several.
"""

import atexit
import contextlib
import datetime
import os
import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from hocket.common.shell import LEFT_OVER
from hocket.common.tasks import in_own_thread
from hocket.errors import TrainerError, cause_of
from hocket.protocol.nccl import why_broken
from hocket.trainer.attention import WHOLE

T = TypeVar("T")
FAILURE = "hocket/failure"  # key in the store: why the first rank failed
WATCH_S = 2.0  # seconds between looks at the store
PATIENCE_S = 15.0  # seconds before a line says that other ranks have not started
GRACE_S = 15.0  # seconds for a rank to notice another's failure itself; NCCL may wait forever
_NO_DEADLINE = datetime.timedelta(days=365)  # for the next command: generation takes any time


class Ranks:
    """Connects a process to the other ranks.

    No wait is longer than `timeout_s`, except for rank 0's next command. While the ranks work, a
    thread watches a key of their store: the first rank that fails writes the reason there, and the
    others end with it.

    Args:
        timeout_s: seconds until communication has failed.
        cpu_threads: threads of torch, where there is no GPU.
    """

    def __init__(self, timeout_s: float, cpu_threads: int = 1) -> None:
        # Every collective would warn that its Python entry point will go.
        warnings.filterwarnings("ignore", message=r"`?torch\.distributed\.", category=FutureWarning)
        self.rank = int(os.environ.setdefault("RANK", "0"))
        self.size = int(os.environ.setdefault("WORLD_SIZE", "1"))
        local_rank = int(os.environ.setdefault("LOCAL_RANK", "0"))
        self.is_main = self.rank == 0
        self.timeout_s = timeout_s
        self.part = WHOLE  # the part of each row that this rank computes
        self.destroy: Callable[[], None] = dist.destroy_process_group  # until DeepSpeed is loaded
        self._has_ended = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="hocket-ranks", daemon=True)
        # torch's store is public, but not in its __all__.
        self._store: Any = dist.HashStore()  # type: ignore[attr-defined]

        # Each rank has a GPU of its own, or all have the CPU.
        if torch.cuda.is_available():
            num_gpus = torch.cuda.device_count()
            if local_rank >= num_gpus:
                raise TrainerError(
                    f"rank {self.rank} has LOCAL_RANK={local_rank}, and this machine has GPUs for "
                    f"{num_gpus}, one each: start {num_gpus} ranks here, or show it more GPUs with "
                    "CUDA_VISIBLE_DEVICES"
                )
            self.device = torch.device("cuda", local_rank)
            backend = "nccl"
        else:
            self.device = torch.device("cpu")
            backend = "gloo"
            if "OMP_NUM_THREADS" not in os.environ:
                torch.set_num_threads(cpu_threads)
        self._num_threads = torch.get_num_threads()
        self.use_this_thread()

        with self.deadline("waiting for the other ranks to start"), self._patience():
            self._connect(backend)
        if self.size > 1:
            self._watcher.start()
            # At exit, a thread within the store's C++ code would abort the process.
            atexit.register(self._stop_watching)

    def _connect(self, backend: str) -> None:
        """Join the store and the groups of all ranks."""
        timeout = datetime.timedelta(seconds=self.timeout_s)
        if self.size > 1:  # a single rank needs no port
            rendezvous = dist.rendezvous("env://", timeout=timeout)  # type: ignore[attr-defined]
            self._store, _, _ = next(rendezvous)
            # Kubernetes starts a lost pod again, and the others don't know the new one.
            if self._store.add(f"hocket/rank_{self.rank}", 1) > 1:
                raise TrainerError(
                    f"rank {self.rank} was started again, and the others wait for the first one"
                )
        dist.init_process_group(
            backend, store=self._store, rank=self.rank, world_size=self.size, timeout=timeout
        )
        # Commands have a group of their own: only in this may the ranks above 0 wait without end.
        command_timeout = timeout if self.is_main else _NO_DEADLINE
        self._reports = dist.new_group(backend="gloo", timeout=timeout)
        self._commands = dist.new_group(backend="gloo", timeout=command_timeout)

    @contextlib.contextmanager
    def _patience(self) -> Iterator[None]:
        """Print a line after PATIENCE_S: how many ranks are waited for, and where."""
        place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        line = f"hocket: rank {self.rank} of {self.size} waits for others at {place}; {LEFT_OVER}"
        timer = threading.Timer(PATIENCE_S, print, [line], {"file": sys.stderr})
        timer.daemon = True
        if self.size > 1:
            timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def use_this_thread(self) -> None:
        """Set what torch keeps per thread: the GPU and the number of CPU threads."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        torch.set_num_threads(self._num_threads)

    # Commands of rank 0

    def send(self, commands: Sequence[Any]) -> None:
        """Send each rank its command, from rank 0."""
        commands_of_others = [None]  # rank 0 gets none
        commands_of_others += commands[1:]
        with self.deadline("telling the other ranks what to do"):
            dist.scatter_object_list([None], commands_of_others, src=0, group=self._commands)

    def receive(self) -> Any:
        """Wait for rank 0's next command, as long as rank 0 lives."""
        box: list[Any] = [None]
        with self.deadline("waiting for work from rank 0"):
            dist.scatter_object_list(box, None, src=0, group=self._commands)
        return box[0]

    # Sums and reports of all ranks

    def gather(self, value: T) -> list[T]:
        """Collect every rank's value on rank 0; the other ranks get []."""
        box: list[Any] | None = [None] * self.size if self.is_main else None
        dist.gather_object(value, box, dst=0, group=self._reports)
        return box or []

    def sum(self, values: list[float]) -> list[float]:
        """Sum each value over the ranks, in float64."""
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total, group=self._reports)
        return list(total.tolist())

    def total(self, values: list[float]) -> list[float]:
        """Sum each value over the rows: ranks that compute a row together all have its value."""
        return [value / self.part.size for value in self.sum(values)]

    def smallest(self, value: int) -> int:
        """Find the smallest value of all ranks."""
        least = torch.tensor(value)
        dist.all_reduce(least, op=dist.ReduceOp.MIN, group=self._reports)
        return int(least)

    # The end

    def close(self) -> None:
        """Leave together with the others: a rank whose peers are gone could fail at its end."""
        self._stop_watching()
        with self.deadline("leaving"):
            dist.barrier(group=self._reports)
        self.destroy()

    @contextlib.contextmanager
    def deadline(self, doing: str) -> Iterator[None]:
        """Raise failed communication as TrainerError; let any other error end all ranks."""
        try:
            yield
        except Exception as error:
            self._stop_watching()
            if _is_of_communication(error):
                raise self._lost_others(error, doing) from error
            # This rank fails by itself: it tells the others why, unless the store is gone.
            reason = f"rank {self.rank} failed: {type(error).__name__}: {error}"
            with contextlib.suppress(RuntimeError):
                self._ask_store(lambda: self._store.compare_set(FAILURE, "", reason), GRACE_S)
            raise

    def _lost_others(self, error: Exception, doing: str) -> TrainerError:
        """Make the error of a broken connection; another rank's failure may be the reason."""
        with contextlib.suppress(RuntimeError):
            failure = self._ask_store(self._failure, GRACE_S)
            if failure is not None:
                return TrainerError(f"rank {self.rank} stopped while {doing}, for {failure}")
        return TrainerError(
            f"rank {self.rank} lost the other ranks while {doing}: {why_broken(error)}. "
            f"Another rank has ended, and its output says why, or did not answer within "
            f"6 x sync.timeout_s = {self.timeout_s:g}"
        )

    def _failure(self) -> str | None:
        if not self._store.check([FAILURE]):
            return None
        return str(self._store.get(FAILURE).decode())

    def _ask_store(self, call: Callable[[], T], seconds: float) -> T:
        """Call the store in a thread. Raises RuntimeError where that fails or takes longer.

        Without a deadline it would take a quarter of an hour once the link to its host is cut.
        """
        try:
            return in_own_thread(call).result(seconds)
        except TimeoutError:
            raise RuntimeError(f"no answer in {seconds:g} s") from None
        except Exception as error:
            raise RuntimeError(cause_of(error)) from error

    def _stop_watching(self) -> None:
        self._has_ended.set()
        if self._watcher.is_alive():
            self._watcher.join(GRACE_S)

    def _watch(self) -> None:
        """End this rank if another one has failed and this rank's own calls don't notice."""
        while not self._has_ended.wait(WATCH_S):
            try:
                failure = self._ask_store(self._failure, self.timeout_s)
            except RuntimeError as error:
                failure = f"rank 0, or the launcher, is gone: its store does not answer ({error})"
            if failure is not None and not self._has_ended.wait(GRACE_S):
                print(f"hocket: rank {self.rank} ends, for {failure}", file=sys.stderr, flush=True)
                os._exit(1)


def _is_of_communication(error: Exception) -> bool:
    """Check whether an error is one of torch's communication.

    Gloo raises plain RuntimeErrors, torch subclasses of it (DistBackendError, ...).
    """
    names = re.search("gloo|nccl|^Dist", repr(error), re.IGNORECASE)
    return isinstance(error, RuntimeError) and names is not None
