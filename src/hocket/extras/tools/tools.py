"""Let the model call Python functions; each result, or error, goes back to it as a message
(docs/how-to/tools.md)."""

import asyncio
import functools
import json
import math
import time
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Annotated, Any, TypeVar

from pydantic import Field

from hocket.common.arithmetic import compute
from hocket.common.registry import Registry
from hocket.common.tasks import cancel
from hocket.config.sections import Names, or_one
from hocket.envs.base import Action, Environment, Step, environment, invoke
from hocket.errors import ConfigError
from hocket.extras.tools.mcp import LostError, Tool, connection
from hocket.protocol import Toolbox, ToolCall
from hocket.types import Message

F = TypeVar("F", bound=Callable[..., Any])

MAX_RESULT = 4000  # characters of a program's output that are kept
TOOLS: Registry[Callable[..., Any]] = Registry("tool")


def tool(function: F) -> F:
    """Register a function as the tool of its name (decorator).

    The model sees its name, its type hints and its docstring. The result goes back to the model as
    text; an image of Pillow, as an image. An exception goes back as `error: ...`. Plain functions
    run in a thread each, async ones in the event loop.

    Example: a plugin file, for `env: {name: tools, tools: [population], parser: hermes}`.

        from hocket.envs import tool


        @tool
        def population(city: str) -> int:
            '''Look up how many people live in a city.

            Args:
                city: Name of the city, in English.
            '''
            return {"Cologne": 1_087_353}[city]
    """
    if isinstance(function, str):
        raise ConfigError(
            f"@tool({function!r}): write @tool alone, as a tool has the name of its function"
        )
    TOOLS.register(function.__name__)(function)
    return function


@environment("tools")
class Tools(Environment):
    """The model calls tools until it answers without a call.

    `parser` is vLLM's name for the form in which the model writes a call.
    """

    gives_reward = False

    def __init__(
        self,
        parser: str,
        tools: Annotated[Names, Field(min_length=1)] = (),
        mcp: Annotated[tuple[dict[str, Any], ...], or_one] = (),  # servers
        call_timeout_s: Annotated[float, Field(gt=0)] = 30.0,
        tool_seconds: Annotated[float, Field(gt=0)] = math.inf,  # for all calls of an episode
        max_result: Annotated[int, Field(ge=1)] = 16_000,  # characters of a result
    ) -> None:
        if "python" in tools:
            _sandbox().way()  # raises now, and not in each call
        self._connections: list[Any] = [connection(server) for server in mcp]
        all_tools = [(name, _tool(TOOLS.get(name))) for name in tools]
        for server_tools in self._connections:
            all_tools += server_tools.tools.items()
        self._tools = dict(all_tools)
        if not self._tools:
            raise ValueError("it has no tools: name some under tools, or servers under mcp")
        if len(self._tools) < len(all_tools):
            raise ValueError(
                "two tools have the same name: choose among those of a server by its option tools"
            )
        self.step_timeout_s = call_timeout_s
        schemas = [dict(tool.schema) for tool in self._tools.values()]
        self.toolbox = Toolbox(parser=parser, tools=tuple(schemas))
        self._num_calls = 0
        self._budget_s = tool_seconds
        self._remaining_s = tool_seconds
        self._max_result = max_result
        self.metrics: dict[str, float] = {}
        for name in self._tools:
            for kind in ("calls", "errors", "seconds"):
                self.metrics[f"tool/{name}/{kind}"] = 0.0

    async def step(self, action: Action) -> Step:
        if not action.tool_calls:
            return Step(done=True)
        messages = [asyncio.create_task(self._message(call)) for call in action.tool_calls]
        try:
            return Step(messages=await asyncio.gather(*messages))
        finally:
            await cancel(messages)

    async def close(self) -> None:
        for server_tools in self._connections:
            await server_tools.close()

    async def _message(self, call: ToolCall) -> Message:
        """Make the message that answers a call, and count the call."""
        self._num_calls += 1
        name = call.id or f"call{self._num_calls:05}"  # nine characters: some templates insist
        content: Any = f"error: there is no tool {call.name!r}, only {', '.join(self._tools)}"
        if call.name in self._tools:
            start = time.monotonic()
            content = await self._result(call)
            seconds = time.monotonic() - start
            self._remaining_s -= seconds
            self.metrics[f"tool/{call.name}/calls"] += 1
            self.metrics[f"tool/{call.name}/errors"] += str(content).startswith("error: ")
            self.metrics[f"tool/{call.name}/seconds"] += seconds
        most = self._max_result
        if isinstance(content, str) and len(content) > most:
            content = f"{content[:most]}\n[cut after {most} of {len(content)} characters]"
        return {"role": "tool", "tool_call_id": name, "name": call.name, "content": content}

    async def _result(self, call: ToolCall) -> str | list[dict[str, Any]]:
        """Return the result of a call, or its error as text. Only LostError is raised."""
        seconds = min(self.step_timeout_s, self._remaining_s)
        if seconds <= 0:
            return f"error: the {self._budget_s:g} s for tools are used up"
        try:
            arguments = json.loads(call.arguments)
            if not isinstance(arguments, dict):
                return "error: the arguments must be a JSON object"
            result = await self._tools[call.name].call(arguments, seconds)
            if type(result).__module__.startswith("PIL."):  # the model sees what a tool draws
                return [{"type": "image", "image": result}]
            if isinstance(result, str):
                return result
            return json.dumps(result, ensure_ascii=False, default=str)
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
    status, stdout, stderr = _sandbox().run(code)
    ended = {0: "", None: "it took too long\n"}.get(status, f"it ended with status {status}\n")
    return f"{stdout[:MAX_RESULT]}{ended}{stderr[-MAX_RESULT:]}"


def _sandbox() -> ModuleType:
    from hocket.extras.code import sandbox

    return sandbox


@functools.cache
def _tool(function: Callable[..., Any]) -> Tool:
    from transformers.utils import get_json_schema
    from transformers.utils.chat_template_utils import (
        DocstringParsingException,
        TypeHintParsingException,
    )

    async def call(arguments: Mapping[str, Any], seconds: float) -> Any:
        async with asyncio.timeout(seconds):
            return await invoke(function, **arguments)

    try:
        return Tool(get_json_schema(function), call)
    except (DocstringParsingException, TypeHintParsingException) as error:
        raise ConfigError(
            f"tool {function.__name__!r} can't be shown to a model: {error}"
        ) from error
