"""The guard in front of every route, and the connections below it, without an engine."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from hocket.protocol import ErrorResponse
from hocket.server.middleware import Guard
from support.engines import error_of, listening

TOKEN = "correct-horse"
BEARER = {"Authorization": f"Bearer {TOKEN}"}


async def echo(request: Request) -> PlainTextResponse:
    return PlainTextResponse(str(len(await request.body())))


def guard(**how: Any) -> Guard:
    """An app that answers with the length of any body, behind the guard."""
    methods = ["GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD"]
    app = Starlette(routes=[Route("/{path:path}", echo, methods=methods)])
    return Guard(app, **({"host": "test", "token": TOKEN} | how))


def client(guard: Guard, **headers: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(guard), base_url="http://test", headers=headers)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        *(([header], 200) for header in (f"Bearer {TOKEN}", f"bearer {TOKEN}")),
        *(([header], 401) for header in ("Bearer wrong", "Bearer", "", f"Basic {TOKEN}", f"Bearer {TOKEN} ", TOKEN)),
        *(([header], 401) for header in (f"Bearer  {TOKEN}", f"Bearer {TOKEN}x")),
        ([f"Bearer {TOKEN}", "Bearer wrong-token"], 401),
        ([], 401),
    ],
)
async def test_only_the_exact_token_passes(headers: list[str], status: int) -> None:
    async with client(guard()) as http:
        response = await http.get("/v1/models", headers=[("Authorization", header) for header in headers])
    assert response.status_code == status
    if status == 401:
        assert ErrorResponse.model_validate(response.json()).error.code == "unauthorized"
        assert TOKEN not in response.text


async def test_another_route_may_be_the_free_one() -> None:
    async with client(guard(free="/")) as http:
        assert [(await http.get(path)).status_code for path in ("/", "/health", "/data")] == [200, 401, 401]


async def test_without_the_token_only_get_health_answers() -> None:
    async with client(guard()) as http:
        assert (await http.get("/health")).status_code == 200
        for method, path in (("POST", "/health"), ("GET", "//health"), ("GET", "/health/"), ("HEAD", "/health")):
            assert (await http.request(method, path)).status_code == 401, (method, path)


async def run(message: Any) -> list[Any]:
    """Returns what a guard sends that receives the same message again and again, or waits for ever for None."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return message or await asyncio.Event().wait()

    headers = [(b"authorization", f"Bearer {TOKEN}".encode())]
    await guard()({"type": "http", "method": "POST", "path": "/x", "headers": headers}, receive, send)
    return sent


async def test_a_body_is_read_up_to_the_limit_and_must_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hocket.server.middleware.MAX_BODY_BYTES", 1000)
    async with client(guard(), **BEARER) as http:
        assert (await http.post("/x", content=b"a" * 1000)).text == "1000"
        assert error_of(await http.post("/x", content=b"a" * 1001)) == (413, "body_too_large")
    endless = {"type": "http.request", "body": b"a" * 100, "more_body": True}
    assert (await run(endless))[0]["status"] == 413
    assert await run({"type": "http.disconnect"}) == []
    monkeypatch.setattr("hocket.server.middleware.BODY_TIMEOUT_S", 0.01)
    assert (await run(None))[0]["status"] == 408


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"host": "127.0.0.1:8000"}, 200),
        ({"host": "[::1]:8000"}, 200),
        ({"host": "localhost:8000", "origin": "http://localhost:8000"}, 200),  # its own /docs
        ({"origin": "https://attacker.example"}, 403),
        ({"host": "attacker.example", "origin": "http://attacker.example"}, 403),  # a name that leads to this machine
        ({"host": "attacker.example"}, 403),
        ({"host": "["}, 403),
        ({"host": "[::1"}, 403),
        ({"origin": "null"}, 403),
    ],
)
async def test_a_foreign_page_can_not_use_a_server_without_a_token(headers: dict[str, str], status: int) -> None:
    # A browser sends simple POSTs to any address, also that of this machine, without asking first.
    async with client(guard(token=None)) as http:
        response = await http.post("/generate", content="{}", headers=headers)
    assert response.status_code == status
    assert status == 200 or response.json()["error"]["code"] == "foreign_page"


@pytest.mark.parametrize("host", ["0.0.0.0:8000", "[::]:8000", "0.0.0.0"])
async def test_a_client_that_takes_a_servers_wildcard_for_its_address_is_told_which_to_ask(host: str) -> None:
    async with client(guard(token=None)) as http:
        response = await http.get("/generate", headers={"host": host})
        page = await http.get("/generate", headers={"host": host, "origin": "https://attacker.example"})
    assert (response.status_code, page.status_code) == (403, 403)
    assert response.json()["error"]["hint"] == "ask 127.0.0.1 in its place"
    assert page.json()["error"]["hint"] == "set server.token to let it"


