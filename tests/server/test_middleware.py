"""The guard in front of every route, without an engine."""

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
    async with client(guard(free=("/",))) as http:
        assert [(await http.get(path)).status_code for path in ("/", "/health", "/data")] == [200, 401, 401]


async def test_without_the_token_only_get_health_answers() -> None:
    async with client(guard()) as http:
        assert (await http.get("/health")).status_code == 200
        for method, path in (("POST", "/health"), ("GET", "//health"), ("GET", "/health/")):
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
FILLING = b"x" * (30 << 10)
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
async def opened(free: tuple[str, ...] = ("/health",), host: str = "127.0.0.1") -> AsyncIterator[Door]:
    """Opens a door whose server believes that it listens on a host."""
    door = Door()
    some = [Route("/hold", door.hold), Route("/early", door.early, methods=["PUT"])]
    app = Starlette(routes=[*some, Route("/{path:path}", echo, methods=["GET", "PUT"])])
    guarded = Guard(app, host="localhost", token=TOKEN, free=free)
    async with asyncio.timeout(60), listening(guarded, host) as door.port:
        yield door
        door.close()


async def answered(reader: asyncio.StreamReader, status: bytes) -> None:
    assert b" %s " % status in await reader.readuntil(b"\r\n")


async def test_no_body_of_the_free_route_is_waited_for_and_heads_are_bounded() -> None:
    async with opened(free=("/hold",)) as door:
        door.held.set()
        asks, _ = await door.sent(b"GET /hold HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n")
        await answered(asks, b"200")
        long, rest = await door.sent(HALF + FILLING)
        other, _ = await door.sent(HALF + b"\r\n\r\n")
        await answered(other, b"401")  # by now the server has read the part before
        rest.write(FILLING + b"\r\n\r\n")
        await answered(long, b"401")
        endless, _ = await door.sent(HALF + b"x" * (1 << 20))
        with contextlib.suppress(ConnectionResetError):
            await answered(endless, b"400")


async def statuses(port: int, *requests: bytes) -> list[int]:
    """The status of the answer to each request, on a connection of its own."""
    numbers = []
    for request in requests:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request)
        numbers.append(int((await reader.readuntil(b"\r\n")).split()[1]))
        writer.close()
    return numbers


async def test_a_head_is_answered_as_the_get_without_a_body() -> None:
    app = Starlette(routes=[Route("/{path:path}", echo, methods=["GET"])])
    async with listening(Guard(app, host="localhost", token=TOKEN)) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        key = f"Authorization: Bearer {TOKEN}\r\n"
        # The second answer begins right behind the head of the first.
        for path, extra in (("/health", ""), ("/x", key), ("/x", "")):
            writer.write(f"HEAD {path} HTTP/1.1\r\nHost: localhost\r\n{extra}\r\n".encode())
        heads = [(await reader.readuntil(b"\r\n\r\n")).decode() for _ in range(3)]
        writer.close()
    assert [int(head.split()[1]) for head in heads] == [200, 200, 401]
    assert "content-length: 1\r\n" in heads[1]


async def test_a_target_may_be_a_whole_url_whose_host_counts() -> None:
    app = Starlette(routes=[Route("/a b/x", echo, methods=["GET"])])
    async with listening(Guard(app, host="localhost", token=None)) as port:
        request = b"GET http://%b HTTP/1.1\r\nHost: %b\r\n\r\n"
        assert await statuses(
            port,
            request % (b"localhost/a%20b/x?y=1", b"attacker.example"),
            request % (b"localhost:1/a%20b/x", b"localhost"),
            request % (b"attacker.example/a%20b/x", b"localhost"),
            request % (b"localhost", b"localhost"),
        ) == [200, 200, 403, 404]


async def test_a_target_that_is_neither_path_nor_url_is_asked_for_the_token_too() -> None:
    targets = (b"//[x", b"http://[x", b"http:///x", b"*", b"http://u@localhost/x")
    async with opened() as door:
        for target in targets:
            for method in (b"GET", b"HEAD"):
                request = b"%b %b HTTP/1.1\r\nHost: localhost\r\n\r\n" % (method, target)
                assert await statuses(door.port, request) == [401], (method, target)


