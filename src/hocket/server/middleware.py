"""Guard every route, vLLM's too.

The guard checks the token, refuses browsers on pages of other sites, and bounds bodies.
`unless_client_leaves` cancels work whose client has gone.
"""

import asyncio
import hashlib
import hmac
import re
from collections.abc import Awaitable, Callable, Collection, Coroutine
from typing import Any, Concatenate, ParamSpec, TypeVar
from urllib.parse import unquote

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hocket.common.machine import is_any
from hocket.common.tasks import cancel, run_in_thread
from hocket.server.errors import ApiError

P = ParamSpec("P")
T = TypeVar("T")

MAX_BODY_BYTES = 64 << 20
SMALL_BODY_BYTES = 32 << 10
"""A thread costs more time than reading such a body, which takes less than a millisecond."""
BODY_TIMEOUT_S = 60.0  # seconds for a whole body to arrive
CLIENT_CLOSED_REQUEST = 499
"""Status of an answer that no client receives: it has disconnected."""
ADMITTED = "hocket_admitted"
"""Key in the state of a request's scope, once the guard has let it pass."""
URL = re.compile(rb"https?://([^/]+)(/.*)?", re.IGNORECASE)
"""A request's target that is no path, without its query: its host counts, not the header's."""
Check = Callable[[str, bytes], Awaitable[bytes | None]]
"""(path, body) -> None, or a body that replaces it. Raises ApiError for a body that no route may see."""


