"""Our routes on an app of their own, with a fake engine."""

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

import fakes
from hocket.config import Config, ServerConfig
from hocket.protocol import (
    ErrorBody,
    GenerateRequest,
    GenerateResponse,
    GroupRequest,
    GroupResponse,
    Health,
    ReloadRequest,
    ReloadResponse,
    SessionRequest,
)
from hocket.server import vllm_api
from hocket.server.app import assemble
from hocket.server.errors import ApiError
from hocket.server.requests import Job, RequestReader


class FakeEngine:
    """Completes each job with its own index, last job first."""

    version = 3
    model = "fake"

    def __init__(self, reader: RequestReader) -> None:
        self.reader = reader
        self.reason: ErrorBody | None = None
        self.break_after: int | None = None
        self.running = 0
        self.joined: GroupRequest | None = None
        self.aborted: list[str] = []

    def failure(self) -> ErrorBody | None:
        return self.reason

    def health(self) -> Health:
        failed = self.reason if self.reason is None or self.reason.code != "asleep" else None
        return fakes.health(version=self.version, model=self.model, in_flight=self.running, error=failed)

    async def read(self, body: bytes) -> tuple[GenerateRequest, list[Job]]:
        return self.reader.read(body)

    def check(self, request: SessionRequest) -> None:
        self.reader.check_sampling(request.sampling)

    async def abort(self, request_ids: Sequence[str]) -> None:
        self.aborted += request_ids

    async def completions(self, jobs: Sequence[Job]) -> AsyncGenerator[tuple[Job, dict[str, Any]], None]:
        self.running = len(jobs)
        try:
            for number, job in enumerate(reversed(jobs)):
                await asyncio.sleep(0)
                if number == self.break_after:
                    raise ApiError(503, "engine_dead", "it broke", "restart")
                yield (
                    job,
                    {
                        "token_ids": [job.index],
                        "logprobs": [-0.5],
                        "text": str(job.prompt),
                        "finish_reason": "length",
                        "versions": [[3, 0, 1]],
                    },
                )
        finally:
            self.running = 0

    async def reload(self, request: ReloadRequest) -> ReloadResponse:
        return ReloadResponse(version=request.version, seconds=0.1, num_tensors=2, checksum="c", session="s")

    async def join_group(self, request: GroupRequest) -> GroupResponse:
        self.joined = request
        return GroupResponse(session=request.session, workers=1)


@pytest.fixture
def engine(kit: Any) -> FakeEngine:
    return FakeEngine(
        RequestReader(
            kit.make_tokenizer(), vocab_size=96, max_length=32, limits=ServerConfig(), find_calls=vllm_api.find_calls
        )
    )


@pytest.fixture
async def http(engine: FakeEngine) -> AsyncGenerator[httpx.AsyncClient, None]:
    door = assemble(FastAPI(), engine, Config())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(door), base_url="http://localhost") as client:
        yield client


async def test_completions_come_back_in_the_order_of_the_request(http: httpx.AsyncClient) -> None:
    response = await http.post("/generate", json={"prompts": ["a", "b"], "n": 3})
    answer = GenerateResponse.model_validate_json(response.content)
    assert [[(c.text, *c.token_ids) for c in row] for row in answer.completions] == [
        [("0", 0), ("0", 1), ("0", 2)],
        [("1", 0), ("1", 1), ("1", 2)],
    ]
    assert (answer.version, answer.model) == (3, "fake")


async def test_a_stream_has_a_line_per_completion_as_it_finishes_and_an_end(http: httpx.AsyncClient) -> None:
    response = await http.post("/generate", json={"prompts": ["a", "b"], "stream": True})
    lines = [json.loads(line) for line in response.text.splitlines()]
    assert [(line["prompt"], line["index"]) for line in lines[:-1]] == [(1, 0), (0, 0)]
    assert lines[-1] == {"done": True, "version": 3, "model": "fake", "error": None}
    assert response.headers["content-type"] == "application/x-ndjson"


