"""The guard in front of every route, without an engine."""

import asyncio
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from hocket.protocol import ErrorResponse
from hocket.server.middleware import Guard

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


async def test_a_body_is_read_up_to_the_limit_whatever_content_length_says_and_must_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hocket.server.middleware.MAX_BODY_BYTES", 1000)
    monkeypatch.setattr("hocket.server.middleware.BODY_TIMEOUT_S", 0.05)
    async with client(guard(), **BEARER) as http:
        assert (await http.post("/x", content=b"a" * 1000)).text == "1000"
        refused = await http.post("/x", content=b"a" * 1001)
    assert (refused.status_code, refused.json()["error"]["code"]) == (413, "body_too_large")
    endless = {"type": "http.request", "body": b"a" * 100, "more_body": True}
    assert (await run(endless))[0]["status"] == 413
    assert (await run(None))[0]["status"] == 408
    assert await run({"type": "http.disconnect"}) == []


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
async def test_a_page_of_somebody_else_can_not_use_a_server_without_a_token(
    headers: dict[str, str], status: int
) -> None:
    # A browser sends simple POSTs to any address, also that of this machine, without asking first.
    async with client(guard(token=None)) as http:
        response = await http.post("/generate", content="{}", headers=headers)
    assert response.status_code == status
    assert status == 200 or response.json()["error"]["code"] == "foreign_page"
