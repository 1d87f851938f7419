"""Let the model call the tools of MCP servers, over stdio or streamable HTTP (docs/environments.md).

Connections live in an event loop of their own: servers are asked for their tools before a run has one.
"""

import asyncio
import contextlib
import functools
import json
import os
import shlex
import subprocess
import threading
import time
from collections.abc import Coroutine, Mapping
from concurrent.futures import Future
from typing import Any, Literal, TypeVar

from hocket.common.processes import SECRET_NAME, kill_with_parent
from hocket.common.redaction import secret
from hocket.common.registry import need, options_of
from hocket.common.tasks import retrieve
from hocket.config.sections import Names
from hocket.envs.base import LostError
from hocket.errors import ConfigError

OPEN_S = 30.0  # for a server's first answer, and for one that is gone to come back
RETRY_S = 0.5
MAX_PAGES = 100  # of a list of tools
_TOO_LATE = TimeoutError(f"no answer within {OPEN_S:g} s")
T = TypeVar("T")


def connection(given: Mapping[str, Any]) -> "ServerTools":
    """Return what an episode has of a server: the shared connection, or one of its own."""
    need("env.mcp", "mcp")
    server = _server(json.dumps(given, sort_keys=True))
    return server.shared if server.shares else ServerTools(server)


class Server:
    """A server that was asked for its tools."""

    def __init__(
        self,
        command: str | None = None,
        url: str | None = None,
        env: Names = (),  # variables that the command gets, beside PATH, HOME and the like
        headers: dict[str, str] = {},  # noqa: B006 - only read; by name the variable that holds its value
        session: Literal["episode", "shared"] = "episode",
        tools: Names = (),  # (): all
    ) -> None:
        if (command is None) == (url is None):
            raise ValueError("set either command or url of a server in env.mcp")
        self.command = command
        self.url = url
        self.variables = {name: _value(name) for name in env}
        self.headers = {name: secret(_value(variable), f"${variable}") for name, variable in headers.items()}
        self.shares = session == "shared"
        self.shared = ServerTools(self)
        try:
            listed = _there(self.shared.listed()).result()
        except LostError as error:
            raise ConfigError(f"env.mcp: {error}; try by hand whether it starts, or answers at that URL") from error
        unknown = set(tools) - listed.keys()
        if unknown:
            raise ValueError(f"{self} has no tools {sorted(unknown)}, only {', '.join(listed)}")
        self.schemas = {name: listed[name] for name in tools or listed}

    def __str__(self) -> str:
        return f"the MCP server {self.command or self.url}"


class ServerTools:
    """A session with a server, opened anew after it was lost."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._lock = asyncio.Lock()
        self._session: Session | None = None

    @property
    def schemas(self) -> Mapping[str, Any]:
        return self._server.schemas

    async def ready(self) -> None:
        """Connect, where it is not. Raise LostError where the server does not come back within OPEN_S."""
        await asyncio.wrap_future(_there(self._connected(OPEN_S)))

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """Return what a tool answers, as text. Raise ValueError for wrong arguments, LostError without an answer."""
        return await asyncio.wrap_future(_there(self._answer(name, arguments)))

    async def close(self) -> None:
        if not self._server.shares:
            _loop().call_soon_threadsafe(self._end)

    def _end(self) -> None:
        if self._session is not None:
            self._session.closing.set()

    async def listed(self) -> dict[str, Any]:
        """Return the schemas of all tools."""
        session = await self._connected(0.0)
        schemas = {}
        cursor = None
        for _ in range(MAX_PAGES):
            page = await session.ask("list_tools", within_s=OPEN_S, cursor=cursor)
            for tool in page.tools:
                function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
                schemas[tool.name] = {"type": "function", "function": function}
            cursor = page.next_cursor
            if cursor is None:
                break
        await self.close()
        return schemas

    async def _connected(self, within_s: float) -> "Session":
        end = time.monotonic() + within_s
        async with self._lock:
            while self._session is None or self._session.lost:
                self._session = Session(self._server)
                try:
                    await self._session.open()
                except LostError:
                    if time.monotonic() > end:
                        raise
                    await asyncio.sleep(RETRY_S)
            return self._session

    async def _answer(self, name: str, arguments: Mapping[str, Any]) -> str:
        session = await self._connected(0.0)
        result = await session.ask("call_tool", name, dict(arguments))
        text = "\n".join(getattr(part, "text", f"[{part.type}]") for part in result.content)
        return f"error: {text}" if result.is_error else text


class Session:
    """A session, in a task of its own that opens and closes it; once lost it is of no use."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._client: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.closing = asyncio.Event()
        self._task = asyncio.create_task(self._keep())
        self._task.add_done_callback(retrieve)
        self.lost = False

    async def _keep(self) -> None:
        from mcp import Client, StdioServerParameters, stdio_client
        from mcp.client.streamable_http import create_mcp_http_client, streamable_http_client

        async with contextlib.AsyncExitStack() as stack:
            if self._server.command is not None:
                command, *arguments = kill_with_parent(shlex.split(self._server.command))
                parameters = StdioServerParameters(command=command, args=arguments, env=self._server.variables)
                transport = stdio_client(parameters, errlog=subprocess.DEVNULL)
            else:
                http = await stack.enter_async_context(create_mcp_http_client(self._server.headers))
                transport = streamable_http_client(self._server.url, http_client=http)
            client = await stack.enter_async_context(Client(transport, cache=None))
            self._client.set_result(client)
            await self.closing.wait()

    async def open(self) -> None:
        await asyncio.wait({self._task, self._client}, timeout=OPEN_S, return_when=asyncio.FIRST_COMPLETED)
        if not self._client.done():
            self._task.cancel()
            raise self._loss(_TOO_LATE)

    async def ask(self, method: str, *arguments: Any, within_s: float | None = None, **named: Any) -> Any:
        """Return what a method of the client does. Raise ValueError for wrong arguments of a tool, else LostError."""
        from mcp.types import INVALID_PARAMS

        asked = asyncio.ensure_future(getattr(self._client.result(), method)(*arguments, **named))
        try:
            await asyncio.wait({asked, self._task}, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
            return asked.result()
        except asyncio.InvalidStateError:
            raise self._loss(_TOO_LATE) from None
        except Exception as error:
            if getattr(error, "code", None) == INVALID_PARAMS:
                raise ValueError(str(error)) from error
            raise self._loss(error) from error
        finally:
            asked.cancel()

    def _loss(self, error: BaseException) -> LostError:
        """Close the session; say why it is lost."""
        self.lost = True
        self.closing.set()
        with contextlib.suppress(asyncio.InvalidStateError, asyncio.CancelledError):
            error = self._task.exception() or error
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        return LostError(f"{self._server} is lost: {type(error).__name__}: {error}")


@functools.cache
def _server(settings: str) -> Server:
    """Return the server of these settings, in JSON; there is one in a process."""
    return Server(**options_of("an MCP server", Server, json.loads(settings), section="env.mcp"))


def _value(variable: str) -> str:
    """Return that of an environment variable, never shown where its name is a secret's."""
    value = os.environ.get(variable)
    if value is None:
        raise ConfigError(f"env.mcp names the environment variable {variable}, which is not set: export it")
    return secret(value, f"${variable}") if SECRET_NAME.search(variable) else value


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="mcp", daemon=True).start()
    return loop


def _there(coroutine: Coroutine[Any, Any, T]) -> Future[T]:
    return asyncio.run_coroutine_threadsafe(coroutine, _loop())
