"""The door in front of every route, without an engine."""

import asyncio
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from hocket.protocol import ErrorResponse
from hocket.server.errors import ApiError
from hocket.server.middleware import AnswerErrors, LimitBody, RefuseWhenFailed, RequireToken

TOKEN = "correct-horse"


async def echo(request: Request) -> PlainTextResponse:
    return PlainTextResponse(str(len(await request.body())))


def no_keys(path: str, key: bytes) -> bool:
    return False


def client(app: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(AnswerErrors(app)), base_url="http://test")


@pytest.fixture
def app() -> Starlette:
    methods = ["GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD"]
    return Starlette(routes=[Route("/{path:path}", echo, methods=methods)])


async def test_without_the_token_only_get_health_answers(app: Starlette) -> None:
    async with client(RequireToken(app, TOKEN, no_keys)) as http:
        assert (await http.get("/health")).status_code == 200
        assert (await http.post("/health")).status_code == 401
        for path in ("/generate", "/v1/models", "/docs", "/", "//health", "/health/", "/HEALTH"):
            for method in ("GET", "POST", "OPTIONS", "HEAD", "DELETE"):
                assert (await http.request(method, path)).status_code == 401, (method, path)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        *(([header], 200) for header in (f"Bearer {TOKEN}", f"bearer {TOKEN}", f"BEARER {TOKEN}")),
        *(([header], 401) for header in ("Bearer wrong", "Bearer", "", f"Basic {TOKEN}", f"Bearer {TOKEN} ", TOKEN)),
        *(([header], 401) for header in (f"Bearer  {TOKEN}", f"Bearer {TOKEN}x")),
        ([f"Bearer {TOKEN}", "Bearer wrong-token"], 401),
    ],
)
async def test_only_the_exact_token_passes(app: Starlette, headers: list[str], status: int) -> None:
    async with client(RequireToken(app, TOKEN, no_keys)) as http:
        response = await http.get("/v1/models", headers=[("Authorization", header) for header in headers])
    assert response.status_code == status
    if status == 401:
        assert ErrorResponse.model_validate(response.json()).error.code == "unauthorized"
        assert TOKEN not in response.text


async def run(app: Any, scope: Any, message: Any) -> list[Any]:
    """Returns what an app sends that receives the same message again and again, or waits for ever for None."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return message or await asyncio.Event().wait()

    await AnswerErrors(app)({"type": "http", "method": "POST", "path": "/x", "headers": []} | scope, receive, send)
    return sent


async def test_a_websocket_without_the_token_is_closed(app: Starlette) -> None:
    sent = await run(RequireToken(app, TOKEN, no_keys), {"type": "websocket"}, {"type": "websocket.connect"})
    assert sent == [{"type": "websocket.close", "code": 1008}]


async def test_a_body_of_exactly_the_limit_passes_and_one_byte_more_does_not(app: Starlette) -> None:
    async with client(LimitBody(app, 1000)) as http:
        assert (await http.post("/x", content=b"a" * 1000)).text == "1000"
        refused = await http.post("/x", content=b"a" * 1001)
    assert refused.status_code == 413
    assert ErrorResponse.model_validate(refused.json()).error.code == "body_too_large"


async def test_the_limit_holds_while_reading_whatever_content_length_says_and_a_body_must_end(app: Starlette) -> None:
    endless = {"type": "http.request", "body": b"a" * 100, "more_body": True}
    sent = await run(LimitBody(app, 1000), {"headers": [(b"content-length", b"5")]}, endless)
    assert sent[0]["status"] == 413
    sent = await run(LimitBody(app, 1000, timeout_s=0.05), {}, None)
    assert sent[0]["status"] == 408


async def test_after_a_failure_only_the_routes_that_help_answer(app: Starlette) -> None:
    reason: ApiError | None = None

    def require_ready() -> None:
        if reason is not None:
            raise reason

    async with client(RefuseWhenFailed(app, require_ready)) as http:
        assert (await http.post("/generate")).status_code == 200
        reason = ApiError(503, "reload_failed", "half loaded", "reload")
        for path in ("/generate", "/v1/chat/completions", "/tokenize", "/sessions", "/sessions/x/v1/completions"):
            refused = await http.post(path)
            assert refused.status_code == 503
            assert refused.json()["error"] == {"code": "reload_failed", "message": "half loaded", "hint": "reload"}
        for path in ("/health", "/reload_weights", "/metrics", "/sessions/x"):
            assert (await http.post(path)).status_code == 200
