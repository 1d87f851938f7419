"""Let the model call the tools of MCP servers, over stdio or streamable HTTP
(docs/how-to/tools.md)."""

import asyncio
import contextlib
import functools
import json
import os
import shlex
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, Literal, NamedTuple

from hocket.common.files import last_lines
from hocket.common.processes import SECRET_NAME, contained
from hocket.common.redaction import secret
from hocket.common.registry import need, options_of
from hocket.common.shell import proxy_of
from hocket.common.tasks import retrieve, run
from hocket.config.sections import Names
from hocket.errors import ConfigError

LIST_S = 30.0  # seconds that a server may take to start, and for each page of its list of tools
RETRY_S = 0.5  # seconds until a call is made again
MAX_PAGES = 100  # pages of a list of tools
NUM_LINES = 5  # lines of a lost server's stderr that its error shows
MAX_STDERR = 1 << 20  # bytes of stderr that are kept


class LostError(Exception):
    """Raised when something that an episode needs, such as its server, is gone with its state."""


class Tool(NamedTuple):
    """A function that the model may call."""

    schema: Mapping[str, Any]  # its description in the form of OpenAI's API
    call: Callable[[Mapping[str, Any], float], Awaitable[Any]]
    """Called with the arguments and the seconds that an answer may take; returns the result.
    A LostError ends the episode. The model reads any other error as the result."""


class NotReceivedError(LostError):
    """The server is gone, but has not received the call, which may be made again."""


class McpServer:
    """A server and the schemas of its tools, which it has listed."""

    def __init__(
        self,
        command: str | None = None,
        url: str | None = None,
        env: Names = (),  # variables that the command gets, beside PATH, HOME and the like
        # For each header the name of the variable that holds its value.
        headers: dict[str, str] = {},  # noqa: B006 - only read
        session: Literal["episode", "shared"] = "episode",
        tools: Names = (),  # tools that the model sees; (): all
    ) -> None:
        if (command is None) == (url is None):
            raise ValueError("set either command or url of a server in env.mcp")
        self.command = command
        self.url = url
        self.variables = {name: _value(name) for name in env}
        self.headers = {
            name: secret(_value(variable), f"${variable}") for name, variable in headers.items()
        }
        try:
            listed = run(self._listed())
        except (LostError, TimeoutError) as error:
            problem = str(error) or f"{self} lists no tools within {LIST_S:g} s"
            raise ConfigError(
                f"env.mcp: {problem}; try by hand whether it starts, or answers at that URL"
            ) from error
        unknown = set(tools) - listed.keys()
        if unknown:
            raise ValueError(f"{self} has no tools {sorted(unknown)}, only {', '.join(listed)}")
        self.schemas = {name: listed[name] for name in tools or listed}
        self.shared = ServerTools(self) if session == "shared" else None

    def __str__(self) -> str:
        return f"the MCP server {self.command or self.url}"

    async def _listed(self) -> dict[str, Any]:
        """Request the schemas of all its tools, by name."""
        session = Session(self, LIST_S)
        schemas = {}
        cursor = None
        for _ in range(MAX_PAGES):
            page = await session.request(LIST_S, "list_tools", cursor=cursor)
            for tool in page.tools:
                function = {
                    "name": tool.name,
                    "description": tool.description,
                    "parameters": tool.input_schema,
                }
                schemas[tool.name] = {"type": "function", "function": function}
            cursor = page.next_cursor
            if cursor is None:
                break
        session.closing.set()
        await asyncio.wait({session.task})
        return schemas


class ServerTools:
    """The tools of a server for an episode, or for all episodes.

    They share a session, and open another after it was lost.
    """

    def __init__(self, server: McpServer) -> None:
        self._server = server
        self._session: Session | None = None
        self.tools: dict[str, Tool] = {}
        for name, schema in server.schemas.items():
            self.tools[name] = Tool(schema, partial(self._call, name))

    async def close(self) -> None:
        if self._session is not None and self._server.shared is None:
            self._session.closing.set()

    async def _call(self, name: str, arguments: Mapping[str, Any], seconds: float) -> str:
        """Call a tool and return its answer as text.

        A server that is gone has `seconds` to come back; a call that it did not get is repeated.
        """
        end = time.monotonic() + seconds
        while True:
            if self._session is None or self._session.lost:
                self._session = Session(self._server, seconds)
            try:
                result = await self._session.request(seconds, "call_tool", name, dict(arguments))
            except NotReceivedError:
                if time.monotonic() > end:
                    raise
                await asyncio.sleep(RETRY_S)
            else:
                text = "\n".join(getattr(part, "text", f"[{part.type}]") for part in result.content)
                return f"error: {text}" if result.is_error else text


