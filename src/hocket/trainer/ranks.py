"""The processes that train together: the ranks.

Under plain `python` there is one; `torchrun` and the `deepspeed` launcher start several. Training
is collective: every rank takes part in the sums of gradients and in gathering weights. Only rank 0
knows what comes next. For each method that is marked `@on_all_ranks`, it sends the other ranks the
name and the arguments. They wait in `follow`, and call the method, too:

    rank 0:  step() calls _update(rows)  ->  sends each ("_update", its rows)  ->  runs _update
    rank 1:  follow() waits for work     ->  receives ("_update", its rows)    ->  runs _update
"""

import atexit
import contextlib
import datetime
import functools
import os
import re
import sys
import threading
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist

from hocket.common.shell import LEFT_OVER
from hocket.common.tasks import in_own_thread, note
from hocket.errors import TrainerError, cause_of
from hocket.protocol.nccl import why_broken
from hocket.trainer.attention import WHOLE

T = TypeVar("T")
Sink = Callable[[Any], None]
"""Takes one bucket: [(name, tensor)] of weights, {name: tensor} of a checkpoint."""

FAILURE = "hocket/failure"  # key in the store: why the first rank failed
WATCH_S = 2.0  # seconds between looks at the store
PATIENCE_S = 15.0  # seconds before a line says that other ranks have not started
GRACE_S = 15.0  # seconds for a rank to notice another's failure itself; NCCL may wait forever
_NO_DEADLINE = datetime.timedelta(days=365)  # for the next command: generation takes any time

# Values of `Together.refusal`: why no method can be called now.
AWAY = "it is off the GPU; call onload() first"
BROKEN = "it broke in an earlier call"
CLOSED = "it is closed"


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


class PerRank(tuple[Any, ...]):
    """An argument of which rank r gets item r."""


def on_all_ranks(method: Callable[..., Any]) -> Any:
    """Decorate a method of Together that all ranks run when rank 0 calls it.

    Positional arguments go to every rank; keyword arguments stay on rank 0. The result is rank 0's.
    """
    work = method.__name__

    @functools.wraps(method)
    def call(self: "Together", *args: Any, **local: Any) -> Any:
        # A call is refused before the other ranks start: this error leaves all ranks usable.
        if self.refusal:
            raise TrainerError(f"the trainer can't {work.strip('_')}: {self.refusal}")
        self.refusal = BROKEN  # until the work has ended without an error
        self.ranks.send([(work, _arguments_of(rank, args)) for rank in range(self.ranks.size)])
        result = self.run_part(work, _arguments_of(0, args), local)
        self.refusal = ""
        return result

    return call


def _arguments_of(rank: int, args: Sequence[Any]) -> list[Any]:
    return [arg[rank] if isinstance(arg, PerRank) else arg for arg in args]


class Together(ABC):
    """Base of a class whose methods all ranks run together.

    Rank 0 calls the methods, the other ranks `follow`, and all leave at the end. An error within a
    method that is marked `@on_all_ranks` ends all ranks.

    Example: count the ranks.

        class Counter(Together):
            explaining = contextlib.nullcontext

            def release(self) -> None:
                pass

            @on_all_ranks
            def count(self) -> float:
                return self.ranks.sum([1.0])[0]

        counter = Counter(ranks, owns_ranks=False)
        number = counter.count() if ranks.is_main else counter.follow()
    """

    def __init__(self, ranks: Ranks, *, owns_ranks: bool) -> None:
        self.ranks = ranks
        self.owns_ranks = owns_ranks  # whether the ranks are closed with this object
        self.refusal = ""  # the reason why no method can be called now; "" if all can
        if not ranks.is_main:
            self.refusal = f"this is rank {ranks.rank}, and ranks above 0 only follow"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, cause: BaseException | None, trace: object) -> None:
        try:
            self.close()
        except TrainerError:
            if cause is None:  # else it follows from the cause
                raise

    def follow(self) -> None:
        """Run the methods that rank 0 sends, until it closes. Raises TrainerError if it dies."""
        work = ""
        while work != "_close":
            work, args = self.ranks.receive()
            self.run_part(work, args, {})
        self._leave()

    def run_part(self, work: str, args: Sequence[Any], local: Mapping[str, Any]) -> Any:
        """Run this rank's part of a common method, which must end before the ranks' deadline."""
        self.ranks.use_this_thread()
        name = work.strip("_")
        start = time.perf_counter()
        with self.ranks.deadline(f"doing the common {name}"), self.explaining(name):
            method = getattr(type(self), work).__wrapped__  # the method without its decorator
            result = method(self, *args, **local)
        note(name, start, who=f"trainer, rank {self.ranks.rank}")
        return result

    @abstractmethod
    def explaining(self, work: str) -> contextlib.AbstractContextManager[None]:
        """Raise an error of the work within as an error that names a remedy."""

    @abstractmethod
    def release(self) -> None:
        """Release this rank's resources; the ranks do it together."""

    def close(self) -> None:
        """Release all ranks. After a failed method, only a single rank can be released."""
        if self.refusal in ("", AWAY):
            self.refusal = ""
            self._close()
            self.refusal = CLOSED
            self._leave()
        elif self.refusal == BROKEN and self.owns_ranks and self.ranks.size == 1:
            self.ranks.destroy()  # this process may train again

    @on_all_ranks
    def _close(self) -> None:
        self.release()

    def _leave(self) -> None:
        if self.owns_ranks:
            self.ranks.close()


@contextlib.contextmanager
def deferring(sink: Sink) -> Iterator[Sink]:
    """Wrap a sink so that its first error is raised at the end.

    The other ranks gather every bucket together with rank 0, which must not leave them early.
    """
    errors: list[Exception] = []

    def take(bucket: Any) -> None:
        if not errors:
            try:
                sink(bucket)
            except Exception as error:  # noqa: BLE001 - raised below
                errors.append(error)

    yield take
    if errors:
        raise errors[0]
