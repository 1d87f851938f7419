"""Let the model call Python functions; each result, or error, goes back to it as a message (docs/environments.md)."""

import asyncio
import functools
import inspect
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Protocol, TypeVar

from pydantic import Field

from hocket.common import sandbox
from hocket.common.arithmetic import compute
from hocket.common.registry import Registry
from hocket.config.sections import Names, or_one
from hocket.envs.base import Action, Environment, LostError, Step, environment, invoke
from hocket.errors import ConfigError
from hocket.protocol import Toolbox, ToolCall
from hocket.types import Message

F = TypeVar("F", bound=Callable[..., Any])

MAX_RESULT = 4000  # characters of what a program prints
TOOLS: Registry[Callable[..., Any]] = Registry("tool")


def tool(function: F) -> F:
    """Register a function as the tool of its name (decorator)."""
    if isinstance(function, str):
        raise ConfigError(f"@tool({function!r}): write @tool alone, as a tool has the name of its function")
    TOOLS.register(function.__name__)(function)
    return function


class Source(Protocol):
    """Has tools, for an episode or for all."""

    @property
    def schemas(self) -> Mapping[str, Any]:
        """Return them by name, as OpenAI's API describes them."""

    async def ready(self) -> None:
        """Prepare for a call; what it raises ends the episode with an error."""

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """Return a tool's result. The model reads what it raises, but a LostError ends the episode."""

    async def close(self) -> None: ...


class Functions:
    """Functions that are registered as tools."""

    def __init__(self, names: Sequence[str]) -> None:
        self._functions = {name: TOOLS.get(name) for name in names}
        if "python" in names:
            sandbox.way()  # now, not as an error of each call
        self.schemas = {name: _schema(function) for name, function in self._functions.items()}

    async def ready(self) -> None: ...

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Any:
        inspect.signature(self._functions[name]).bind(**arguments)
        return await invoke(self._functions[name], arguments)

    async def close(self) -> None: ...


@environment("tools")
class Tools(Environment):
    """The model calls tools until it answers without a call; `parser` is vLLM's word for how it writes one."""

    def __init__(
        self,
        parser: str,
        tools: Annotated[Names, Field(min_length=1)] = (),
        mcp: Annotated[tuple[dict[str, Any], ...], or_one] = (),  # servers
        call_timeout_s: Annotated[float, Field(gt=0)] = 30.0,
        tool_seconds: Annotated[float, Field(gt=0)] = math.inf,  # of all calls of an episode
        max_result: Annotated[int, Field(ge=1)] = 16_000,  # characters
    ) -> None:
        self._all: list[Source] = [Functions(tools)]
        if mcp:
            from hocket.envs.mcp import connection

            self._all += map(connection, mcp)
        self._sources = {name: source for source in self._all for name in source.schemas}
        if not self._sources:
            raise ValueError("it has no tools: name some under tools, or servers under mcp")
        if len(self._sources) < sum(len(source.schemas) for source in self._all):
            raise ValueError("two tools have the same name: choose among those of a server by its option tools")
        self.step_timeout_s = call_timeout_s
        schemas = tuple(source.schemas[name] for name, source in self._sources.items())
        self.toolbox = Toolbox(parser=parser, tools=schemas)
        self._num_calls = 0
        self._given_s = self._left_s = tool_seconds
        self._max_result = max_result
        self.metrics: dict[str, float] = {
            f"tool/{name}/{what}": 0.0 for name in self._sources for what in ("calls", "errors", "seconds")
        }

    async def step(self, action: Action) -> Step:
        if not action.tool_calls:
            return Step(done=True)
        return Step(messages=await asyncio.gather(*(self._message(call) for call in action.tool_calls)))

    async def close(self) -> None:
        for source in self._all:
            await source.close()

    async def _message(self, call: ToolCall) -> Message:
        self._num_calls += 1
        name = call.id or f"call{self._num_calls:05}"  # nine characters: some templates insist
        return {"role": "tool", "tool_call_id": name, "name": call.name, "content": await self._counted(call)}

    async def _counted(self, call: ToolCall) -> str | list[dict[str, Any]]:
        """Return a call's result, or the beginning of one that is too long."""
        source = self._sources.get(call.name)
        if source is None:
            return f"error: there is no tool {call.name!r}, only {', '.join(self._sources)}"
        await source.ready()
        start = time.monotonic()
        content = await self._call(source, call)
        seconds = time.monotonic() - start
        self._left_s -= seconds
        name = f"tool/{call.name}"
        self.metrics[f"{name}/calls"] += 1
        self.metrics[f"{name}/errors"] += str(content).startswith("error: ")
        self.metrics[f"{name}/seconds"] += seconds
        if isinstance(content, str) and len(content) > self._max_result:
            return f"{content[: self._max_result]}\n[cut after {self._max_result} of {len(content)} characters]"
        return content

    async def _call(self, source: Source, call: ToolCall) -> str | list[dict[str, Any]]:
        seconds = min(self.step_timeout_s, self._left_s)
        if seconds <= 0:
            return f"error: the {self._given_s:g} s for tools are used up"
        try:
            arguments = json.loads(call.arguments)
            if not isinstance(arguments, dict):
                return "error: the arguments must be a JSON object"
            async with asyncio.timeout(seconds):
                result = await source.call(call.name, arguments)
            if type(result).__module__.startswith("PIL."):  # the model sees what a tool draws
                return [{"type": "image", "image": result}]
            return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
        except LostError:
            raise
        except TimeoutError:
            return f"error: no result within {seconds:g} s"
        # User code with the model's arguments: the model receives any error as text.
        except (Exception, SystemExit) as error:  # noqa: BLE001
            return f"error: {type(error).__name__}: {error}"


@tool
def calculate(expression: str) -> str:
    """Computes an arithmetic expression.

    Args:
        expression: Numbers with + - * / // % and brackets.
    """  # noqa: D401 - the policies that ship were trained on these words
    value, _ = compute(expression)
    return str(int(value)) if value % 1 == 0 else str(value)  # 3.0 is written as 3


@tool
def python(code: str) -> str:
    """Runs a Python program, without network or files, and returns what it prints.

    Args:
        code: The program; it sees nothing of earlier ones.
    """  # noqa: D401 - as in the tools of others
    status, stdout, stderr = sandbox.run(code)
    ended = {0: "", None: "it took too long\n"}.get(status, f"it ended with status {status}\n")
    return f"{stdout[:MAX_RESULT]}{ended}{stderr[-MAX_RESULT:]}"


@functools.cache
def _schema(function: Callable[..., Any]) -> dict[str, Any]:
    from transformers.utils import get_json_schema
    from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException

    try:
        schema: dict[str, Any] = get_json_schema(function)
    except (DocstringParsingException, TypeHintParsingException) as error:
        raise ConfigError(f"tool {function.__name__!r} can't be shown to a model: {error}") from error
    return schema
