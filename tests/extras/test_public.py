"""The connections of a server that other machines reach."""

import asyncio
import contextlib

import pytest
from tests.server.test_middleware import HALF, TOKEN, Door, answered, opened

from hocket.extras.public import Connection, QuietConnection
from hocket.server.main import http_server

WHOLE = HALF + b"y\r\n\r\n"
REFUSED = b"POST /x HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n"
KEY = f"Authorization: Bearer {TOKEN}\r\n".encode()
HOLD = b"GET /hold HTTP/1.1\r\nHost: localhost\r\n" + KEY + b"\r\n"
NO_PUT = b"PUT /x HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\nx"
EARLY = b"PUT /early HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n" + KEY + b"\r\nx"
HALF_PUT = b"PUT /x HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n" + KEY + b"\r\nx"
HALF_BODY = b"POST /x HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n" + KEY + b"\r\nx"


def public(free: str = "/health") -> contextlib.AbstractAsyncContextManager[Door]:
    return opened(free, host="0.0.0.0")


@pytest.mark.parametrize(
    ("host", "is_public"),
    [
        ("0.0.0.0", True),
        ("::", True),
        ("example.org", True),
        ("127.0.0.1", False),
        ("::1", False),
        ("localhost", False),
    ],
)
def test_a_server_that_other_machines_reach_has_such_connections_and_no_warning(
    capsys: pytest.CaptureFixture[str], host: str, is_public: bool
) -> None:
    used = http_server(None, host).config.http  # type: ignore[arg-type]
    assert used is (Connection if is_public else QuietConnection)
    assert capsys.readouterr().out == ""


async def is_closed(reader: asyncio.StreamReader) -> None:
    """Waits until the server closes a connection, on which it says nothing more."""
    with contextlib.suppress(ConnectionResetError):
        assert await reader.read() == b""


async def test_late_heads_are_closed_and_long_requests_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hocket.extras.public.HEAD_TIMEOUT_S", 1.0)  # parts that are whole must come before
    async with public() as door:
        held, _ = await door.sent(HOLD)
        late = [(b"",), (HALF,), (WHOLE, HALF), (REFUSED, b"x"), (REFUSED,), (NO_PUT,), (EARLY,)]
        connections = await asyncio.gather(*(door.sent(*parts) for parts in late))
        for reader, _ in connections:
            await reader.read()  # ends where it is closed
        door.held.set()
        await answered(held, b"200")


@pytest.mark.parametrize("part", [HALF, HALF_BODY, HALF_PUT])
async def test_of_an_address_s_idle_connections_the_oldest_goes(monkeypatch: pytest.MonkeyPatch, part: bytes) -> None:
    monkeypatch.setattr("hocket.extras.public.MAX_CONNECTIONS", 3)
    async with public() as door:
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


async def test_of_too_many_endless_requests_without_the_token_the_oldest_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hocket.extras.public.MAX_CONNECTIONS", 3)
    async with public(free=("/hold",)) as door:
        asked = [await door.sent(b"GET /hold HTTP/1.1\r\nHost: localhost\r\n\r\n") for _ in range(20)]
        other, _ = await door.sent(WHOLE)
        await answered(other, b"401")
        for reader, _ in asked[:-2]:
            await is_closed(reader)


@pytest.mark.parametrize("host", ["0.0.0.0", "127.0.0.1"])
async def test_a_request_that_goes_on_as_none_is_closed_without_a_log_line(
    capfd: pytest.CaptureFixture[str], host: str
) -> None:
    head = b" /hold HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\nAuthorization: "
    async with opened(host=host) as door:
        for method in (b"HEAD", b"POST", b"GET"):
            for token in (b"none", f"Bearer {TOKEN}".encode()):
                reader, _ = await door.sent(method + head + token + b"\r\n\r\n-1\r\n")
                await is_closed(reader)
        refused, _ = await door.sent(b"what?\r\n\r\n")
        await answered(refused, b"400")
    assert capfd.readouterr().err == ""
