"""What a reward is: a function registered under a name, the arguments it may ask for, the values it may return.

    from hocket.rewards import reward

    @reward("vowels")
    def vowels(completion, answer, share=0.5):
        ...
        return 1.0

Arguments are given by name, and only those the function names:

    completion      text that the policy wrote, without the end-of-sequence token
    prompt          text of the last user message, or the plain prompt
    messages        the whole chat, or None for a plain prompt
    answer          the reference answer, or None
    token_ids       tokens that the policy sampled in the whole episode, end-of-sequence tokens included
    finish_reason   "stop", "length" or "abort"
    meta            the row's other columns
    rollout         everything (hocket.types.Rollout)

Every other argument is an option, set in the config beside the weight: `vowels: {weight: 1.0, share: 0.4}`. The
function returns a number, a dict of named numbers that add up to its value, or a hocket.types.Score. What it raises,
None, and a number that is not finite make the rollout's score an error; they never count as 0.
"""

import dataclasses
import importlib.util
import inspect
import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

from hocket.errors import ConfigError
from hocket.registry import Registry, nearest
from hocket.types import Rollout, Score

F = TypeVar("F", bound=Callable[..., Any])

_ARGUMENTS: dict[str, Callable[[Rollout], Any]] = {
    "completion": lambda rollout: rollout.text,
    "prompt": lambda rollout: rollout.prompt.text,
    "messages": lambda rollout: rollout.prompt.messages,
    "answer": lambda rollout: rollout.prompt.answer,
    "token_ids": lambda rollout: tuple(
        t for one in rollout.sequences for t, sampled in zip(one.token_ids, one.mask, strict=True) if sampled
    ),
    "finish_reason": lambda rollout: rollout.finish_reason,
    "meta": lambda rollout: rollout.prompt.meta,
    "rollout": lambda rollout: rollout,
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """A registered reward function.

    Attributes:
        runs: where it is called: in this process and thread, in the event loop, or in a worker process.
        imports: packages that it needs beyond hocket's own.
    """

    name: str
    function: Callable[..., Any]
    runs: Literal["inline", "async", "worker"]
    imports: tuple[str, ...]


REWARDS: Registry[Reward] = Registry("reward")


def reward(name: str, *, inline: bool = False, imports: tuple[str, ...] = ()) -> Callable[[F], F]:
    """Decorator that registers a function as the reward `name`.

    A plain function is called in a worker process, so that it can be ended when it hangs: define it at the top level
    of its file. An async one is called in the event loop.

    Args:
        inline: call a plain function in the training process, without a deadline: faster, for what can't hang.
        imports: packages that a worker process loads before its first call.
    """

    def add(function: F) -> F:
        runs: Literal["inline", "async", "worker"] = "inline" if inline else "worker"
        if inspect.iscoroutinefunction(function):
            runs = "async"
        REWARDS.register(name)(Reward(name=name, function=function, runs=runs, imports=imports))
        return function

    return add


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BoundReward:
    """A reward with its weight, its options, and what it asks for of the rollout."""

    reward: Reward
    weight: float
    options: Mapping[str, Any]
    asks_for: tuple[str, ...]

    def arguments(self, rollout: Rollout) -> dict[str, Any]:
        """Returns what to call the function with."""
        return {name: _ARGUMENTS[name](rollout) for name in self.asks_for} | dict(self.options)


def bind(name: str, weight: float, options: Mapping[str, Any]) -> BoundReward:
    """Returns the reward `name` with its options.

    Raises:
        ConfigError: there is no such reward, it needs a package that is missing, or its options are wrong.
    """
    found = REWARDS.get(name)
    for package in found.imports:
        if importlib.util.find_spec(package) is None:
            raise ConfigError(f"reward {name!r} needs the package {package}, which is not installed")
    signature = inspect.signature(found.function)
    called = f"{name}{signature}"
    parameters = signature.parameters.values()
    if any(p.kind in (p.POSITIONAL_ONLY, p.VAR_POSITIONAL) for p in parameters):
        raise ConfigError(f"reward {called}: arguments are given by name, so none may be positional-only or starred")
    named = {p.name: p for p in parameters if p.kind is not p.VAR_KEYWORD}
    for option in options:
        if option in _ARGUMENTS:
            raise ConfigError(f"reward {called}: {option!r} comes from the rollout and can't be set as an option")
        if option not in named and len(named) == len(signature.parameters):  # there is no **kwargs
            raise ConfigError(f"reward {called} has no option {option!r}{nearest(option, named)}")
    for parameter in named.values():
        if parameter.default is parameter.empty and parameter.name not in _ARGUMENTS and parameter.name not in options:
            raise ConfigError(
                f"reward {called} needs the option {parameter.name!r}: set rewards.functions.{name}.{parameter.name}; "
                f"arguments from the rollout are {', '.join(_ARGUMENTS)}"
            )
    asks_for = tuple(argument for argument in named if argument in _ARGUMENTS)
    return BoundReward(reward=found, weight=weight, options=dict(options), asks_for=asks_for)


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """What one reward gave one rollout: a finite value and named finite parts of it, or an error."""

    value: float = math.nan
    parts: Mapping[str, float] = dataclasses.field(default_factory=dict)
    error: str | None = None


def outcome(returned: Any) -> Outcome:
    """Returns what a reward function's return value means."""
    try:
        if isinstance(returned, Score):
            if returned.error is not None:
                return Outcome(error=returned.error)
            return Outcome(_number(returned.total), _numbers(returned.parts))
        if isinstance(returned, Mapping):
            if not returned:
                raise ValueError("returned no parts")
            parts = _numbers(returned)
            return Outcome(math.fsum(parts.values()), parts)
        return Outcome(_number(returned))
    except ValueError as error:
        return Outcome(error=str(error))


def failure(error: Exception) -> Outcome:
    """Returns the outcome of a function that raised, with the line that did."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    line = f" ({trace.tb_frame.f_code.co_filename}:{trace.tb_lineno})" if trace is not None else ""
    return Outcome(error=f"{type(error).__name__}: {error}{line}")


def _number(value: Any) -> float:
    if not isinstance(value, numbers.Real):
        raise ValueError(f"returned {'None' if value is None else type(value).__name__} instead of a number")
    if not math.isfinite(value):
        raise ValueError(f"returned {float(value)}, which is not a finite number")
    return float(value)


def _numbers(parts: Mapping[Any, Any]) -> dict[str, float]:
    return {str(name): _number(value) for name, value in parts.items()}
