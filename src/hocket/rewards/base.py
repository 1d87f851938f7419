"""Register reward functions, check the options of the config against them, and read their results.

A function gets its arguments by name, and only those of `_ARGUMENTS` that it names; every other argument is an option,
set in the config beside the weight (`vowels: {weight: 1.0, share: 0.4}`). It returns a number, a dict of named numbers
that add up to its value, or a hocket.types.Score. An exception, None, and a number that is not finite make the
rollout's score an error; they never count as 0.
"""

import dataclasses
import importlib.util
import inspect
import math
import numbers
import traceback
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

from hocket.errors import ConfigError
from hocket.registry import Registry, check_options
from hocket.types import Rollout, Score

F = TypeVar("F", bound=Callable[..., Any])
Runs = Literal["inline", "async", "worker"]  # in this process and thread, in the event loop, in a worker process

MAX_TEXT = 2000  # characters of an error, or of the name of a part

_ARGUMENTS: dict[str, Callable[[Rollout], Any]] = {
    "completion": lambda rollout: rollout.text,  # what the policy wrote, without the end-of-sequence token
    "opening": lambda rollout: rollout.sequences[-1].opening,  # of a thought, before the completion: "<think>\n"
    "prompt": lambda rollout: rollout.prompt.text,  # of the last user message, or the plain prompt
    "messages": lambda rollout: rollout.prompt.messages,  # the whole chat; None for a plain prompt
    "answer": lambda rollout: rollout.prompt.answer,  # the reference answer, or None
    "token_ids": lambda rollout: tuple(  # sampled in the whole episode, end-of-sequence tokens included
        t for one in rollout.sequences for t, sampled in zip(one.token_ids, one.mask, strict=True) if sampled
    ),
    "finish_reason": lambda rollout: rollout.finish_reason,  # "stop", "length" or "abort"
    "meta": lambda rollout: rollout.prompt.meta,  # the row's other columns
    "rollout": lambda rollout: rollout,
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """A registered function; `bind` adds its weight, its options and the arguments that it takes from the rollout."""

    name: str
    function: Callable[..., Any]
    runs: Runs
    imports: tuple[str, ...]  # packages that it needs beyond hocket's own
    weight: float = 1.0
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    asks_for: tuple[str, ...] = ()

    def arguments(self, rollout: Rollout) -> dict[str, Any]:
        return {name: _ARGUMENTS[name](rollout) for name in self.asks_for} | dict(self.options)


REWARDS: Registry[Reward] = Registry("reward")


def reward(name: str, *, inline: bool = False, imports: tuple[str, ...] = ()) -> Callable[[F], F]:
    """Decorate a function to register it as the reward `name`.

    A plain function is called in a worker process, which can be killed if it hangs, and which loads `imports` before
    the first call; `inline`: in the training process, without a deadline. An async one is called in the event loop.
    """

    def add(function: F) -> F:
        runs: Runs = "async" if inspect.iscoroutinefunction(function) else "inline" if inline else "worker"
        REWARDS.register(name)(Reward(name=name, function=function, runs=runs, imports=imports))
        return function

    return add


def bind(name: str, weight: float, options: Mapping[str, Any]) -> Reward:
    """Return the reward `name` with its options; raise ConfigError if it, a package or an option is unknown."""
    found = REWARDS.get(name)
    for package in found.imports:
        if importlib.util.find_spec(package) is None:
            raise ConfigError(f"reward {name!r} needs the package {package}, which is not installed")
    signature, called = inspect.signature(found.function), f"reward {name}"
    if {"prompts", "completions"} & signature.parameters.keys():
        advice = "name its arguments prompt and completion, return one number; meta has the row's other columns"
        raise ConfigError(f"{called}{signature} takes a batch, but here it scores one rollout: {advice}")
    if taken := _ARGUMENTS.keys() & options.keys():
        raise ConfigError(f"{called}: {min(taken)!r} comes from the rollout and can't be set as an option")
    check_options(called, signature, options, section=f"rewards.functions.{name}", keys=_ARGUMENTS)
    asks_for = tuple(argument for argument in signature.parameters if argument in _ARGUMENTS)
    return dataclasses.replace(found, weight=weight, options=dict(options), asks_for=asks_for)


def call(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Score:
    """Return the score that a plain function gives; an exception is an error in it."""
    try:
        return as_score(function(**arguments))
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a reward raises is the rollout's error
        return failure(error)


def as_score(returned: Any) -> Score:
    """Return the unweighted score for a function's return value; an error if that is no finite number."""
    if isinstance(returned, Score) and returned.error is not None:
        return no_score(_plain(returned.error))
    total, parts = (returned.total, returned.parts) if isinstance(returned, Score) else (returned, {})
    try:
        if isinstance(returned, Mapping):
            if not returned:
                raise ValueError("returned no parts")
            total, parts = math.fsum(map(_number, returned.values())), returned
        return Score(total=_number(total), parts={_plain(name): _number(value) for name, value in parts.items()})
    except ValueError as error:
        return no_score(str(error))


def no_score(error: str, parts: Mapping[str, float] | None = None) -> Score:
    """Return the score of a rollout that has none, for this reason."""
    return Score(total=math.nan, parts=parts or {}, error=_plain(error))


def failure(error: BaseException) -> Score:
    """Return the score of a function that raised; the error names the line."""
    *_, (frame, line) = traceback.walk_tb(error.__traceback__)
    text = _plain(error)[: MAX_TEXT // 2]
    return no_score(f"{type(error).__name__}: {text} ({frame.f_code.co_filename}:{line})")


def _plain(value: object) -> str:
    """Return its text as files and the console can take it: not too much, no half surrogate pair."""
    try:
        return str(value)[:MAX_TEXT].encode("utf-8", "replace").decode()
    except Exception:  # noqa: BLE001 - code of others, too
        return f"a {type(value).__name__} without a text"


def _number(value: Any) -> float:
    if not isinstance(value, numbers.Real):
        raise ValueError(f"returned {'None' if value is None else type(value).__name__} instead of a number")
    if not math.isfinite(value):
        raise ValueError(f"returned {float(value)}, which is not a finite number")
    return float(value)