HALF = b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: "
WHOLE = HALF + b"y\r\n\r\n"
REFUSED = b"POST /x HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n"
KEY = f"Authorization: Bearer {TOKEN}\r\n".encode()
HOLD = b"GET /hold HTTP/1.1\r\nHost: localhost\r\n" + KEY + b"\r\n"
NO_PUT = b"PUT /x HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\nx"
EARLY = b"PUT /early HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n" + KEY + b"\r\nx"
HALF_PUT = b"PUT /x HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n" + KEY + b"\r\nx"
HALF_BODY = b"POST /x HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n" + KEY + b"\r\nx"
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Door:
    """An app behind the guard that listens: /hold is answered when `held` is set, /early before its body."""

    def __init__(self) -> None:
        self.port, self.held, self._writers = 0, asyncio.Event(), list[asyncio.StreamWriter]()

    async def sent(self, *parts: bytes, address: str = "127.0.0.1") -> Connection:
        """Sends each part once the one before is answered."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, local_addr=(address, 0))
        self._writers.append(writer)
        writer.write(parts[0])
        for part in parts[1:]:
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 ")
            writer.write(part)
        return reader, writer

    async def hold(self, request: Request) -> PlainTextResponse:
        await self.held.wait()
        return PlainTextResponse("at last")

    async def early(self, request: Request) -> PlainTextResponse:
        return PlainTextResponse("no")

    def close(self) -> None:
        self.held.set()
        for writer in self._writers:
            writer.close()


@contextlib.asynccontextmanager
async def opened(free: str = "/health") -> AsyncIterator[Door]:
    door = Door()
    some = [Route("/hold", door.hold), Route("/early", door.early, methods=["PUT"])]
    app = Starlette(routes=[*some, Route("/{path:path}", echo, methods=["GET", "PUT"])])
    async with asyncio.timeout(60), listening(Guard(app, host="localhost", token=TOKEN, free=free)) as door.port:
        yield door
        door.close()


async def is_closed(reader: asyncio.StreamReader) -> None:
    """Waits until the server closes a connection, on which it says nothing more."""
    with contextlib.suppress(ConnectionResetError):
        assert await reader.read() == b""


async def answered(reader: asyncio.StreamReader, status: bytes) -> None:
    assert b" %s " % status in await reader.readuntil(b"\r\n")


async def test_late_heads_are_closed_and_long_requests_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hocket.server.middleware.HEAD_TIMEOUT_S", 1.0)  # parts that are whole must come before
    async with opened() as door:
        held, _ = await door.sent(HOLD)
        late = [(b"",), (HALF,), (WHOLE, HALF), (REFUSED, b"x"), (REFUSED,), (NO_PUT,), (EARLY,)]
        connections = await asyncio.gather(*(door.sent(*parts) for parts in late))
        for reader, _ in connections:
            await reader.read()  # ends where it is closed
        door.held.set()
        await answered(held, b"200")


@pytest.mark.parametrize("part", [HALF, HALF_BODY, HALF_PUT])
async def test_of_an_address_s_idle_connections_the_oldest_goes(monkeypatch: pytest.MonkeyPatch, part: bytes) -> None:
    monkeypatch.setattr("hocket.server.middleware.MAX_CONNECTIONS", 3)
    async with opened() as door:
        other, finish = await door.sent(HALF, address="127.0.0.2")
        busy, _ = await door.sent(HOLD)
        halves = [await door.sent(part) for _ in range(20)]
        whole, _ = await door.sent(WHOLE)
        await answered(whole, b"200")
        for slow, _ in halves[:-2]:
            await is_closed(slow)
        finish.write(b"y\r\n\r\n")
        door.held.set()
        for reader in (other, busy):
            await answered(reader, b"200")


async def test_no_body_of_the_free_route_is_waited_for_and_no_head_is_endless() -> None:
    async with opened(free="/hold") as door:
        door.held.set()
        asks, _ = await door.sent(b"GET /hold HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n")
        await answered(asks, b"200")
        endless, _ = await door.sent(HALF + b"x" * (1 << 20))
        with contextlib.suppress(ConnectionResetError):
            await answered(endless, b"400")


async def test_of_too_many_endless_requests_without_the_token_the_oldest_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hocket.server.middleware.MAX_CONNECTIONS", 3)
    async with opened(free="/hold") as door:
        asked = [await door.sent(b"GET /hold HTTP/1.1\r\nHost: localhost\r\n\r\n") for _ in range(20)]
        other, _ = await door.sent(WHOLE)
        await answered(other, b"401")
        for reader, _ in asked[:-2]:
            await is_closed(reader)


async def test_a_request_that_goes_on_as_none_is_closed_without_a_log_line(capfd: pytest.CaptureFixture[str]) -> None:
    head = b" /hold HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\nAuthorization: "
    async with opened() as door:
        for method in (b"HEAD", b"POST", b"GET"):
            for token in (b"none", f"Bearer {TOKEN}".encode()):
                reader, _ = await door.sent(method + head + token + b"\r\n\r\n-1\r\n")
                await is_closed(reader)
        refused, _ = await door.sent(b"what?\r\n\r\n")
        await answered(refused, b"400")
    assert capfd.readouterr().err == ""