class Session:
    """A session with a server. A task opens it, within `seconds`, and closes it; once it is lost it
    is of no use."""

    def __init__(self, server: McpServer, seconds: float) -> None:
        self._server = server
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the session
        self._client: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.closing = asyncio.Event()
        self.task = asyncio.create_task(self._keep(seconds))
        self.task.add_done_callback(retrieve)

    @property
    def lost(self) -> bool:
        return self.closing.is_set() or self.task.done()

    async def _keep(self, seconds: float) -> None:
        from httpx2 import AsyncClient
        from mcp import Client, StdioServerParameters, stdio_client
        from mcp.client.streamable_http import streamable_http_client

        async with contextlib.AsyncExitStack() as stack:
            if self._server.command is not None:
                command, *arguments = contained(shlex.split(self._server.command))
                parameters = StdioServerParameters(
                    command=command, args=arguments, env=self._server.variables
                )
                transport = stdio_client(parameters, errlog=self._stderr)
            else:
                client_of_headers = AsyncClient(headers=self._server.headers, timeout=None)
                http = await stack.enter_async_context(client_of_headers)
                transport = streamable_http_client(
                    self._server.url, http_client=http, max_sse_event_size=None
                )
            async with asyncio.timeout(seconds):
                client = await stack.enter_async_context(Client(transport, cache=None))
            self._client.set_result(client)
            await self.closing.wait()

    async def request(self, seconds: float, method: str, *arguments: Any, **named: Any) -> Any:
        """Call a method of the client, once the session is open, and wait `seconds` for its result.

        Raise ValueError for wrong arguments of a tool, NotReceivedError if the server is gone and
        did not receive them, and LostError if it is gone otherwise.
        """
        from mcp.types import INVALID_PARAMS

        await asyncio.wait({self.task, self._client}, return_when=asyncio.FIRST_COMPLETED)
        if not self._client.done():
            raise await self._loss(RuntimeError("it was closed"))
        if os.fstat(self._stderr.fileno()).st_size > MAX_STDERR:
            self._stderr.seek(0)  # for the command, too
            self._stderr.truncate()
        try:
            async with asyncio.timeout(seconds):
                return await getattr(self._client.result(), method)(*arguments, **named)
        except TimeoutError:
            raise
        except Exception as error:
            if getattr(error, "code", None) == INVALID_PARAMS:
                raise ValueError(str(error)) from error
            raise await self._loss(error) from error

    async def _loss(self, error: BaseException) -> LostError:
        """Close the session, and make the error that says why it is lost."""
        from httpx2 import ConnectError

        self.closing.set()
        await asyncio.wait({self.task}, timeout=RETRY_S)
        if self.task.done() and not self.task.cancelled():
            error = self.task.exception() or error
        # The call did not arrive if the session never opened, or no connection was made. The latter
        # is no reason to call again if the session is an episode's: it held state, which another
        # session would not have.
        _, others = BaseExceptionGroup("", [error]).split(ConnectError)
        refused = others is None
        not_received = not self._client.done() or (refused and self._server.shared is not None)
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        why = f"{type(error).__name__}: {error}"
        lines = last_lines(self._stderr, NUM_LINES)
        if lines:
            why += f" | {lines}"
        proxy = proxy_of(self._server.url or "")
        through = f" (asked through the proxy {proxy})" if proxy else ""
        kind = NotReceivedError if not_received else LostError
        return kind(f"{self._server} is lost{through}: {why}")


@functools.cache
def _server(settings: str) -> McpServer:
    """Make the server of these settings, which are JSON; once in a process."""
    options = options_of("an MCP server", McpServer, json.loads(settings), section="env.mcp")
    return McpServer(**options)


def connection(settings: Mapping[str, Any]) -> ServerTools:
    """Make the tools of a server for an episode, or return those that all episodes share."""
    need("env.mcp", "mcp")
    server = _server(json.dumps(settings, sort_keys=True))
    return server.shared or ServerTools(server)


def _value(variable: str) -> str:
    """Read an environment variable; its value is never shown where the name is a secret's."""
    value = os.environ.get(variable)
    if value is None:
        raise ConfigError(
            f"env.mcp names the environment variable {variable}, which is not set: export it"
        )
    return secret(value, f"${variable}") if SECRET_NAME.search(variable) else value
