"""Define environments: classes under a name, of which every episode gets an instance (docs/environments.md)."""

import asyncio
import dataclasses
import functools
import inspect
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple, TypeVar

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

    text: str  # without the token or stop string that ended it; where it goes on without a text, from its beginning
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    tool_calls: tuple[ToolCall, ...] = ()  # in the text, if the environment has a toolbox


def _encodable(value: Any) -> Any:
    """Replace half surrogate pairs, which have no encoding; what is no JSON is refused later."""
    try:
        return json.loads(json.dumps(value, ensure_ascii=False).encode(errors="replace"))
    except TypeError:
        return value


@pydantic_dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What the model reads before its next turn, and how that turn is sampled."""

    messages: Annotated[Sequence[Message], BeforeValidator(_encodable)] = ()  # rendered by the chat template
    text: Annotated[StrictStr, BeforeValidator(_encodable)] = ""  # instead of messages, as it is
    max_tokens: Annotated[int, Field(ge=1)] | None = None  # None: rollout.max_tokens
    stop: tuple[Annotated[str, Field(min_length=1)], ...] | None = None  # None: rollout.stop
    goes_on: bool = False  # the model's turn is not over: the text counts as its own
    state: StrictStr = ""  # alike where the next turn has the same task; default: where it reads the same

    def __post_init__(self) -> None:
        if self.messages and (self.text or self.goes_on):
            advice = "leave them out, or text and goes_on, which put words into its mouth"
            raise ValueError(f"messages end the model's turn: {advice}")


@pydantic_dataclass(frozen=True, slots=True, kw_only=True)
class Step(Observation):
    """The answer to an action."""

    reward: StrictFloat | StrictBool = 0.0
    done: bool = False


class LostError(Exception):
    """What an episode needs is gone, with what it held."""


class Tool(NamedTuple):
    """What a model may call."""

    schema: Mapping[str, Any]  # as OpenAI's API describes it
    call: Callable[[Mapping[str, Any], float], Awaitable[Any]]
    """(arguments, seconds for an answer) → the result. A LostError ends the episode, the model reads others."""


E = TypeVar("E", bound="Environment")


class Environment:
    """One episode, whose state is the instance's own."""

    toolbox: Toolbox | None = None
    keeps_messages = True  # what was said is in its rollouts as a chat, to be learned by sft
    thinking_tokens = 0  # before an answer of rollout.max_tokens
    gives_reward = True  # the sum of its rewards is the reward `env` of a rollout
    decode: Callable[[Sequence[int]], str]  # of token ids to text, by the run's tokenizer
    step_timeout_s: float = 0.0  # of each step, which env.timeout_s does not count
    metrics: Mapping[str, float] = {}  # of the episode, by name, `env/NAME`: a step has their means

    def player(self, **parts: Any) -> Callable[..., Awaitable[Any]] | None:
        """Return a function that plays whole episodes, (prompt, slot) → Rollout; None: `step` plays them turn by turn.

        parts: what `rollout/players.py` has for it: pool, limits, decode, budget.
        """
        return None

    async def reset(self, prompt: Prompt, seed: int) -> Observation | None:
        """Start the episode; return what the model sees beside the prompt."""
        return None

    async def step(self, action: Action) -> Step:
        """Answer one turn of the model."""
        raise NotImplementedError

    async def truncated(self) -> float:
        """Return the last reward of an episode that a limit cuts off."""
        return 0.0

    async def close(self) -> None:
        """Release what the episode holds; called once, however it ended."""


ENVIRONMENTS: Registry[type[Environment]] = Registry(
    "environment",
    agent="hocket.extras.agents.agent",
    tools="hocket.extras.tools.tools",
    openenv="hocket.extras.openenv",
    step="hocket.extras.openrlhf",
    verifiers="hocket.extras.verifiers.env",
)


def environment(name: str) -> Callable[[type[E]], type[E]]:
    """Register a subclass of Environment as `name` (decorator). Raise ConfigError for what can't play."""
    register = ENVIRONMENTS.register(name)

    def add(made: type[E]) -> type[E]:
        if Environment not in getattr(made, "__mro__", ()):
            raise ConfigError(f"environment {name!r} must be a class of its own: class Mine(Environment)")
        if made.step is Environment.step and not hasattr(made, "run"):  # as agents have it
            raise ConfigError(f"environment {name!r} lacks a method: async def step(self, action) -> Step")
        return register(made)

    return add


CLOSING = "\n</think>\n\n"


def left_open(text: str) -> str:
    """Return "<think>" if a text ends within a thought, else ""."""
    return "<think>" if "<think>" in text.rpartition("</think>")[2] else ""


@environment("single_turn")
class SingleTurn(Environment):
    """The default: one turn, whose thought is closed after `thinking_tokens`, by tokens that are not trained."""

    gives_reward = False

    def __init__(self, thinking_tokens: Annotated[int, Field(ge=0)] = 0) -> None:
        self.thinking_tokens = thinking_tokens
        self._thinks = thinking_tokens > 0

    async def reset(self, prompt: Prompt, seed: int) -> Observation | None:
        self._opening = prompt.opening
        return Observation(max_tokens=self.thinking_tokens) if self.thinking_tokens else None

    async def step(self, action: Action) -> Step:
        if not self._thinks or action.finish_reason != "length":
            return Step(done=True)
        self._thinks = False
        return Step(text=CLOSING if left_open(self._opening + action.text) else "", goes_on=True)


History = Callable[[Sequence[Message], Sequence[Message]], Awaitable[Any]]
"""(what an episode began with, messages since) → fewer or shorter ones in place of these."""
HISTORIES: Registry[History] = Registry("history")
history = HISTORIES.register  # decorator: @history("name")


@history("drop_oldest")
async def drop_oldest(prompt: Sequence[Message], dialogue: Sequence[Message]) -> Sequence[Message]:
    """Keep the newer half of the model's turns, with what was answered to them."""
    turns = [place for place, message in enumerate(dialogue) if message["role"] == "assistant"]
    return dialogue[turns[len(turns) // 2] :]


bind = functools.partial(ENVIRONMENTS.bind, section="env", keys=EnvConfig.model_fields)


def invoke(function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Awaitable[Any]:
    """Call an async function here, a plain one in a thread of its own: one that hangs holds up no other."""
    call = functools.partial(function, *arguments, **named)
    if inspect.iscoroutinefunction(function):
        return call()  # type: ignore[no-any-return]  # a coroutine
    return asyncio.wrap_future(in_own_thread(call))
