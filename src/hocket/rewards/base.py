"""Register rewards, and bind them to their section of the config (docs/how-to/rewards.md).

A reward names the arguments that it wants. The tables below say which of them the rollouts provide;
all other arguments are options that the user sets in the reward's section.
"""

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
    from hocket.config import RewardSpec  # its import would take most of a worker's start

F = TypeVar("F", bound=Callable[..., Any])

# Where a reward is called: in this process and thread, in the event loop, or in a worker process.
Runs = Literal["inline", "async", "worker"]


def _sampled_ids(rollout: Rollout) -> tuple[int, ...]:
    """Collect the token ids that the model sampled in all turns of the episode."""
    token_ids: list[int] = []
    for sequence in rollout.sequences:
        token_ids += map(int, compress(sequence.token_ids, sequence.mask))
    return tuple(token_ids)


def _decoded_images(rollout: Rollout) -> list[Any]:
    from hocket.common.vision import decoded  # only rewards that name `images` wait for its import

    return [decoded(image.data) for image in rollout.prompt.images]


# Arguments that are equal for all rollouts of a group.
_PROMPT_ARGUMENTS: dict[str, Callable[[Any], Any]] = {
    "prompt": attrgetter("prompt.text"),  # the text of the last user message, or the plain prompt
    "messages": attrgetter("prompt.messages"),  # the whole chat; None for a plain prompt
    "answer": attrgetter("prompt.answer"),  # the reference answer, or None
    "meta": attrgetter("prompt.meta"),  # the row's other columns
    "images": _decoded_images,  # images of Pillow
}
# Arguments that each rollout has for itself.
_ROLLOUT_ARGUMENTS: dict[str, Callable[[Any], Any]] = {
    "completion": attrgetter("text"),  # the text without the end-of-sequence token
    "opening": lambda rollout: rollout.sequences[-1].opening,  # "<think>\n", if the template opens
    "token_ids": _sampled_ids,  # the ids that were sampled in the whole episode
    "finish_reason": attrgetter("finish_reason"),  # "stop" or "length"
    "rollout": lambda rollout: rollout,
}
# Arguments of a reward that scores a whole group in one call; rollouts that failed are not in it.
_GROUP_ARGUMENTS: dict[str, Callable[[Sequence[Rollout]], Any]] = {
    "completions": lambda rollouts: [rollout.text for rollout in rollouts],
    "rollouts": list,
}
_SINGLE_ARGUMENTS = _PROMPT_ARGUMENTS | _ROLLOUT_ARGUMENTS

# Names that the rewards of other programs use for an argument, and its name here.
_ELSEWHERE = {
    "response": "completion",
    "output": "completion",
    "generation": "completion",
    "prediction": "completion",
    "solution_str": "completion",
    "generated_text": "completion",
    "responses": "completions",
    "outputs": "completions",
    "generations": "completions",
    "ground_truth": "answer",
    "label": "answer",
    "reference": "answer",
    "gold": "answer",
    "expected": "answer",
    "question": "prompt",
    "query": "prompt",
    "extra_info": "meta",
}
_ROW_ADVICE = "; the row's answer is the argument answer, its other columns are in meta"


class RetryError(Exception):
    """An error that an async reward raises to have its call repeated.

    The key `retries` of the reward says how often.

    Args:
        message: what went wrong.
        retry_after: seconds to wait; None for exponential back-off.

    Example: a reward that waits as long as a busy service asks for.

        import httpx

        from hocket.rewards import RetryError, reward

        client = httpx.AsyncClient()


        @reward("remote")
        async def remote(completion: str, url: str) -> float:
            answer = await client.post(url, json={"text": completion})
            if answer.status_code == 429:
                raise RetryError("busy", float(answer.headers["Retry-After"]))
            return answer.json()["score"]
    """

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


