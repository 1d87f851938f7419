"""Guard every route, vLLM's too: token and body; notice a client that leaves."""

import asyncio
import hashlib
import hmac
import re
import resource
from collections.abc import Awaitable, Callable, Collection, Coroutine
from typing import Any

import h11
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from hocket.common.machine import is_any
from hocket.common.tasks import cancel
from hocket.server.errors import ApiError

MAX_BODY_BYTES = 64 << 20
BODY_TIMEOUT_S = 60.0
CLIENT_CLOSED_REQUEST = 499
"""Status of an answer that no client receives: it has disconnected."""
HEAD_TIMEOUT_S = 20.0  # for request line and headers, or the rest of what is answered already
MAX_CONNECTIONS = 4096  # without an admitted request, of one address: a trainer and its agents have as many as requests
ADMITTED = "hocket_admitted"  # in the state of a request's scope


class Connection(H11Protocol):  # httptools, which some machines have, takes heads of any length
    """Close connections whose head is late, and the oldest without an admitted request of too many from one address."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.begun = self.loop.time()
        self.address = self.client and self.client[0]  # None: it has left
        self._expect_head()
        most = min(MAX_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
        here: Collection[Any] = self.connections
        strangers = [one for one in here if one.address == self.address and one.is_strange]
        if len(strangers) > most:
            oldest = min(strangers, key=lambda one: one.begun)
            self.connections.remove(oldest)
            oldest.transport.abort()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.is_idle and self._before is not self.cycle:  # a part of the next head, the first
            self._expect_head()

    def send_400_response(self, msg: str) -> None:
        """Answer a head that is no HTTP; a request that goes on as none gets no answer any more."""
        if self.conn.our_state is h11.IDLE:
            super().send_400_response(msg)
        else:
            self.cycle.disconnected = True
            self.transport.close()

    @property
    def is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    @property
    def is_strange(self) -> bool:
        return self.is_idle or self._lacks_body or ADMITTED not in self.cycle.scope["state"]

    @property
    def _lacks_body(self) -> bool:
        return self.conn.their_state is h11.SEND_BODY

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._lacks_body:  # it was answered before it ended
            self._expect_head()

    def _expect_head(self) -> None:
        self._before = self.cycle
        self.loop.call_later(HEAD_TIMEOUT_S, self._close_unless_asked, self.cycle)

    def _close_unless_asked(self, before: object) -> None:
        if self.cycle is before:
            self.transport.close()


class Guard:
    """Answer, in place of the app, requests that no route may see.

    Without a token it refuses pages of other sites; with one, all but GET of `free` that brings neither the token nor a
    key of its path. It reads each body before the route does, but that of `free`, and those of PUT: files, which their
    routes limit.
    """

    def __init__(self, app: ASGIApp, *, host: str, token: str | None, free: str = "/health") -> None:
        self.app = app
        self._free = free
        self.opens: Callable[[str, bytes], bool] = lambda path, key: False  # whether the key opens the path
        # Paths, and their check: body → None, or another body; it raises ApiError
        self.checks: list[tuple[re.Pattern[str], Callable[[bytes], Awaitable[bytes | None]]]] = []
        self._hosts = {"localhost", "127.0.0.1", "[::1]", host, f"[{host}]"}
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # the app's life: servers take no websockets
            return await self.app(scope, receive, send)
        try:
            is_free = (scope["method"], scope["path"]) == ("GET", self._free)
            if self._token is None:
                self._require_own_page(Headers(scope=scope))
            elif not is_free:
                self._require_token(scope["path"], Headers(scope=scope), self._token)
            if is_free:  # its body is never read
                return await self.app(scope, receive, send)
            if scope["method"] != "PUT":
                body = await self._body(Request(scope, receive))
                for paths, check in self.checks:
                    if paths.fullmatch(scope["path"]):
                        body = await check(body) or body
                receive = replay({"type": "http.request", "body": body, "more_body": False}, receive)
            scope.setdefault("state", {})[ADMITTED] = True
            await self.app(scope, receive, send)
        except ClientDisconnect:
            pass
        except ApiError as error:
            await error.response()(scope, receive, send)

    def _require_token(self, path: str, headers: Headers, token: str) -> None:
        scheme, _, given = ", ".join(headers.getlist("authorization")).partition(" ")  # two are no token
        key = given.encode("latin-1")
        # Digests have one length, so that the comparison takes the same time for any guess.
        known = hmac.compare_digest(_digest(key), _digest(token.encode())) or self.opens(path, key)
        if scheme.lower() != "bearer" or not known:
            hint = "send the header 'Authorization: Bearer TOKEN' with the server's server.token"
            raise ApiError(401, "unauthorized", "this route needs the server's token", hint)

    def _require_own_page(self, headers: Headers) -> None:
        """Refuse a browser on a page of another site, even one whose name leads to this machine."""
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
        """Return the whole body, whose Content-Length is not believed. Raises ClientDisconnect."""
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                async for chunk in request.stream():
                    body += chunk
                    if len(body) > MAX_BODY_BYTES:
                        text = f"the body is larger than {MAX_BODY_BYTES >> 20} MiB"
                        raise ApiError(413, "body_too_large", text, "send fewer prompts in one request")
        except TimeoutError:
            text = f"the body did not arrive within {BODY_TIMEOUT_S:g} s"
            raise ApiError(408, "body_timeout", text, "send it again, or in parts over a faster connection") from None
        return bytes(body)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def replay(message: Message, receive: Receive) -> Receive:
    """Return a receive that gives one message first, then those of the connection."""
    waiting = [message]

    async def replayed() -> Message:
        return waiting.pop() if waiting else await receive()

    return replayed


async def unless_client_leaves(request: Request, answer: Coroutine[Any, Any, Response]) -> Response:
    """Return the answer, or cancel the work on it as soon as the client has gone."""
    working = asyncio.create_task(answer)
    leaving = asyncio.create_task(_left(request))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else Response(status_code=CLIENT_CLOSED_REQUEST)
    finally:
        await cancel((working, leaving))


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
