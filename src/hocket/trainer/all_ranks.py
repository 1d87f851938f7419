"""Run a method on all ranks when rank 0 calls it.

Training is collective: every rank takes part in the sums of gradients and in gathering weights.
Only rank 0 knows what comes next. For each method that is marked `@on_all_ranks`, it sends the
other ranks the name and the arguments. They wait in `follow`, and call the method, too:

    rank 0:  step() calls _update(rows)  ->  sends each ("_update", its rows)  ->  runs _update
    rank 1:  follow() waits for work     ->  receives ("_update", its rows)    ->  runs _update
"""

import contextlib
import functools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

from hocket.common.tasks import note
from hocket.errors import TrainerError
from hocket.trainer.ranks import Ranks

Sink = Callable[[Any], None]
"""Takes one bucket: [(name, tensor)] of weights, {name: tensor} of a checkpoint."""

# Values of `Together.refusal`: why no method can be called now.
AWAY = "it is off the GPU; call onload() first"
BROKEN = "it broke in an earlier call"
CLOSED = "it is closed"


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
