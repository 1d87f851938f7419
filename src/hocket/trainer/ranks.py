"""The processes that train together: one under plain `python`, or those of `torchrun` or the `deepspeed` launcher."""

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
FAILURE = "hocket/failure"  # the store's key for why the first rank failed
WATCH_S = 2.0
PATIENCE_S = 15.0  # before it is said that others have not started
GRACE_S = 15.0  # to notice another one's failure by itself; NCCL may wait forever
_NO_DEADLINE = datetime.timedelta(days=365)  # for a command: generation takes any time


class Ranks:
    """Connects to the other ranks; no wait but that for a command exceeds `timeout_s`."""

    def __init__(self, timeout_s: float, cpu_threads: int = 1) -> None:
        # Every collective would warn that its Python entry point will go.
        warnings.filterwarnings("ignore", message=r"`?torch\.distributed\.", category=FutureWarning)
        self.rank = int(os.environ.setdefault("RANK", "0"))
        self.size = int(os.environ.setdefault("WORLD_SIZE", "1"))
        local_rank = int(os.environ.setdefault("LOCAL_RANK", "0"))
        self.is_main = self.rank == 0
        self.timeout_s = timeout_s
        self.part = WHOLE  # of the rows that it computes
        self.destroy: Callable[[], None] = (
            dist.destroy_process_group
        )  # DeepSpeed has groups of its own
        self._left = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="hocket-ranks", daemon=True)
        self._store: Any = dist.HashStore()  # type: ignore[attr-defined]  # public, but not in __all__
        timeout = datetime.timedelta(seconds=timeout_s)
        if torch.cuda.is_available():
            count = torch.cuda.device_count()
            if local_rank >= count:
                raise TrainerError(
                    f"rank {self.rank} has LOCAL_RANK={local_rank}, and this machine has GPUs for {count}, one each: "
                    f"start {count} ranks here, or show it more GPUs with CUDA_VISIBLE_DEVICES"
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
            if self.size > 1:  # one alone needs no port
                self._store, _, _ = next(dist.rendezvous("env://", timeout=timeout))  # type: ignore[attr-defined]
                if (
                    self._store.add(f"hocket/rank_{self.rank}", 1) > 1
                ):  # Kubernetes does so with a lost pod
                    raise TrainerError(
                        f"rank {self.rank} was started again, and the others wait for the first one"
                    )
            dist.init_process_group(
                backend, store=self._store, rank=self.rank, world_size=self.size, timeout=timeout
            )
            self._reports = dist.new_group(backend="gloo", timeout=timeout)
            self._commands = dist.new_group(
                backend="gloo", timeout=timeout if self.is_main else _NO_DEADLINE
            )
        if self.size > 1:
            self._watcher.start()
            atexit.register(
                self._stop_watching
            )  # a thread within the store's C++ would abort the process

    @contextlib.contextmanager
    def _patience(self) -> Iterator[None]:
        """Say after PATIENCE_S which ranks are waited for, and where."""
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
        """Set what torch keeps per thread."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        torch.set_num_threads(self._num_threads)

    def send(self, commands: Sequence[Any]) -> None:
        """Send each rank its command from rank 0."""
        with self.deadline("telling the other ranks what to do"):
            dist.scatter_object_list([None], [None, *commands[1:]], src=0, group=self._commands)

    def receive(self) -> Any:
        """Return rank 0's next command, as long as rank 0 lives."""
        box: list[Any] = [None]
        with self.deadline("waiting for work from rank 0"):
            dist.scatter_object_list(box, None, src=0, group=self._commands)
        return box[0]

    def gather(self, value: T) -> list[T]:
        """Return on rank 0 every rank's value; [] elsewhere."""
        box: list[Any] | None = [None] * self.size if self.is_main else None
        dist.gather_object(value, box, dst=0, group=self._reports)
        return box or []

    def sum(self, values: list[float]) -> list[float]:
        """Return the sums over ranks, in float64."""
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total, group=self._reports)
        return list(total.tolist())

    def total(self, values: list[float]) -> list[float]:
        """Return the sums over ranks of what those that compute a row together have alike."""
        return [value / self.part.size for value in self.sum(values)]

    def smallest(self, value: int) -> int:
        least = torch.tensor(value)
        dist.all_reduce(least, op=dist.ReduceOp.MIN, group=self._reports)
        return int(least)

    def close(self) -> None:
        """Leave together: a rank whose peers are gone could fail at its end."""
        self._stop_watching()
        with self.deadline("leaving"):
            dist.barrier(group=self._reports)
        self.destroy()

    @contextlib.contextmanager
    def deadline(self, doing: str) -> Iterator[None]:
        """Raise failed communication as TrainerError; have other errors end the other ranks too."""
        try:
            yield
        except Exception as error:
            self._stop_watching()
            # of gloo they are plain, of torch subclasses
            if not (
                isinstance(error, RuntimeError)
                and re.search("gloo|nccl|^Dist", repr(error), re.IGNORECASE)
            ):
                reason = f"rank {self.rank} failed: {type(error).__name__}: {error}"
                with contextlib.suppress(RuntimeError):  # the store may be gone with rank 0
                    self._ask_store(lambda: self._store.compare_set(FAILURE, "", reason), GRACE_S)
                raise
            with contextlib.suppress(RuntimeError):
                failure = self._ask_store(self._failure, GRACE_S)
                if failure is not None:
                    raise TrainerError(
                        f"rank {self.rank} stopped while {doing}, for {failure}"
                    ) from error
            raise TrainerError(
                f"rank {self.rank} lost the other ranks while {doing}: {why_broken(error)}. Another rank has ended, "
                f"and its output says why, or did not answer within 6 x sync.timeout_s = {self.timeout_s:g}"
            ) from error

    def _failure(self) -> str | None:
        return str(self._store.get(FAILURE).decode()) if self._store.check([FAILURE]) else None

    def _ask_store(self, call: Callable[[], T], seconds: float) -> T:
        """Return the result of a call of the store; raise RuntimeError where it fails or takes longer.

        Where the link to its host is cut, it would take a quarter of an hour.
        """
        try:
            return in_own_thread(call).result(seconds)
        except TimeoutError:
            raise RuntimeError(f"no answer in {seconds:g} s") from None
        except Exception as error:
            raise RuntimeError(cause_of(error)) from error

    def _stop_watching(self) -> None:
        self._left.set()
        if self._watcher.is_alive():
            self._watcher.join(GRACE_S)

    def _watch(self) -> None:
        """End this rank where another one has failed and its own calls don't notice."""
        while not self._left.wait(WATCH_S):
            try:
                failure = self._ask_store(self._failure, self.timeout_s)
            except RuntimeError as error:
                failure = f"rank 0, or the launcher, is gone: its store does not answer ({error})"
            if failure is not None and not self._left.wait(GRACE_S):
                print(f"hocket: rank {self.rank} ends, for {failure}", file=sys.stderr, flush=True)
                os._exit(1)
