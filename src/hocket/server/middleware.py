"""Guard every route, vLLM's own included: token, size of the body, state of the engine."""

import asyncio
import hashlib
import hmac
import re
from collections.abc import Callable
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hocket.server.errors import ApiError

ALWAYS_ANSWERED = frozenset(
    {"/health", "/heartbeat", "/init_weight_group", "/reload_weights", "/sleep", "/wake_up"}
    | {"/metrics", "/docs", "/openapi.json"}
)
"""Paths that stay open while the engine can't generate: to look at it, to wake it, and to load working weights."""
UPLOAD = "/upload/"
"""Prefix of paths whose bodies are files: the route reads them piece by piece and limits them itself."""
MAX_BODY_BYTES = 64 << 20
BODY_TIMEOUT_S = 60.0
_SESSION = re.compile(r"/sessions/[^/]+")  # reading and closing a session needs no engine


class AnswerErrors:
    """Send the ApiError that the other middleware raises as the answer; close a websocket."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self.app(scope, receive, send)
        except ApiError as error:
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
            else:
                await error.response()(scope, receive, send)


class RequireToken:
    """Let only GET /health pass without the bearer token, or a key that `admits` takes for its path."""

    def __init__(self, app: ASGIApp, token: str, admits: Callable[[str, bytes], bool]) -> None:
        self.app = app
        self._admits = admits
        self._digest = hashlib.sha256(token.encode()).digest()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan" and not self._allowed(scope):
            hint = "send the header 'Authorization: Bearer TOKEN' with the server's server.token"
            raise ApiError(401, "unauthorized", "this route needs the server's token", hint)
        await self.app(scope, receive, send)

    def _allowed(self, scope: Scope) -> bool:
        if (scope.get("method"), scope["path"]) == ("GET", "/health"):
            return True
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(given) != 1:
            return False
        scheme, _, token = given[0].partition(b" ")
        # Digests have one length, so that the comparison takes the same time for any guess.
        known = hmac.compare_digest(hashlib.sha256(token).digest(), self._digest)
        return scheme.lower() == b"bearer" and (known or self._admits(scope["path"], token))


class RefuseWebPages:
    """Refuse browsers on another site's page, also one under this machine's name, where the server has no token."""

    def __init__(self, app: ASGIApp, host: str) -> None:
        self.app = app
        self._hosts = {"localhost", "127.0.0.1", "::1", host}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {name: value.decode("latin-1") for name, value in scope.get("headers", ())}
        host, origin = headers.get(b"host", ""), headers.get(b"origin")
        try:
            own = urlsplit(f"//{host}").hostname in self._hosts and origin in (None, f"http://{host}")
        except ValueError:  # it is no name of a host, "[" for one
            own = False
        if scope["type"] != "lifespan" and not own:
            message = f"a page of {origin or host!r} may not use this server"
            raise ApiError(403, "foreign_page", message, "set server.token to let it")
        await self.app(scope, receive, send)


class LimitBody:
    """Read each body, but for uploads, up to a limit before the route sees it; Content-Length is not believed."""

    def __init__(self, app: ASGIApp, max_bytes: int, timeout_s: float = BODY_TIMEOUT_S) -> None:
        self.app = app
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not scope["path"].startswith(UPLOAD):
            try:
                body = await asyncio.wait_for(self._read(receive), self._timeout_s)
            except TimeoutError:
                message = f"the body did not arrive within {self._timeout_s:g} s"
                hint = "send it again, or in parts over a faster connection"
                raise ApiError(408, "body_timeout", message, hint) from None
            if body is None:
                return
            receive = replay({"type": "http.request", "body": body, "more_body": False}, receive)
        await self.app(scope, receive, send)

    async def _read(self, receive: Receive) -> bytes | None:
        """Return the whole body, None where the client has disconnected."""
        body = bytearray()
        while (message := await receive())["type"] != "http.disconnect":
            body += message.get("body", b"")
            if len(body) > self._max_bytes:
                hint = "send fewer prompts in one request"
                raise ApiError(413, "body_too_large", f"the body is larger than {self._max_bytes >> 20} MiB", hint)
            if not message.get("more_body", False):
                return bytes(body)
        return None


def replay(message: Message, receive: Receive) -> Receive:
    """Return a receive that gives one message first, then those of the connection."""
    waiting = [message]

    async def replayed() -> Message:
        return waiting.pop() if waiting else await receive()

    return replayed


class RefuseWhenFailed:
    """Answer 503 on every route that needs an engine, while `require_ready` raises the reason."""

    def __init__(self, app: ASGIApp, require_ready: Callable[[], None]) -> None:
        self.app = app
        self._require_ready = require_ready

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        always = path in ALWAYS_ANSWERED or path.startswith(UPLOAD) or _SESSION.fullmatch(path)
        if scope["type"] == "http" and not always:
            self._require_ready()
        await self.app(scope, receive, send)
