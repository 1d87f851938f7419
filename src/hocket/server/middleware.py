"""What stands in front of every route, vLLM's own included: the token, the size of the body, a failed engine."""

import asyncio
import hashlib
import hmac
import re
from collections.abc import Callable
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hocket.protocol import ErrorBody
from hocket.server.errors import ApiError

OPEN_ROUTE = ("GET", "/health")
"""The one route that needs no token."""
ALWAYS_ANSWERED = frozenset(
    {"/health", "/init_weight_group", "/reload_weights", "/sleep", "/wake_up", "/metrics", "/docs", "/openapi.json"}
)
"""Paths that an engine that failed or sleeps leaves open: to look at it, to wake it, and to load weights that work."""
UPLOAD = "/upload/"
"""Beginning of the paths whose bodies are files: the route reads them piece by piece, and bounds them itself."""
_SESSION = re.compile(r"/sessions/[^/]+")
"""Paths of sessions themselves, which are told and ended also without an engine."""
BODY_TIMEOUT_S = 60.0


class RequireToken:
    """Default-deny: without the bearer token only GET /health passes, whatever the route, method or protocol.

    Args:
        admits: tells whether a key that is not the token opens a path.
    """

    def __init__(self, app: ASGIApp, token: str, admits: Callable[[str, bytes], bool]) -> None:
        self.app = app
        self._admits = admits
        self._digest = hashlib.sha256(token.encode()).digest()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or self._allowed(scope):
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            error = ApiError(
                401,
                "unauthorized",
                "this route needs the server's token",
                "send the header 'Authorization: Bearer TOKEN' with the server's server.token",
            )
            await error.response()(scope, receive, send)

    def _allowed(self, scope: Scope) -> bool:
        if (scope.get("method"), scope["path"]) == OPEN_ROUTE:
            return True
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(given) != 1:
            return False
        scheme, _, token = given[0].partition(b" ")
        # Digests have one length, so that the comparison takes the same time for any guess.
        known = hmac.compare_digest(hashlib.sha256(token).digest(), self._digest)
        return scheme.lower() == b"bearer" and (known or self._admits(scope["path"], token))


class RefuseWebPages:
    """Without a token, answers 403 to browsers whose page is another's, even if it calls this machine by its own name.

    Args:
        host: the address that the server listens on.
    """

    def __init__(self, app: ASGIApp, host: str) -> None:
        self.app = app
        self._hosts = {"localhost", "127.0.0.1", "::1", host}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        headers = {name: value.decode("latin-1") for name, value in scope.get("headers", ())}
        host, origin = headers.get(b"host", ""), headers.get(b"origin")
        if urlsplit(f"//{host}").hostname in self._hosts and origin in (None, f"http://{host}"):
            await self.app(scope, receive, send)
            return
        error = ApiError(
            403, "foreign_page", f"a page of {origin or host!r} may not use this server", "set server.token to let it"
        )
        await error.response()(scope, receive, send)


class LimitBody:
    """Reads each body, but for uploads, up to a limit before the route sees it; Content-Length is not believed."""

    def __init__(self, app: ASGIApp, max_bytes: int, timeout_s: float = BODY_TIMEOUT_S) -> None:
        self.app = app
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith(UPLOAD):
            await self.app(scope, receive, send)
            return
        try:
            async with asyncio.timeout(self._timeout_s):
                body = await self._read(receive)
        except TimeoutError:
            error = ApiError(
                408,
                "body_timeout",
                f"the body did not arrive within {self._timeout_s:g} s",
                "send it again, or in parts over a faster connection",
            )
            await error.response()(scope, receive, send)
        except ApiError as error:
            await error.response()(scope, receive, send)
        else:
            if body is not None:
                await self.app(scope, _replay(body, receive), send)

    async def _read(self, receive: Receive) -> bytes | None:
        parts: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            part = message.get("body", b"")
            size += len(part)
            if size > self._max_bytes:
                raise ApiError(
                    413,
                    "body_too_large",
                    f"the body is larger than {self._max_bytes >> 20} MiB",
                    "send fewer prompts in one request, or raise server.max_body_mib",
                )
            parts.append(part)
            if not message.get("more_body", False):
                return b"".join(parts)


def _replay(body: bytes, receive: Receive) -> Receive:
    """Returns a receive that gives the whole body once, then what the connection says."""
    given = False

    async def replayed() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replayed


class RefuseWhenFailed:
    """Answers 503 with the reason on every route that would need an engine, while it can't generate.

    Args:
        failure: returns the reason, None while all is well.
    """

    def __init__(self, app: ASGIApp, failure: Callable[[], ErrorBody | None]) -> None:
        self.app = app
        self._failure = failure

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"] if scope["type"] == "http" else None
        passes = path is None or path in ALWAYS_ANSWERED or path.startswith(UPLOAD) or _SESSION.fullmatch(path)
        reason = None if passes else self._failure()
        if reason is None:
            await self.app(scope, receive, send)
        else:
            await ApiError.of(503, reason).response()(scope, receive, send)
