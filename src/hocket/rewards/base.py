"""Register rewards, and bind them to the options of the config.

A reward is a function, or a class whose instances are called and set up and torn down as context managers. It scores
one rollout, or a whole group where it names `completions` or `rollouts`. It runs inline, or async (at most
`max_concurrent` at once; a RetryError is tried again), or in a worker process (every other one).

A function gets its arguments by name, and only those of `_ARGUMENTS` that it names; every other argument is an option,
set in the config beside the weight (`vowels: {weight: 1.0, share: 0.4}`); a class gets its options when it is made. It
returns a number, a dict of named numbers that add up to its value, or a hocket.types.Score; of a group, one of these
per rollout. An exception, None, and a number that is not finite make the rollout's score an error; they never count
as 0.
"""

import dataclasses
import importlib.util
import inspect
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, Literal, TypeVar

from hocket.common.registry import Registry, options_of, try_out
from hocket.errors import ConfigError
from hocket.rewards.scores import as_scores, failure
from hocket.types import Rollout, Score

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")
Runs = Literal["inline", "async", "worker"]  # in this process and thread, in the event loop, in a worker process

_ARGUMENTS: dict[str, Callable[[Rollout], Any]] = {
    "completion": lambda rollout: rollout.text,  # what the policy wrote, without the end-of-sequence token
    "opening": lambda rollout: rollout.sequences[-1].opening,  # of a thought, before the completion: "<think>\n"
    "prompt": lambda rollout: rollout.prompt.text,  # of the last user message, or the plain prompt
    "messages": lambda rollout: rollout.prompt.messages,  # the whole chat; None for a plain prompt
    "answer": lambda rollout: rollout.prompt.answer,  # the reference answer, or None
    "token_ids": lambda rollout: sampled_ids(rollout),
    "finish_reason": lambda rollout: rollout.finish_reason,  # "stop", "length" or "abort"
    "meta": lambda rollout: rollout.prompt.meta,  # the row's other columns
    "rollout": lambda rollout: rollout,
}
_OF_PROMPT = {"prompt", "messages", "answer", "meta"}  # the same for all rollouts of a group
_OF_GROUP: dict[str, Callable[[Sequence[Rollout]], Any]] = {
    "completions": lambda rollouts: [rollout.text for rollout in rollouts],  # of those that have not failed
    "rollouts": list,
}
_ROW = "; the row's answer is the argument answer, its other columns are in meta"
SPENT: ContextVar[Counter[str]] = ContextVar("spent")  # by the attempts of one call of an async reward


class RetryError(Exception):
    """Says that an async reward may be called again; `retry_after`: seconds, None: exponential back-off."""

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


def sampled_ids(rollout: Rollout) -> tuple[int, ...]:
    """Return the tokens sampled in the whole episode, end-of-sequence tokens included."""
    pairs = (pair for one in rollout.sequences for pair in zip(one.token_ids, one.mask, strict=True))
    return tuple(int(token) for token, sampled in pairs if sampled)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """A registered function or class; `bind` adds its options and the arguments that it takes from the rollout."""

    name: str
    function: Callable[..., Any]
    runs: Runs
    imports: tuple[str, ...]  # packages that it needs beyond hocket's own
    own_deadline: bool = False  # of an async one: rewards.timeout_s is not for it
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    asks_for: tuple[str, ...] = ()

    @property
    def is_class(self) -> bool:
        return inspect.isclass(self.function)

    @property
    def of_group(self) -> bool:
        """Whether it scores all rollouts of a group in one call."""
        return not _OF_GROUP.keys().isdisjoint(self.asks_for)

    def made(self) -> Callable[..., Any]:
        """Return what is called: a new instance of a class, or the function, with the options."""
        return self.function(**self.options) if self.is_class else partial(self.function, **self.options)

    def arguments(self, *rollouts: Rollout) -> dict[str, Any]:
        """Return what a call gets of one rollout, or of those of a group."""
        of_group = {name: of(rollouts) for name, of in _OF_GROUP.items() if name in self.asks_for}
        return of_group | {name: _ARGUMENTS[name](rollouts[0]) for name in self.asks_for if name not in of_group}


REWARDS: Registry[Reward] = Registry("reward")


