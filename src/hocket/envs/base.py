"""Define environments: classes with a name, of which every episode gets an instance.

docs/how-to/environments.md has the guide.
"""

import asyncio
import dataclasses
import functools
import inspect
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Annotated, Any, TypeVar

from pydantic import BeforeValidator, Field, StrictBool, StrictFloat, StrictStr
from pydantic.dataclasses import dataclass as pydantic_dataclass

from hocket.common.registry import Registry
from hocket.common.tasks import in_own_thread
from hocket.config import EnvConfig
from hocket.errors import ConfigError
from hocket.protocol import Toolbox, ToolCall
from hocket.types import FinishReason, Message, Prompt


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """What the model wrote in one turn."""

    # The text without the token or stop string that ended it. After an observation that goes on
    # without a text, it is the text since the turn began.
    text: str
    token_ids: tuple[int, ...]  # sampled tokens of the turn
    finish_reason: FinishReason  # "stop", or "length" if a limit cut it off
    tool_calls: tuple[ToolCall, ...] = ()  # calls in the text, if the environment has a toolbox


def _encodable(value: Any) -> Any:
    """Replace half surrogate pairs, which have no encoding. Pydantic refuses what is no JSON."""
    try:
        return json.loads(json.dumps(value, ensure_ascii=False).encode(errors="replace"))
    except TypeError:
        return value


@pydantic_dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What the model reads before its next turn, and how that turn is sampled."""

    # Messages since the model's turn; the chat template renders them.
    messages: Annotated[Sequence[Message], BeforeValidator(_encodable)] = ()
    # A text that the model reads as it is, instead of messages.
    text: Annotated[StrictStr, BeforeValidator(_encodable)] = ""
    # Most tokens of the next turn; None: rollout.max_tokens.
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    # Texts that end the next turn; None: rollout.stop.
    stop: tuple[Annotated[str, Field(min_length=1)], ...] | None = None
    # The model's turn is not over: `text` counts as written by the model.
    goes_on: bool = False
    # A name of the state: turns with the same state have the same task ahead of them. Without one,
    # turns are in the same state where the model reads the same.
    state: StrictStr = ""

    def __post_init__(self) -> None:
        if self.messages and (self.text or self.goes_on):
            raise ValueError(
                "messages end the model's turn: leave them out, or text and goes_on, which put "
                "words into its mouth"
            )


@pydantic_dataclass(frozen=True, slots=True, kw_only=True)
class Step(Observation):
    """The environment's answer to an action."""

    reward: StrictFloat | StrictBool = 0.0  # for this turn; the sum is the reward `env`
    done: bool = False  # the episode is over


E = TypeVar("E", bound="Environment")


class Environment:
    """An environment of several turns; each episode gets an instance.

    The arguments of its constructor are options, which the section `env` sets.

    Example: a plugin file. The model guesses a number within five turns.

        import random

        from hocket.envs import Action, Environment, Observation, Step, environment


        @environment("guess_number")
        class Guess(Environment):
            def __init__(self, highest: int = 9) -> None:  # the option env.highest
                self.highest = highest

            async def reset(self, prompt, seed: int) -> Observation:
                self.number = random.Random(seed).randint(0, self.highest)
                self.turns = 5
                return Observation(text=f"Guess, 0 to {self.highest}: ", max_tokens=4)

            async def step(self, action: Action) -> Step:
                self.turns -= 1
                if action.text.strip() == str(self.number):
                    return Step(done=True, reward=1.0)
                return Step(text="No. Again: ", max_tokens=4, done=self.turns == 0)
    """

    toolbox: Toolbox | None = None  # reads the model's calls of tools
    keeps_messages = True  # its rollouts hold their dialogue as a chat, from which sft can learn
    thinking_tokens = 0  # tokens of thought before an answer of rollout.max_tokens
    gives_reward = True  # the sum of the steps' rewards is the reward `env` of the rollout
    decode: Callable[[Sequence[int]], str]  # turns token ids into text, by the run's tokenizer
    step_timeout_s: float = 0.0  # seconds of each step that do not count towards env.timeout_s
    metrics: Mapping[str, float] = {}  # measures of this episode; `env/NAME` is their mean

    def player(self, **parts: Any) -> Callable[..., Awaitable[Any]] | None:
        """Make a function that plays whole episodes: (prompt, slot) → Rollout.

        By default it returns None, and `step` plays them turn by turn. `parts` is what
        rollout/players.py passes: pool, limits, decode and budget.
        """
        return None

    async def reset(self, prompt: Prompt, seed: int) -> Observation | None:
        """Start the episode. Returns what the model reads after the prompt, or None."""
        return None

    async def step(self, action: Action) -> Step:
        """Answer one turn of the model."""
        raise NotImplementedError

    async def truncated(self) -> float:
        """Compute the last reward of an episode that a limit cuts off."""
        return 0.0

    async def close(self) -> None:
        """Release what the episode holds; called once, however the episode ended."""