async def test_generation_that_breaks_is_an_error_with_a_reason_in_both_modes(
    http: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.break_after = 1
    whole = await http.post("/generate", json={"prompts": ["a", "b"]})
    assert whole.status_code == 503
    assert whole.json()["error"]["code"] == "engine_dead"
    stream = await http.post("/generate", json={"prompts": ["a", "b"], "stream": True})
    lines = [json.loads(line) for line in stream.text.splitlines()]
    assert len(lines) == 2
    assert lines[-1]["error"] == {"code": "engine_dead", "message": "it broke", "hint": "restart"}


async def test_a_failed_engine_is_unavailable_but_tells_why(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.reason = ErrorBody(code="engine_dead", message="gone", hint="restart")
    assert (await http.post("/generate", json={"prompts": ["a"]})).status_code == 503
    health = await http.get("/health")
    assert health.status_code == 200
    assert health.json()["error"] == {"code": "engine_dead", "message": "gone", "hint": "restart"}


async def test_wrong_method_and_unknown_path_have_our_error_form(http: httpx.AsyncClient) -> None:
    for method, path, status, code in (
        ("GET", "/generate", 405, "method_not_allowed"),
        ("PUT", "/reload_weights", 405, "method_not_allowed"),
        ("GET", "/nothing", 404, "not_found"),
    ):
        response = await http.request(method, path)
        assert (response.status_code, response.json()["error"]["code"]) == (status, code)


async def test_a_reload_request_is_validated(http: httpx.AsyncClient) -> None:
    good = {"version": 1, "source": {"kind": "disk", "name": "v1"}}
    assert (await http.post("/reload_weights", json=good)).json()["checksum"] == "c"
    for wrong in (
        {**good, "version": 0},
        {**good, "version": True},
        {**good, "version": "1"},
        {**good, "mode": "keep"},
        {**good, "source": {"kind": "disk"}},
        {**good, "source": {"kind": "pickle", "name": "v1"}},
        {**good, "source": {"kind": "nccl", "session": "g", "turn": 1, "buckets": []}},
        {**good, "in_flight": "forget"},
        {"version": 1},
        [],
    ):
        response = await http.post("/reload_weights", json=wrong)
        assert response.status_code == 422, wrong
        assert set(response.json()["error"]) == {"code", "message", "hint"}


async def test_a_request_to_join_a_weight_group_reaches_the_engine_or_is_refused(
    http: httpx.AsyncClient, engine: FakeEngine
) -> None:
    good = {"session": "g", "host": "127.0.0.1", "port": 5, "backend": "gloo", "device": None, "timeout_s": 1.0}
    assert (await http.post("/init_weight_group", json=good)).json() == {"session": "g", "workers": 1}
    assert engine.joined == GroupRequest.model_validate(good)
    for wrong in ({**good, "port": 0}, {**good, "backend": "mpi"}, {**good, "timeout_s": 0.0}, {"session": "g"}):
        assert (await http.post("/init_weight_group", json=wrong)).status_code == 422, wrong


async def test_a_session_is_opened_read_and_closed(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    good = {"sampling": {"max_tokens": 4}, "max_length": 32, "max_calls": 2, "idle_timeout_s": 9.0}
    session_id = (await http.post("/sessions", json=good)).json()["id"]
    assert (await http.get(f"/sessions/{session_id}")).json() == {"calls": [], "cut_off": False}
    assert (await http.delete(f"/sessions/{session_id}")).json() == {"calls": [], "cut_off": False}
    for method in ("GET", "DELETE"):
        gone = await http.request(method, f"/sessions/{session_id}")
        assert (gone.status_code, gone.json()["error"]["code"]) == (404, "no_session")
    for wrong in ({**good, "max_calls": 0}, {**good, "sampling": {"temperature": 0.001}}, {**good, "n": 2}):
        assert (await http.post("/sessions", json=wrong)).status_code == 422, wrong
    asleep, failed = [(await http.post("/sessions", json=good)).json()["id"] for _ in range(2)]
    engine.reason = ErrorBody(code="asleep", message="asleep", hint="wait")
    assert (await http.delete(f"/sessions/{asleep}")).json() == {"calls": [], "cut_off": False}
    engine.reason = ErrorBody(code="engine_dead", message="gone", hint="restart")
    assert (await http.post("/sessions", json=good)).json()["error"]["code"] == "engine_dead"
    assert (await http.get(f"/sessions/{failed}")).status_code == 200
    # Its agent may have taken the failure for an answer.
    assert (await http.delete(f"/sessions/{failed}")).json()["error"]["code"] == "engine_dead"
    assert (await http.get(f"/sessions/{failed}")).json()["error"]["code"] == "no_session"


async def test_only_its_own_key_opens_a_session(engine: FakeEngine) -> None:
    app = FastAPI()

    @app.api_route("/v1/models")
    async def models() -> str:
        return "reached"

    door = assemble(app, engine, Config.model_validate({"server": {"token": "the token"}}))
    request = {"sampling": {"max_tokens": 4}, "max_length": 32, "max_calls": 2, "idle_timeout_s": 9.0}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(door), base_url="http://localhost") as http:

        async def ask(method: str, path: str, key: str) -> int:
            headers = {"Authorization": f"Bearer {key}"}
            return (await http.request(method, path, json=request, headers=headers)).status_code

        opened, other = [
            (await http.post("/sessions", json=request, headers={"Authorization": "Bearer the token"})).json()
            for _ in range(2)
        ]
        key, its = opened["key"], f"/sessions/{opened['id']}"
        assert await ask("GET", f"{its}/v1/models", key) == 200
        assert await ask("GET", f"{its}/v1/models", "the token") == 200
        assert await ask("GET", f"/sessions/{other['id']}/v1/models", key) == 401
        assert await ask("GET", f"{its}/v1/%2e%2e/generate", key) == 404
        for method, path in (("GET", its), ("DELETE", its), ("POST", "/sessions"), ("POST", "/reload_weights")):
            assert await ask(method, path, key) == 401
        assert await ask("DELETE", its, "the token") == 200
        assert await ask("GET", f"{its}/v1/models", key) == 401


async def test_docs_describe_the_bodies_that_routes_read_themselves(http: httpx.AsyncClient) -> None:
    schema = (await http.get("/openapi.json")).json()
    for path, model in (
        ("/generate", "GenerateRequest"),
        ("/reload_weights", "ReloadRequest"),
        ("/init_weight_group", "GroupRequest"),
    ):
        body = schema["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert body == {"$ref": f"#/components/schemas/{model}"}
        assert model in schema["components"]["schemas"]
    assert {"SamplingParams", "DiskSource", "GenerateResponse"} <= schema["components"]["schemas"].keys()
    assert (await http.get("/docs")).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_ends_the_work(engine: FakeEngine, stream: bool) -> None:
    started, ended = asyncio.Event(), asyncio.Event()

    async def endless(jobs: Sequence[Job]) -> AsyncGenerator[tuple[Job, dict[str, Any]], None]:
        started.set()
        try:
            await asyncio.sleep(60)
            yield jobs[0], {}
        finally:
            ended.set()

    engine.completions = endless  # type: ignore[method-assign]
    body = json.dumps({"prompts": ["a"], "stream": stream}).encode()
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Any:
        if messages:
            return messages.pop()
        await started.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        pass

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/generate",
        "raw_path": b"/generate",
        "query_string": b"",
        "headers": [(b"host", b"localhost")],
        "http_version": "1.1",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
    }
    await asyncio.wait_for(assemble(FastAPI(), engine, Config())(scope, receive, send), 10)
    await asyncio.wait_for(ended.wait(), 10)


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
        ({"origin": "null"}, 403),
    ],
)
async def test_a_page_of_somebody_else_can_not_use_a_server_without_a_token(
    http: httpx.AsyncClient, headers: dict[str, str], status: int
) -> None:
    # A browser sends simple POSTs to any address, also that of this machine, without asking first.
    response = await http.post("/generate", content='{"prompts": ["a"]}', headers=headers)
    assert response.status_code == status
    assert status == 200 or response.json()["error"]["code"] == "foreign_page"
