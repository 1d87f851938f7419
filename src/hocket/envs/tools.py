"""Let the model call Python functions; each result, or error, goes back to it as a message (docs/environments.md)."""

import asyncio
import functools
import inspect
import json
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

from pydantic import Field

from hocket.common import sandbox
from hocket.common.arithmetic import compute
from hocket.common.registry import Registry
from hocket.config.sections import Names
from hocket.envs.base import Action, Environment, Step, environment, invoke
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


@environment("tools")
class Tools(Environment):
    """The model calls tools until it answers without a call; `parser` is vLLM's word for how it writes one."""

    def __init__(
        self,
        tools: Annotated[Names, Field(min_length=1)],
        parser: str,
        call_timeout_s: Annotated[float, Field(gt=0)] = 30.0,
    ) -> None:
        self._functions = {name: TOOLS.get(name) for name in tools}
        if "python" in tools:
            sandbox.way()  # now, not as an error of each call
        self.step_timeout_s = call_timeout_s
        self.toolbox = Toolbox(parser=parser, tools=tuple(map(_schema, self._functions.values())))
        self._num_calls = 0

    async def step(self, action: Action) -> Step:
        if not action.tool_calls:
            return Step(done=True)
        return Step(messages=await asyncio.gather(*(self._message(call) for call in action.tool_calls)))

    async def _message(self, call: ToolCall) -> Message:
        self._num_calls += 1
        name = call.id or f"call{self._num_calls:05}"  # nine characters: some templates insist
        return {"role": "tool", "tool_call_id": name, "name": call.name, "content": await self._call(call)}

    async def _call(self, call: ToolCall) -> str | list[dict[str, Any]]:
        try:
            function = self._functions.get(call.name)
            if function is None:
                return f"error: there is no tool {call.name!r}, only {', '.join(self._functions)}"
            arguments = json.loads(call.arguments)
            if not isinstance(arguments, dict):
                return "error: the arguments must be a JSON object"
            inspect.signature(function).bind(**arguments)
            async with asyncio.timeout(self.step_timeout_s):
                result = await invoke(function, arguments)
            if type(result).__module__.startswith("PIL."):  # the model sees what a tool draws
                return [{"type": "image", "image": result}]
            return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
        except TimeoutError:
            return f"error: no result within {self.step_timeout_s:g} s"
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
