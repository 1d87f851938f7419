"""One object on every rank: rank 0 calls its methods, and the other ranks run the same calls in `follow`."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from hocket.errors import TrainerError
from hocket.trainer.ranks import Ranks

O = TypeVar("O", bound="OnAllRanks")  # noqa: E741
P = ParamSpec("P")
R = TypeVar("R")
_METHODS: dict[str, Callable[..., Any]] = {}  # those that run on every rank; `follow` finds them here


def on_all_ranks(
    *, refuse: Callable[..., None] = lambda *args: None
) -> Callable[[Callable[Concatenate[O, P], R]], Callable[Concatenate[O, P], R]]:
    """Make a method run on every rank when rank 0 calls it.

    `refuse` checks the arguments on rank 0 before the others start, so that its error leaves all ranks usable.
    """

    def decorate(method: Callable[Concatenate[O, P], R]) -> Callable[Concatenate[O, P], R]:
        name = method.__name__
        _METHODS[name] = method

        @functools.wraps(method)
        def call(self: O, /, *args: P.args, **kwargs: P.kwargs) -> R:
            self.check_usable(name)
            refuse(self, *args, **kwargs)
            self.ranks.send((name, args, kwargs))
            result: R = self.run_common(name, args, kwargs)
            return result

        return call

    return decorate


class OnAllRanks:
    """Base of a class with methods under `on_all_ranks`. Any thread may call them, one at a time.

    An error within such a method ends the run: this rank raises it, and the other ranks end with the same cause.

    Args:
        ranks: an existing connection to share, which `close` leaves open; default: a new one.
        timeout_s: deadline of the waits of a new one.
    """

    def __init__(self, ranks: Ranks | None, *, timeout_s: float) -> None:
        self._owns_ranks = ranks is None
        self._closed = self._broken = False
        self.ranks = ranks or Ranks(timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the only one that may call methods other than `follow`."""
        return self.ranks.is_main

    def follow(self) -> None:
        """Run each call of rank 0 on this rank too, until rank 0 closes. Raise TrainerError if rank 0 dies."""
        while not self._closed:
            self.run_common(*self.ranks.receive())

    def close(self) -> None:
        """Release the other ranks and end communication; does nothing after a failure within the common work."""
        if self.is_main and not (self._closed or self._broken):
            self._close()

    @on_all_ranks()
    def _close(self) -> None:
        self.release()
        if self._owns_ranks:
            self.ranks.close()
        self._closed = True

    def release(self) -> None:
        """Release what this rank holds, before `close` ends communication."""

    def check_usable(self, name: str) -> None:
        """Raise TrainerError where the method can't run now."""
        if self._closed or self._broken:
            raise TrainerError(f"the trainer can't {in_words(name)}: it is closed, or broke in an earlier call")
        if not self.is_main:
            raise TrainerError(f"rank {self.ranks.rank} called {in_words(name)}; ranks above 0 only follow")

    def explain(self, error: Exception, name: str, args: tuple[Any, ...]) -> Exception:
        """Return the error to raise for one of a common method: the same, or one that says more."""
        del name, args
        return error

    def run_common(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run this rank's part of a method under `on_all_ranks`."""
        self._broken = True  # until the work has ended well
        self.ranks.use_this_thread()
        with self.ranks.deadline(f"doing the common {in_words(name)}"):
            try:
                result = _METHODS[name](self, *args, **kwargs)
            except Exception as error:
                explained = self.explain(error, name, args)
                if explained is error:
                    raise
                raise explained from error
        self._broken = False
        return result


def in_words(name: str) -> str:
    """Return a method's name for messages: "_step" as "step"."""
    return name.strip("_").replace("_", " ")