def arguments_as_json(rollout: Rollout) -> dict[str, Any]:
    """Map the arguments that a reward can name to their values for a rollout.

    All are JSON: images are data URLs, and the rollout itself is left out.
    """
    values = {}
    for name, read in _SINGLE_ARGUMENTS.items():
        if name not in ("rollout", "images"):
            values[name] = read(rollout)
    if rollout.prompt.images:
        from hocket.common.vision import data_url

        values["images"] = [data_url(image.data) for image in rollout.prompt.images]
    return values


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """A registered function or class, and what its section of the config says of it."""

    # Set by the decorator.
    name: str
    function: Callable[..., Any]
    runs: Runs
    imports: tuple[str, ...]  # packages that it needs, loaded when its worker starts
    own_deadline: bool  # it ends a late call itself
    check: Callable[..., None] | None  # refuses options that this machine can't run
    # Set by `bind`.
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    asks_for: Collection[str] = ()  # arguments of a call that come from the rollouts
    of_group: bool = False  # one call scores all rollouts of a group
    max_concurrent: int | None = None
    retries: int = 0

    @property
    def is_class(self) -> bool:
        return inspect.isclass(self.function)

    @property
    def callee(self) -> Callable[..., Any]:
        """The callable whose parameters are those of a call; for a class, `__call__` less self."""
        if inspect.isclass(self.function):
            return partial(self.function.__call__, None)
        return self.function

    @property
    def needs_answer(self) -> bool:
        """Whether the row must have an answer: the argument has no default and is not optional."""
        answer = inspect.signature(self.callee).parameters.get("answer")
        if answer is None or answer.default is not answer.empty:
            return False
        annotation = str(answer.annotation)
        return "None" not in annotation and "Optional" not in annotation

    def make(self) -> Callable[..., Any]:
        """Bind the options to the function, or make an instance of the class with them."""
        if self.is_class:
            instance: Callable[..., Any] = self.function(**self.options)
            return instance
        return partial(self.function, **self.options)

    def arguments(self, rollouts: Sequence[Rollout]) -> dict[str, Any]:
        """Read the arguments of one call: from the group, or from its first rollout."""
        values = {}
        for name in self.asks_for:
            if name in _GROUP_ARGUMENTS:
                values[name] = _GROUP_ARGUMENTS[name](rollouts)
            else:
                values[name] = _SINGLE_ARGUMENTS[name](rollouts[0])
        return values


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

    A plain reward is called in a worker process, an async one in the event loop. An async reward
    that raises RewardError ends the run.

    Args:
        name: its name in `rewards.functions`.
        inline: call it in the trainer's process and thread, without a deadline.
        imports: packages that a worker loads first.
        own_deadline: an async reward ends its late calls itself.
        check: a function that gets the options, and raises where this machine can't run them.

    Example: a plugin file whose reward has the option `letter`.

        from hocket.rewards import reward


        @reward("letter_share")
        def letter_share(completion: str, letter: str = "e") -> float:
            return completion.count(letter) / max(len(completion), 1)
    """
    register = REWARDS.register(name)

    def add(function: F) -> F:
        runs: Runs = "inline" if inline else "worker"
        registered = Reward(
            name=name,
            function=function,
            runs=runs,
            imports=imports,
            own_deadline=own_deadline,
            check=check,
        )
        if inspect.iscoroutinefunction(registered.callee):
            registered = dataclasses.replace(registered, runs="async")
        register(registered)
        return function

    return add


def bind(name: str, spec: "RewardSpec") -> Reward:
    """Bind the reward `name` to its section of the config.

    An async reward whose function has the parameter `retries` gets that key as an option, and
    repeats its calls itself. Raises ConfigError for an unknown name, package or option.
    """
    registered = REWARDS.get(name, "rewards.functions or eval.reward: ")
    title = f"reward {name}"
    section = f"rewards.functions.{name}"
    for package in registered.imports:
        need(title, package)
    concurrency = spec.model_dump(include={"max_concurrent", "retries"}, exclude_defaults=True)
    if concurrency and registered.runs != "async":
        keys = " and ".join(concurrency)
        raise ConfigError(f"reward {name!r} is not async: leave its {keys} out")

    # The parameters say whether it scores a group or a single rollout.
    parameters = inspect.signature(registered.callee).parameters.keys()
    of_group = not parameters.isdisjoint(_GROUP_ARGUMENTS)
    _refuse_batch(title, parameters, of_group=of_group)
    own_arguments = _GROUP_ARGUMENTS if of_group else _ROLLOUT_ARGUMENTS
    provided = _PROMPT_ARGUMENTS.keys() | own_arguments.keys()

    # The section has keys that every reward has, and options of the function.
    common_keys = set(type(spec).model_fields)
    options = spec.model_dump(exclude=common_keys)
    reserved = common_keys & inspect.signature(registered.function).parameters.keys()
    repeats_its_calls = registered.runs == "async" and "retries" in reserved
    if repeats_its_calls:
        reserved.remove("retries")
        options["retries"] = spec.retries
    if reserved:
        raise ConfigError(
            f"{title}: {min(reserved)!r} is a key of every reward's section; rename the argument"
        )
    options = _read_options(registered, options, title, section, provided)

    bound = dataclasses.replace(
        registered,
        options=options,
        asks_for=parameters & provided,
        of_group=of_group,
        max_concurrent=spec.max_concurrent,
        retries=0 if repeats_its_calls else spec.retries,
    )
    if registered.check is not None:
        registered.check(**options)
    # Classes of workers are set up there alone: they may be large.
    if registered.is_class and registered.runs != "worker":
        try_out(bound.make, title, section)
    return bound


def _refuse_batch(title: str, parameters: Collection[str], *, of_group: bool) -> None:
    """Raise ConfigError for a reward with the parameters of a batch, as other programs have it."""
    names = set(parameters)
    is_mixed = of_group and not names.isdisjoint(_ROLLOUT_ARGUMENTS)
    if "prompts" in names or is_mixed:
        raise ConfigError(
            f"{title} takes a batch, but here it scores one rollout: name its arguments prompt and "
            "completion, return one number; meta has the row's other columns; of a group, name "
            "prompt, answer, meta and completions or rollouts, and return a list"
        )


def _read_options(
    registered: Reward,
    options: Mapping[str, Any],
    title: str,
    section: str,
    provided: Collection[str],
) -> dict[str, Any]:
    """Check the options of a section against the parameters of the function or class."""
    if registered.is_class:
        checked = options_of(title, registered.function, options, section=section)
        # Options are those of the class; a call may want nothing but what rollouts provide.
        options_of(
            title, registered.callee, {}, section=section, keys=provided, elsewhere=_ELSEWHERE
        )
        return checked
    taken = set(provided) & options.keys()
    if taken:
        raise ConfigError(
            f"{title}: {min(taken)!r} comes from the rollout and can't be set as an option"
        )
    return options_of(
        title,
        registered.callee,
        options,
        section=section,
        keys=provided,
        row=_ROW_ADVICE,
        elsewhere=_ELSEWHERE,
    )