def reward(
    name: str, *, inline: bool = False, imports: tuple[str, ...] = (), own_deadline: bool = False
) -> Callable[[F], F]:
    """Decorate a function, or a class with `__call__`, to register it as the reward `name`.

    A plain one is called in a worker process, which can be killed if it hangs, and which loads `imports` before the
    first call; `inline`: in the training process, without a deadline. An async one is called in the event loop;
    `own_deadline`: it sees to that itself. If an async one raises RewardError, the run ends with the reason.
    """

    def add(function: F) -> F:
        called = function.__call__ if inspect.isclass(function) else function
        runs: Runs = "async" if inspect.iscoroutinefunction(called) else "inline" if inline else "worker"
        REWARDS.register(name)(
            Reward(name=name, function=function, runs=runs, imports=imports, own_deadline=own_deadline)
        )
        return function

    return add


def bind(name: str, options: Mapping[str, Any], reserved: Iterable[str] = ()) -> Reward:
    """Return the reward `name` with its options; raise ConfigError if it, a package or an option is unknown."""
    found = REWARDS.get(name)
    for package in found.imports:
        if importlib.util.find_spec(package) is None:
            raise ConfigError(f"reward {name!r} needs the package {package}, which is not installed")
    called = f"reward {name}"
    read = partial(options_of, called, section=f"rewards.functions.{name}")
    scores: Any = found.function
    if found.is_class:
        scores = partial(scores.__call__, None)
    named = inspect.signature(scores).parameters.keys()
    known = _OF_PROMPT | _OF_GROUP.keys() if named & _OF_GROUP.keys() else _ARGUMENTS.keys()
    if "prompts" in named or named & (_ARGUMENTS.keys() - known):
        advice = "name its arguments prompt and completion, return one number; meta has the row's other columns"
        groups = "of a group, name prompt, answer, meta and completions or rollouts, and return a list"
        raise ConfigError(f"{called} takes a batch, but here it scores one rollout: {advice}; {groups}")
    for key in inspect.signature(found.function).parameters.keys() & set(reserved):
        raise ConfigError(f"{called}: {key!r} is a key of every reward's section; rename the argument")
    if found.is_class:
        options = read(found.function, options)
        read(scores, {}, keys=known)  # a call gets none
    else:
        for key in known & options.keys():
            raise ConfigError(f"{called}: {key!r} comes from the rollout and can't be set as an option")
        options = read(scores, options, keys=known, row=_ROW)
    bound = dataclasses.replace(found, options=options, asks_for=tuple(key for key in named if key in known))
    if found.is_class and found.runs != "worker":  # set up where it is used; those of workers may be large
        try_out(bound.made, called, f"rewards.functions.{name}")
    return bound


class Ready(ExitStack):
    """Calls plain rewards; makes and enters the instance of a class when it is first called, leaves it when closed."""

    def __init__(self) -> None:
        super().__init__()
        self._functions: dict[str, Callable[..., Any]] = {}

    def __call__(self, reward: Reward, /, **arguments: Any) -> Any:
        if reward.name not in self._functions:
            made: Any = reward.made()
            self._functions[reward.name] = self.enter_context(made) if hasattr(made, "__enter__") else made
        return self._functions[reward.name](**arguments)


@contextmanager
def clocked(seconds: deque[float]) -> Iterator[None]:
    """Note what the body takes, but for what it takes to enter what is `queued`."""
    spent = SPENT.get(Counter())
    begun = time.perf_counter() - spent["queued"]
    try:
        yield
    finally:
        seconds.append(time.perf_counter() - spent["queued"] - begun)


@asynccontextmanager
async def queued(*gates: AbstractAsyncContextManager[T]) -> AsyncIterator[list[T]]:
    """Enter gates, one after the other; a call that waits there for others takes no longer by it."""
    begun = time.perf_counter()
    async with AsyncExitStack() as stack:
        entered = [await stack.enter_async_context(gate) for gate in gates]
        SPENT.get(Counter()).update({"queued": time.perf_counter() - begun})
        yield entered


def call(function: Callable[..., Any], arguments: Mapping[str, Any], size: int | None = None) -> list[Score]:
    """Return the score that a plain function gives, or those of a group of `size`; an exception is an error in it."""
    try:
        return as_scores(function(**arguments), size)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a reward raises is the rollout's error
        return [failure(error)] * (size or 1)
