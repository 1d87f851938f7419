"""Register rewards, and bind them to the config; arguments that no table below has are options (docs/rewards.md)."""

import dataclasses
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import compress
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from hocket.common.registry import Registry, need, options_of, try_out
from hocket.errors import ConfigError
from hocket.types import Rollout

if TYPE_CHECKING:
    from hocket.config import RewardSpec  # would take most of a worker's start

F = TypeVar("F", bound=Callable[..., Any])
Runs = Literal[
    "inline", "async", "worker"
]  # in this process and thread, in the event loop, in a worker process


def _sampled_ids(rollout: Rollout) -> tuple[int, ...]:
    return tuple(
        int(token) for one in rollout.sequences for token in compress(one.token_ids, one.mask)
    )


def _decoded(rollout: Rollout) -> list[Any]:
    from hocket.common.vision import decoded

    return [decoded(image.data) for image in rollout.prompt.images]


_OF_PROMPT: dict[str, Callable[[Any], Any]] = {  # the same for all rollouts of a group
    "prompt": attrgetter("prompt.text"),  # of the last user message, or the plain prompt
    "messages": attrgetter("prompt.messages"),  # the whole chat; None for a plain prompt
    "answer": attrgetter("prompt.answer"),  # the reference, or None
    "meta": attrgetter("prompt.meta"),  # the row's other columns
    "images": _decoded,  # from Pillow
}
_OF_ONE: dict[str, Callable[[Any], Any]] = {
    "completion": attrgetter("text"),  # without the end-of-sequence token
    "opening": lambda rollout: (
        rollout.sequences[-1].opening
    ),  # of a thought, before the completion: "<think>\n"
    "token_ids": _sampled_ids,  # in the whole episode
    "finish_reason": attrgetter("finish_reason"),  # "stop", "length" or "abort"
    "rollout": lambda rollout: rollout,
}
_OF_GROUP: dict[str, Callable[[Sequence[Rollout]], Any]] = {
    "completions": lambda rollouts: [
        rollout.text for rollout in rollouts
    ],  # of those that have not failed
    "rollouts": list,
}
_OF_FIRST = _OF_PROMPT | _OF_ONE
_ELSEWHERE = {  # argument of another program's rewards → here
    **dict.fromkeys(
        ("response", "output", "generation", "prediction", "solution_str", "generated_text"),
        "completion",
    ),
    **dict.fromkeys(("responses", "outputs", "generations"), "completions"),
    **dict.fromkeys(("ground_truth", "label", "reference", "gold", "expected"), "answer"),
    **dict.fromkeys(("question", "query"), "prompt"),
    "extra_info": "meta",
}
_ROW = "; the row's answer is the argument answer, its other columns are in meta"


class RetryError(Exception):
    """Says that an async reward may be called again; `retry_after`: seconds, None: exponential back-off."""

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


def named(rollout: Rollout) -> dict[str, Any]:
    """Make the parameters that a reward can name of a rollout, as values of JSON; images are data URLs."""
    told = {
        name: of(rollout) for name, of in _OF_FIRST.items() if name not in ("rollout", "images")
    }
    if images := rollout.prompt.images:
        from hocket.common.vision import data_url

        told["images"] = [data_url(image.data) for image in images]
    return told


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """A registered function or class, and what the config says of it."""

    name: str
    function: Callable[..., Any]
    runs: Runs
    imports: tuple[str, ...]
    own_deadline: bool
    check: Callable[..., None] | None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    asks_for: Collection[str] = ()
    of_group: bool = False  # it scores a group in one call
    max_concurrent: int | None = None
    retries: int = 0

    @property
    def is_class(self) -> bool:
        return inspect.isclass(self.function)

    @property
    def called(self) -> Callable[..., Any]:
        """What has the signature of a call."""
        return (
            partial(self.function.__call__, None)
            if inspect.isclass(self.function)
            else self.function
        )

    @property
    def needs_answer(self) -> bool:
        """Whether it takes the row's answer, and neither its default nor its annotation says that there may be none."""
        answer = inspect.signature(self.called).parameters.get("answer")
        if answer is None or answer.default is not answer.empty:
            return False
        return not any(word in str(answer.annotation) for word in ("None", "Optional"))

    def made(self) -> Callable[..., Any]:
        """Return the function with its options, or a new instance."""
        return (
            self.function(**self.options)
            if self.is_class
            else partial(self.function, **self.options)
        )

    def arguments(self, rollouts: Sequence[Rollout]) -> dict[str, Any]:
        return {
            name: _OF_GROUP[name](rollouts) if name in _OF_GROUP else _OF_FIRST[name](rollouts[0])
            for name in self.asks_for
        }