ENVIRONMENTS: Registry[type[Environment]] = Registry(
    "environment",
    agent="hocket.extras.agents.agent",
    tools="hocket.extras.tools.tools",
    openenv="hocket.extras.openenv",
    step="hocket.extras.openrlhf",
    verifiers="hocket.extras.verifiers.env",
)


def environment(name: str) -> Callable[[type[E]], type[E]]:
    """Register a subclass of Environment as `name` (decorator).

    Environment has an example. Raises ConfigError for anything else, and for a class that can't
    play an episode.

    Args:
        name: its name in `env.name`.
    """
    register = ENVIRONMENTS.register(name)

    def add(subclass: type[E]) -> type[E]:
        if Environment not in getattr(subclass, "__mro__", ()):
            raise ConfigError(
                f"environment {name!r} must be a class of its own: class Mine(Environment)"
            )
        # Agents have the method `run` in place of `step`.
        if subclass.step is Environment.step and not hasattr(subclass, "run"):
            raise ConfigError(
                f"environment {name!r} lacks a method: async def step(self, action) -> Step"
            )
        return register(subclass)

    return add


CLOSING = "\n</think>\n\n"  # ends a thought that has used its tokens up


def left_open(text: str) -> str:
    """Return the tag "<think>" if a text ends within a thought, else ""."""
    return "<think>" if "<think>" in text.rpartition("</think>")[2] else ""


@environment("single_turn")
class SingleTurn(Environment):
    """The default: an episode of one turn.

    With `thinking_tokens` a longer thought is closed after that many tokens, and the model answers.
    The tokens that close the thought are not trained.
    """

    gives_reward = False

    def __init__(self, thinking_tokens: Annotated[int, Field(ge=0)] = 0) -> None:
        self.thinking_tokens = thinking_tokens
        self._thinks = thinking_tokens > 0  # the first part of the turn, the thought, is to come

    async def reset(self, prompt: Prompt, seed: int) -> Observation | None:
        self._opening = prompt.opening
        if not self.thinking_tokens:
            return None
        return Observation(max_tokens=self.thinking_tokens)

    async def step(self, action: Action) -> Step:
        if not self._thinks or action.finish_reason != "length":
            return Step(done=True)
        # The tokens for the thought are used up: go on with those for the answer.
        self._thinks = False
        open_tag = left_open(self._opening + action.text)
        return Step(text=CLOSING if open_tag else "", goes_on=True)


History = Callable[[Sequence[Message], Sequence[Message]], Awaitable[Any]]
"""Shortens a dialogue. Called with the messages that the episode began with and with those since;
returns fewer or shorter messages in place of the latter."""
HISTORIES: Registry[History] = Registry("history")
history = HISTORIES.register
"""Register an async function that shortens dialogues (decorator); `env.history` names it.

It is called with the messages that the episode began with, and with the messages since. It returns
fewer or shorter messages instead of the latter.

Args:
    name: its name in `env.history`.

Example: a plugin file that keeps only the last two messages.

    from hocket.envs import history


    @history("last_two")
    async def last_two(prompt, dialogue):
        return dialogue[-2:]
"""


@history("drop_oldest")
async def drop_oldest(prompt: Sequence[Message], dialogue: Sequence[Message]) -> Sequence[Message]:
    """Keep the newer half of the model's turns, and the answers to them."""
    turns = [i for i, message in enumerate(dialogue) if message["role"] == "assistant"]
    return dialogue[turns[len(turns) // 2] :]


# Makes the constructor of an environment from its name and its options in the section env.
bind = functools.partial(ENVIRONMENTS.bind, section="env", keys=EnvConfig.model_fields)


def invoke(function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Awaitable[Any]:
    """Call an async function in the event loop, a plain one in a thread of its own.

    A plain function that hangs so holds up no other episode. Returns an awaitable of the result.
    """
    call = functools.partial(function, *arguments, **named)
    if inspect.iscoroutinefunction(function):
        coroutine: Awaitable[Any] = call()
        return coroutine
    return asyncio.wrap_future(in_own_thread(call))
