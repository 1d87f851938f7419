"""Run a method on all ranks when rank 0 calls it.

Training is collective: every rank takes part in the sums of gradients and in gathering weights.
Only rank 0 knows what comes next. So it sends the others the name and the arguments of each method
that is marked `@on_all_ranks`, and they, in `follow`, call the same one:

    rank 0:  step() calls _update(shares)  ->  sends each ("_update", its share)  ->  runs _update
    rank 1:  follow() waits for work       ->  receives ("_update", its share)    ->  runs _update
"""

import contextlib
import functools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from hocket.common.tasks import note
from hocket.errors import TrainerError
from hocket.trainer.ranks import Ranks

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
        # Refused before the others start: the error leaves all ranks usable.
        if self.refusal:
            raise TrainerError(f"the trainer can't {work.strip('_')}: {self.refusal}")
        self.refusal = BROKEN  # until the work has ended well
        self.ranks.send([(work, _arguments_of(rank, args)) for rank in range(self.ranks.size)])
        result = self.run_part(work, _arguments_of(0, args), local)
        self.refusal = ""
        return result

    return call


def _arguments_of(rank: int, args: Sequence[Any]) -> list[Any]:
    return [arg[rank] if isinstance(arg, PerRank) else arg for arg in args]


class Together(ABC):
    """Base of what all ranks do together: rank 0 calls, the others follow, all leave at the end.

    An error within a common method ends all ranks.
    """

    def __init__(self, ranks: Ranks, *, owns_ranks: bool) -> None:
        self.ranks = ranks
        self.owns_ranks = owns_ranks  # whether they are closed with this
        # Why nothing can be done now; "": it can.
        self.refusal = ""
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
        """Do what rank 0 sends until it closes. Raise TrainerError if rank 0 dies."""
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
            method = getattr(type(self), work).__wrapped__  # what `on_all_ranks` decorates
            result = method(self, *args, **local)
        note(name, start, who=f"trainer, rank {self.ranks.rank}")
        return result

    @abstractmethod
    def explaining(self, work: str) -> contextlib.AbstractContextManager[None]:
        """Raise errors of the work within as others that say what to do about them."""

    @abstractmethod
    def release(self) -> None:
        """Release what this rank holds; the ranks do it together."""

    def close(self) -> None:
        """Release all ranks; after a failure in common work only a single one."""
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
