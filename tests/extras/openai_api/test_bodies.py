"""Bodies for vLLM's own routes: what vLLM is spared, and that everything else reaches it as it was sent."""

import json
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request

from hocket.server.state import ASLEEP, Condition, EngineState
from support.engines import asking, idle_engine, make_engine, make_llm, wrap

MESSAGE = {"role": "user", "content": "hi"}


@pytest.fixture
async def http() -> AsyncGenerator[httpx.AsyncClient, None]:
    app = FastAPI()

    @app.post("/v1/{route:path}")
    async def reached(request: Request) -> Any:
        body = await request.body()
        if b"stumble" in body:
            raise AssertionError("vLLM did not expect this")
        return len(body)

    async with asking(wrap(idle_engine(), app.router.routes[-1])) as client:
        yield client


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [MESSAGE] * 500},
        {"messages": [MESSAGE], "n": 128, "temperature": 99, "nonsense": [[]]},  # vLLM says what is wrong with it
        {"prompt": [[5, 6]] * 1024, "n": 16},
        {"prompt": ["a"] * 1024},
        {"prompt": "a" * 1_000_000},
        {"prompt": "half a pair, as text: \\\\ud800 and a whole one: \U0001f600"},
        "text",
    ],
)
async def test_good_bodies_and_those_of_whom_vllm_knows_what_is_wrong_pass(http: httpx.AsyncClient, body: Any) -> None:
    content = json.dumps(body).encode()
    answer = await http.post("/v1/chat/completions", content=content)
    assert (answer.status_code, answer.text) == (200, str(len(content)))


async def test_while_the_engine_can_not_generate_no_client_route_is_reached() -> None:
    engine = make_engine(make_llm(), "model.path=checkpoints/tiny-sort")
    engine._condition = Condition(None, state=EngineState.ASLEEP, reason=ASLEEP)
    async with asking(wrap(engine)) as http:
        for path in ("/v1/chat/completions", "/v1/models", "/tokenize", "/detokenize", "/sessions/x/v1/messages"):
            refused = await http.post(path, json={})
            assert (refused.status_code, refused.json()["error"]) == (503, ASLEEP.model_dump()), path


def with_part(**part: Any) -> bytes:
    return json.dumps({"messages": [MESSAGE, {"role": "user", "content": ["hi", part]}]}).encode()


URL = {"url": "data:image/png;base64,"}
BAD: dict[str, tuple[bytes, int]] = {
    "a hundred thousand wrong messages": (b'{"messages": [' + b"1," * 100_000 + b"1]}", 422),
    "as many hidden in messages": (b'{"messages": [{"content": [' + b"{}," * 100_000 + b"1]}]}", 422),
    "a prompt of negative ids": (b'{"prompt": [[5], [-1]]}', 422),
    "too many prompts": (b'{"prompt": [' + b'"a",' * 1024 + b'"a"]}', 422),
    "too many completions": (b'{"prompt": "a", "n": 10000}', 422),
    "as many, as vLLM reads it": (b'{"prompt": "a", "n": "10000"}', 422),
    "too many in all": (json.dumps({"prompt": [[5]] * 1024, "n": 17}).encode(), 422),
    "deep": (b"[" * 200_000, 400),
    "no JSON": (b'{"prompt": ', 400),
    "half a surrogate pair": (b'{"prompt": "a", "stop": "\\ud800"}', 400),
    "NaN": (b'{"prompt": "a", "temperature": NaN}', 400),
    "more than any number": (b'{"prompt": "a", "temperature": 1e999}', 400),
    "no UTF-8": (b'{"prompt": "\xff"}', 400),
    "more than any prompt": (b" " * (17 << 20), 413),
    "an image for a model that takes none": (with_part(type="image_url", image_url=URL), 422),
    "one whose name in vLLM's caches it chooses": (with_part(type="image_url", image_url=URL, uuid="a"), 422),
    "one behind a text's type": (with_part(type="text", text="a", image_url=URL, uuid="a"), 422),
    "one without a type": (with_part(image_url="http://localhost"), 422),
    "a film": (with_part(type="video_url", video_url=URL), 422),
    "pickled numbers": (with_part(type="image_embeds", image_embeds="gASV"), 422),
    "a type that is none": (with_part(type=["text"]), 422),
    "what vLLM stumbles over": (b'{"prompt": "stumble"}', 400),
}


@pytest.mark.parametrize("kind", BAD)
async def test_bodies_that_would_hurt_are_refused_in_our_form(http: httpx.AsyncClient, kind: str) -> None:
    content, status = BAD[kind]
    for path in ("/v1/completions", *(["/sessions/x/v1/completions"] if "stumble" not in kind else [])):
        answer = await http.post(path, content=content)
        assert answer.status_code == status, answer.text
        error = answer.json()["error"]
        assert all(isinstance(error[key], str) and error[key] for key in ("code", "message", "hint"))
        assert len(answer.content) < 1000


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"input": "a", "request_id": "b"}, 400),
        ({"input": "a" * (300 << 10)}, 413),
        ({"input": "a" * (300 << 10), "store": False}, 200),
        ({"input": "a"}, 200),
    ],
)
async def test_a_stored_response_has_no_id_of_its_client_and_a_small_request(
    http: httpx.AsyncClient, body: dict[str, Any], status: int
) -> None:
    assert (await http.post("/v1/responses", json=body)).status_code == status


async def test_a_path_with_a_newline_reaches_no_route(http: httpx.AsyncClient) -> None:
    answer = await http.post("/v1/completions%0A", content=b'{"prompt": "a", "n": 10000}')
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "bad_path")