class Guard:
    """An app in front of the app, which refuses requests before any route sees them.

    Without a token, the guard refuses pages of other sites. With a token, every request must bring
    the token or a key of its path, except GET and HEAD of the paths `free`.

    It reads each body before the route does, within MAX_BODY_BYTES and BODY_TIMEOUT_S. It does not
    read the bodies of `free` and of PUT: those of PUT are files, which their routes limit.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        host: str,
        token: str | None,
        free: Collection[str] = ("/health", "/ready", "/live"),
    ) -> None:
        self.app = app
        self._free = free
        # (path, key) -> True if a key other than the token opens the path; a part may replace it.
        self.opens: Callable[[str, bytes], bool] = lambda path, key: False
        # The checks of bodies, each with the paths that it is for; parts add theirs.
        self.checks: list[tuple[re.Pattern[str], Check]] = []
        self._hosts = {"localhost", "127.0.0.1", "[::1]", host, f"[{host}]"}
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Messages of the app's start and end pass; the servers take no websockets.
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        scope = _plain(scope)
        try:
            # A route's pattern may end before a newline, where the checks of bodies find no path.
            if any(character < " " for character in scope["path"]):
                hint = "send the path as /docs has it"
                raise ApiError(400, "bad_path", "the path has control characters", hint)

            # Check who sends the request.
            is_free = scope["method"] == "GET" and scope["path"] in self._free
            headers = Headers(scope=scope)
            if self._token is None:
                # A browser always says which host it asks, but probes and load balancers do not.
                is_probe = is_free and not {"host", "origin"} & set(headers)
                if not is_probe:
                    self._require_own_page(headers)
            elif not is_free:
                self._require_token(scope["path"], headers, self._token)
            if is_free:  # its body is never read
                return await self.app(scope, receive, send)

            # Read and check the body, then give it to the route as if it had just arrived.
            _require_plain(headers)
            if scope["method"] != "PUT":
                body = await self._body(Request(scope, receive))
                read = body if scope["method"] == "POST" else b""  # no other route reads a body
                for paths, check in self.checks:
                    if paths.fullmatch(scope["path"]):
                        body = await check(scope["path"], read) or body
                message = {"type": "http.request", "body": body, "more_body": False}
                receive = replay(message, receive)
            scope.setdefault("state", {})[ADMITTED] = True
            await self.app(scope, receive, send)
        except ClientDisconnect:
            pass
        except ApiError as error:
            await error.response()(scope, receive, send)

    def _require_token(self, path: str, headers: Headers, token: str) -> None:
        """Raise ApiError unless the headers bring the token, or a key that opens the path."""
        # Anthropic's clients have a header of their own. Two headers, joined like this, are no token.
        api_keys = [f"Bearer {key}" for key in headers.getlist("x-api-key")]
        authorization = ", ".join(headers.getlist("authorization") or api_keys)
        scheme, _, value = authorization.partition(" ")
        key = value.encode("latin-1")
        # Digests have one length, so that the comparison takes the same time for any guess.
        is_token = hmac.compare_digest(_digest(key), _digest(token.encode()))
        if scheme.lower() != "bearer" or not (is_token or self.opens(path, key)):
            hint = "send the header 'Authorization: Bearer TOKEN' with the server's server.token"
            raise ApiError(401, "unauthorized", "this route needs the server's token", hint)

    def _require_own_page(self, headers: Headers) -> None:
        """Refuse browsers on pages of other sites. Raises ApiError.

        A site can have its name lead to this machine (DNS rebinding), so the Host header must name
        this server, and a page's Origin must be the same.
        """
        host = headers.get("host", "")
        origin = headers.get("origin")
        name = re.sub(r":\d*$", "", host.lower())
        if is_any(name) and origin is None:
            message = f"{host} stands for all addresses of a server, and is none of them"
            raise ApiError(403, "foreign_page", message, "ask 127.0.0.1 in its place")
        if name not in self._hosts or origin not in (None, f"http://{host}"):
            message = f"a page of {origin or host!r} may not use this server"
            raise ApiError(403, "foreign_page", message, "set server.token to let it")

    async def _body(self, request: Request) -> bytes:
        """Read the whole body, whatever its Content-Length says. Raises ClientDisconnect."""
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                async for chunk in request.stream():
                    body += chunk
                    if len(body) > MAX_BODY_BYTES:
                        text = f"the body is larger than {MAX_BODY_BYTES >> 20} MiB"
                        hint = "send fewer prompts in one request"
                        raise ApiError(413, "body_too_large", text, hint)
        except TimeoutError:
            text = f"the body did not arrive within {BODY_TIMEOUT_S:g} s"
            hint = "send it again, or in parts over a faster connection"
            raise ApiError(408, "body_timeout", text, hint) from None
        return bytes(body)


async def read_body(
    function: Callable[Concatenate[bytes, P], T], body: bytes, *args: P.args, **kwargs: P.kwargs
) -> T:
    """Call a function that reads a body: at once for a small one, in a thread for a larger one."""
    if len(body) <= SMALL_BODY_BYTES:
        return function(body, *args, **kwargs)
    return await run_in_thread(function, body, *args, **kwargs)


def _plain(scope: Scope) -> Scope:
    """Rewrite a HEAD as the GET of the same path, and a whole URL as its path and host.

    uvicorn drops the body of the answer to a HEAD.
    """
    plain = dict(scope)
    if scope["method"] == "HEAD":
        plain["method"] = "GET"
    url = URL.fullmatch(scope.get("raw_path", b""))
    if url is not None:
        host, path = url[1], url[2] or b"/"
        plain["raw_path"] = path
        plain["path"] = unquote(path.decode("latin-1"))
        others = [(name, value) for name, value in scope["headers"] if name != b"host"]
        plain["headers"] = [*others, (b"host", host)]
    return plain


def _require_plain(headers: Headers) -> None:
    """Raise ApiError for a compressed body: no route reads one."""
    encoding = headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        message = f"a body with Content-Encoding: {encoding[:100]} is not read"
        raise ApiError(415, "encoded_body", message, "send it as it is, without compression")


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def replay(message: Message, receive: Receive) -> Receive:
    """Make a `receive` that returns `message` first, then the messages of the connection."""
    waiting = [message]

    async def replayed() -> Message:
        if waiting:
            return waiting.pop()
        return await receive()

    return replayed


async def unless_client_leaves(
    request: Request,
    answer: Coroutine[Any, Any, Response],
) -> Response:
    """Wait for the answer; cancel the work on it as soon as the client has gone."""
    working = asyncio.create_task(answer)
    leaving = asyncio.create_task(_disconnect(request))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    finally:
        await cancel((working, leaving))


async def _disconnect(request: Request) -> None:
    """Wait until the client has gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