REWARDS: Registry[Reward] = Registry(
    "reward",
    code="hocket.extras.code.reward",
    gym="hocket.extras.gym.reward",
    http="hocket.extras.http_reward.reward",
    judge="hocket.extras.judge",
    judge_ranking="hocket.extras.judge",
    reward_model="hocket.extras.reward_model",
)


def reward(
    name: str,
    *,
    inline: bool = False,
    imports: tuple[str, ...] = (),
    own_deadline: bool = False,
    check: Callable[..., None] | None = None,
) -> Callable[[F], F]:
    """Register a function, or a class with `__call__`, as the reward `name` (decorator).

    `inline`: call it in this process, without a deadline; `imports`: packages that a worker loads first;
    `own_deadline`: an async one sees to its deadline itself; `check`: refuses options that this machine can't run.
    RewardError of an async one ends the run.
    """

    register = REWARDS.register(name)

    def add(function: F) -> F:
        runs: Runs = "inline" if inline else "worker"
        made = Reward(
            name=name,
            function=function,
            runs=runs,
            imports=imports,
            own_deadline=own_deadline,
            check=check,
        )
        if inspect.iscoroutinefunction(made.called):
            made = dataclasses.replace(made, runs="async")
        register(made)
        return function

    return add


def bind(name: str, spec: "RewardSpec") -> Reward:
    """Return the reward `name` as its section says. Raise ConfigError for an unknown name, package or option.

    An async one that takes the key `retries` makes its calls again itself.
    """
    found = REWARDS.get(name, "rewards.functions or eval.reward: ")
    called = f"reward {name}"
    section = f"rewards.functions.{name}"
    for package in found.imports:
        need(called, package)
    of_async = spec.model_dump(include={"max_concurrent", "retries"}, exclude_defaults=True)
    if of_async and found.runs != "async":
        raise ConfigError(f"reward {name!r} is not async: leave its {' and '.join(of_async)} out")
    asks_for = inspect.signature(found.called).parameters.keys()
    of_group = not asks_for.isdisjoint(_OF_GROUP)
    if "prompts" in asks_for or (of_group and not asks_for.isdisjoint(_OF_ONE)):
        advice = "name its arguments prompt and completion, return one number; meta has the row's other columns"
        groups = (
            "of a group, name prompt, answer, meta and completions or rollouts, and return a list"
        )
        raise ConfigError(
            f"{called} takes a batch, but here it scores one rollout: {advice}; {groups}"
        )
    known = _OF_PROMPT.keys() | (_OF_GROUP if of_group else _OF_ONE)
    fields = set(type(spec).model_fields)
    options = spec.model_dump(exclude=fields)
    reserved = fields & inspect.signature(found.function).parameters.keys()
    more: dict[str, Any] = {"max_concurrent": spec.max_concurrent, "retries": spec.retries}
    if found.runs == "async" and "retries" in reserved:
        reserved.remove("retries")
        options["retries"] = more.pop("retries")
    if reserved:
        raise ConfigError(
            f"{called}: {min(reserved)!r} is a key of every reward's section; rename the argument"
        )
    if found.is_class:
        options = options_of(called, found.function, options, section=section)
        options_of(
            called, found.called, {}, section=section, keys=known, elsewhere=_ELSEWHERE
        )  # a call gets none
    else:
        if taken := known & options.keys():
            raise ConfigError(
                f"{called}: {min(taken)!r} comes from the rollout and can't be set as an option"
            )
        options = options_of(
            called,
            found.called,
            options,
            section=section,
            keys=known,
            row=_ROW,
            elsewhere=_ELSEWHERE,
        )
    bound = dataclasses.replace(
        found, options=options, asks_for=asks_for & known, of_group=of_group, **more
    )
    if found.check is not None:
        found.check(**options)
    if (
        found.is_class and found.runs != "worker"
    ):  # set up where it is used; those of workers may be large
        try_out(bound.made, called, section)
    return bound
