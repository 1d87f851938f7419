"""Let the model call the tools of MCP servers, over stdio or streamable HTTP (docs/environments.md)."""

import asyncio
import contextlib
import functools
import json
import math
import os
import shlex
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

from hocket.common.files import last_lines
from hocket.common.processes import SECRET_NAME, kill_with_parent
from hocket.common.redaction import secret
from hocket.common.registry import need, options_of
from hocket.common.tasks import retrieve, run
from hocket.config.sections import Names
from hocket.envs.base import LostError, Tool
from hocket.errors import ConfigError

OPEN_S = 30.0  # for each answer until the first call, and for a server that is gone to come back
RETRY_S = 0.5
MAX_PAGES = 100  # of a list of tools
NUM_LINES = 5  # of a lost server's stderr, in the error


class UnaskedError(LostError):
    """The server is gone, but has not received the call, which may be made again."""


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
        try:
            listed = run(self._listed())
        except LostError as error:
            raise ConfigError(f"env.mcp: {error}; try by hand whether it starts, or answers at that URL") from error
        unknown = set(tools) - listed.keys()
        if unknown:
            raise ValueError(f"{self} has no tools {sorted(unknown)}, only {', '.join(listed)}")
        self.schemas = {name: listed[name] for name in tools or listed}
        self.shared = ServerTools(self) if session == "shared" else None

    def __str__(self) -> str:
        return f"the MCP server {self.command or self.url}"

    async def _listed(self) -> dict[str, Any]:
        """Return the schemas of all its tools."""
        session = Session(self)
        await session.opened()
        schemas = {}
        cursor = None
        for _ in range(MAX_PAGES):
            page = await session.ask("list_tools", cursor=cursor)
            for tool in page.tools:
                function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
                schemas[tool.name] = {"type": "function", "function": function}
            cursor = page.next_cursor
            if cursor is None:
                break
        session.closing.set()
        await asyncio.wait({session.task})
        return schemas


class ServerTools:
    """What an episode has of a server, or all have: a session, opened anew after it was lost."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._session: Session | None = None
        self.tools = {name: Tool(schema, partial(self._call, name)) for name, schema in server.schemas.items()}

    async def close(self) -> None:
        if self._session is not None and self._server.shared is None:
            self._session.closing.set()

    async def _call(self, name: str, arguments: Mapping[str, Any], seconds: float) -> str:
        """Return what a tool answers, as text; connect first, or wait OPEN_S for a server to come back."""
        end = time.monotonic() + OPEN_S
        while True:
            if self._session is None or self._session.lost:
                self._session = Session(self._server)
            session = self._session
            try:
                await session.opened()
                async with asyncio.timeout(seconds):
                    result = await session.ask("call_tool", name, dict(arguments), read_timeout_seconds=math.inf)
            except UnaskedError:
                if time.monotonic() > end:
                    raise
                await asyncio.sleep(RETRY_S)
            else:
                text = "\n".join(getattr(part, "text", f"[{part.type}]") for part in result.content)
                return f"error: {text}" if result.is_error else text


class Session:
    """A session, in a task of its own that opens and closes it; once lost it is of no use."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - stderr of a command, as long as the session
        self._client: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._num_asked = 0  # at the moment
        self.closing = asyncio.Event()
        self.task = asyncio.create_task(self._keep())
        self.task.add_done_callback(retrieve)

    @property
    def lost(self) -> bool:
        return self.closing.is_set() or self.task.done()

    async def _keep(self) -> None:
        from mcp import Client, StdioServerParameters, stdio_client
        from mcp.client.streamable_http import create_mcp_http_client, streamable_http_client

        async with contextlib.AsyncExitStack() as stack:
            if self._server.command is not None:
                command, *arguments = kill_with_parent(shlex.split(self._server.command))
                parameters = StdioServerParameters(command=command, args=arguments, env=self._server.variables)
                transport = stdio_client(parameters, errlog=self._errors)
            else:
                http = await stack.enter_async_context(create_mcp_http_client(self._server.headers))
                transport = streamable_http_client(self._server.url, http_client=http)
            client = Client(transport, cache=None, read_timeout_seconds=OPEN_S)
            self._client.set_result(await stack.enter_async_context(client))
            await self.closing.wait()

    async def opened(self) -> None:
        """Wait until it is open. Raise UnaskedError if it can't be."""
        await asyncio.wait({self.task, self._client}, return_when=asyncio.FIRST_COMPLETED)
        if not self._client.done():
            raise await self._loss(RuntimeError("it was closed"))

    async def ask(self, method: str, *arguments: Any, **named: Any) -> Any:
        """Return what a method of the client does. Raise ValueError for wrong arguments of a tool, else LostError."""
        from mcp.types import INVALID_PARAMS

        asked = asyncio.ensure_future(getattr(self._client.result(), method)(*arguments, **named))
        self._num_asked += 1
        try:
            await asyncio.wait({asked, self.task}, return_when=asyncio.FIRST_COMPLETED)
            return asked.result()
        except Exception as error:
            if getattr(error, "code", None) == INVALID_PARAMS:
                raise ValueError(str(error)) from error
            raise await self._loss(error) from error
        finally:
            self._num_asked -= not self.closing.is_set()
            asked.cancel()

    async def _loss(self, error: BaseException) -> LostError:
        """Close the session; return why it is lost."""
        from httpx2 import ConnectError

        self.closing.set()
        await asyncio.wait({self.task}, timeout=RETRY_S)
        if self.task.done() and not self.task.cancelled():
            error = self.task.exception() or error
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        refused = isinstance(error, ConnectError) and self._num_asked == 1  # of several one may have been received
        unasked = not self._client.done() or (refused and self._server.shared is not None)
        why = " | ".join(filter(None, [f"{type(error).__name__}: {error}", last_lines(self._errors, NUM_LINES)]))
        return (UnaskedError if unasked else LostError)(f"{self._server} is lost: {why}")


@functools.cache
def _server(settings: str) -> Server:
    """Return the server of these settings, in JSON; there is one in a process."""
    return Server(**options_of("an MCP server", Server, json.loads(settings), section="env.mcp"))


def connection(given: Mapping[str, Any]) -> ServerTools:
    """Return what an episode has of a server."""
    need("env.mcp", "mcp")
    server = _server(json.dumps(given, sort_keys=True))
    return server.shared or ServerTools(server)


def _value(variable: str) -> str:
    """Return that of an environment variable, never shown where its name is a secret's."""
    value = os.environ.get(variable)
    if value is None:
        raise ConfigError(f"env.mcp names the environment variable {variable}, which is not set: export it")
    return secret(value, f"${variable}") if SECRET_NAME.search(variable) else value
