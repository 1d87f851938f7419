"""Register rewards, and bind them to the config.

A reward is a function, or a class whose instances are called, and set up and torn down as context managers. It scores
one rollout, or a whole group where it names `completions` or `rollouts`. It gets its arguments by name, and only those
of `_ARGUMENTS` that it names; every other one is an option of the config, which a class gets when it is made.
"""

import dataclasses
import importlib.util
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from hocket.common.registry import Registry, options_of, try_out
from hocket.errors import ConfigError
from hocket.types import Rollout

if TYPE_CHECKING:
    from hocket.config import RewardSpec  # its import would take most of a worker's start

F = TypeVar("F", bound=Callable[..., Any])
Runs = Literal["inline", "async", "worker"]  # in this process and thread, in the event loop, in a worker process

_ARGUMENTS: dict[str, Callable[[Rollout], Any]] = {
    "completion": attrgetter("text"),  # what the policy wrote, without the end-of-sequence token
    "opening": lambda rollout: rollout.sequences[-1].opening,  # of a thought, before the completion: "<think>\n"
    "prompt": attrgetter("prompt.text"),  # of the last user message, or the plain prompt
    "messages": attrgetter("prompt.messages"),  # the whole chat; None for a plain prompt
    "answer": attrgetter("prompt.answer"),  # the reference answer, or None
    "token_ids": lambda rollout: sampled_ids(rollout),
    "finish_reason": attrgetter("finish_reason"),  # "stop", "length" or "abort"
    "meta": attrgetter("prompt.meta"),  # the row's other columns
    "rollout": lambda rollout: rollout,
}
_OF_PROMPT = {"prompt", "messages", "answer", "meta"}  # the same for all rollouts of a group
_OF_GROUP: dict[str, Callable[[Sequence[Rollout]], Any]] = {
    "completions": lambda rollouts: [rollout.text for rollout in rollouts],  # of those that have not failed
    "rollouts": list,
}
_ROW = "; the row's answer is the argument answer, its other columns are in meta"


class RetryError(Exception):
    """Says that an async reward may be called again; `retry_after`: seconds, None: exponential back-off."""

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


def sampled_ids(rollout: Rollout) -> tuple[int, ...]:
    """Return the tokens sampled in the whole episode."""
    pairs = (pair for one in rollout.sequences for pair in zip(one.token_ids, one.mask, strict=True))
    return tuple(int(token) for token, sampled in pairs if sampled)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """A registered function or class; `bind` adds what the config says and the arguments that it takes."""

    name: str
    function: Callable[..., Any]
    runs: Runs
    imports: tuple[str, ...]  # packages that it needs beyond hocket's own
    own_deadline: bool = False  # of an async one: rewards.timeout_s is not for it
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    asks_for: tuple[str, ...] = ()
    max_concurrent: int | None = None
    retries: int = 0

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
        of_group = {name: of(rollouts) for name, of in _OF_GROUP.items() if name in self.asks_for}
        return of_group | {name: _ARGUMENTS[name](rollouts[0]) for name in self.asks_for if name not in of_group}


REWARDS: Registry[Reward] = Registry(
    "reward",
    code="hocket.rewards.code",
    http="hocket.rewards.http",
    judge="hocket.rewards.judge",
    judge_ranking="hocket.rewards.judge",
    reward_model="hocket.rewards.model",
)


def reward(
    name: str, *, inline: bool = False, imports: tuple[str, ...] = (), own_deadline: bool = False
) -> Callable[[F], F]:
    """Decorate a function, or a class with `__call__`, to register it as the reward `name`.

    A plain one is called in a worker process, which can be killed if it hangs, and which loads `imports` first;
    `inline`: in the training process, without a deadline. An async one is called in the event loop; `own_deadline`: it
    sees to that itself. If an async one raises RewardError, the run ends with the reason.
    """

    def add(function: F) -> F:
        called = function.__call__ if inspect.isclass(function) else function
        runs: Runs = "inline" if inline else "worker"
        if inspect.iscoroutinefunction(called):
            runs = "async"
        made = Reward(name=name, function=function, runs=runs, imports=imports, own_deadline=own_deadline)
        REWARDS.register(name)(made)
        return function

    return add


def bind(name: str, spec: "RewardSpec") -> Reward:
    """Return the reward `name` with what its section says; raise ConfigError for an unknown name, package or option.

    A class that takes the key `retries` makes its calls again itself.
    """
    found = REWARDS.get(name)
    for package in found.imports:
        if importlib.util.find_spec(package) is None:
            raise ConfigError(f"reward {name!r} needs the package {package}, which is not installed")
    of_async = spec.model_dump(include={"max_concurrent", "retries"}, exclude_defaults=True)
    if of_async and found.runs != "async":
        raise ConfigError(f"reward {name!r} is not async: leave its {' and '.join(of_async)} out")
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
    options = dict(spec.model_extra or {})
    retries = spec.retries
    reserved = set(type(spec).model_fields) & inspect.signature(found.function).parameters.keys()
    if found.is_class and "retries" in reserved:
        options["retries"] = retries
        reserved.remove("retries")
        retries = 0
    if reserved:
        raise ConfigError(f"{called}: {min(reserved)!r} is a key of every reward's section; rename the argument")
    if found.is_class:
        options = read(found.function, options)
        read(scores, {}, keys=known)  # a call gets none
    else:
        if known & options.keys():
            taken = min(known & options.keys())
            raise ConfigError(f"{called}: {taken!r} comes from the rollout and can't be set as an option")
        options = read(scores, options, keys=known, row=_ROW)
    bound = dataclasses.replace(
        found,
        options=options,
        asks_for=tuple(key for key in named if key in known),
        max_concurrent=spec.max_concurrent,
        retries=retries,
    )
    if found.is_class and found.runs != "worker":  # set up where it is used; those of workers may be large
        try_out(bound.made, called, f"rewards.functions.{name}")
    return bound