async def test_a_whole_url_needs_the_token_of_its_path() -> None:
    async with opened() as door:
        assert await statuses(
            door.port,
            b"GET http://localhost/health HTTP/1.1\r\nHost: localhost\r\n\r\n",
            b"GET http://localhost/x HTTP/1.1\r\nHost: localhost\r\n\r\n",
            b"GET http://x/../health HTTP/1.1\r\nHost: localhost\r\n\r\n",
        ) == [200, 401, 401]


async def test_a_probe_that_names_no_host_gets_the_state_and_nothing_else() -> None:
    """A load balancer may speak HTTP/1.0. A browser names its host always, and a page of it its origin."""
    app = Starlette(routes=[Route("/{path:path}", echo, methods=["GET", "POST"])])
    async with listening(Guard(app, host="localhost", token=None)) as port:
        for path in (b"/health", b"/ready", b"/live"):
            assert await statuses(
                port,
                b"GET %b HTTP/1.0\r\n\r\n" % path,
                b"HEAD %b HTTP/1.0\r\n\r\n" % path,
                b"POST %b HTTP/1.0\r\nContent-Length: 0\r\n\r\n" % path,
                b"GET %b HTTP/1.0\r\nOrigin: http://attacker.example\r\n\r\n" % path,
                b"GET %b HTTP/1.0\r\nHost: attacker.example\r\n\r\n" % path,
            ) == [200, 200, 403, 403, 403]
        assert await statuses(port, b"GET /v1/models HTTP/1.0\r\n\r\n", b"GET /health/ HTTP/1.0\r\n\r\n") == [403, 403]


async def test_a_client_that_waits_for_leave_to_send_its_body_gets_it_once_it_has_shown_the_token() -> None:
    app = Starlette(routes=[Route("/{path:path}", echo, methods=["POST"])])
    head = "POST /x HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\nExpect: 100-continue\r\n"
    async with asyncio.timeout(60), listening(Guard(app, host="localhost", token=TOKEN)) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"{head}Authorization: Bearer {TOKEN}\r\n\r\n".encode())
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"abc")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        assert await reader.readexactly(1) == b"3"
        writer.close()
        assert await statuses(port, f"{head}\r\n".encode()) == [401]


async def test_a_compressed_body_is_refused_and_one_as_it_is_passes() -> None:
    async with client(guard(), **BEARER) as http:
        for encoding, status in (("gzip", 415), ("zstd, gzip", 415), ("identity", 200), ("Identity", 200)):
            answer = await http.post("/x", content=b"abc", headers={"Content-Encoding": encoding})
            assert answer.status_code == status, encoding
        refused = await http.post("/x", content=b"abc", headers={"Content-Encoding": "br"})
    assert error_of(refused) == (415, "encoded_body")
    assert "Content-Encoding: br " in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([("x-api-key", TOKEN)], 200),
        ([("x-api-key", "wrong")], 401),
        ([("x-api-key", "")], 401),
        ([("x-api-key", f"Bearer {TOKEN}")], 401),
        ([("x-api-key", TOKEN), ("x-api-key", TOKEN)], 401),
        ([("x-api-key", "wrong"), ("x-api-key", TOKEN)], 401),
        # Where both headers are there, the usual one counts.
        ([("authorization", f"Bearer {TOKEN}"), ("x-api-key", "wrong")], 200),
        ([("authorization", "Bearer wrong"), ("x-api-key", TOKEN)], 401),
    ],
)
async def test_the_header_of_anthropic_s_clients_brings_the_token_too(
    headers: list[tuple[str, str]], status: int
) -> None:
    async with client(guard()) as http:
        assert (await http.post("/v1/messages", headers=headers)).status_code == status


async def test_the_key_of_a_session_comes_in_either_header_and_opens_its_paths_alone() -> None:
    guarded = guard()
    guarded.opens = lambda path, key: (path, key) == ("/sessions/a/v1/messages", b"key")
    async with client(guarded) as http:
        for headers in ({"x-api-key": "key"}, {"authorization": "Bearer key"}):
            assert (await http.post("/sessions/a/v1/messages", headers=headers)).status_code == 200
            assert (await http.post("/sessions/b/v1/messages", headers=headers)).status_code == 401
