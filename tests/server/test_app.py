"""Our routes on an app of their own, with a fake engine."""

import asyncio
import doctest
import json
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from hocket.protocol import Completion, ErrorBody, GenerateRequest, Health, SamplingParams, SessionRequest
from hocket.server import errors
from hocket.server.engine import Engine
from hocket.server.errors import ApiError
from hocket.server.generate import Job, Sampler
from hocket.server.state import ASLEEP, DEAD, STOPPING, Condition, EngineState
from support import fakes
from support.engines import asking, error_of, idle_engine, make_engine, make_llm, make_sampler, wrap


class FakeEngine(Engine):
    """Completes each job with its own index, last job first."""

    def __init__(self, reader: Sampler) -> None:
        self._condition = Condition(None, version=3)
        self.model, self.llm = "fake", SimpleNamespace()
        self.root, self.sources, self.share_gpu = Path("/nowhere"), {}, False
        self.reader = reader
        self.sampler: Any = self
        self.placeholder = None
        self.reason: ErrorBody | None = None
        self.break_after: int | None = None
        self.ends = ""  # every text

    def _reason(self) -> ErrorBody | None:
        return self.reason

    def health(self) -> Health:
        return fakes.health(version=self.version, model=self.model)

    async def read(self, body: bytes) -> tuple[GenerateRequest, list[Job]]:
        return self.reader.parse(body)

    def admit(self, request: GenerateRequest | SessionRequest) -> None: ...

    def check_sampling(self, sampling: SamplingParams) -> None:
        self.reader.check_sampling(sampling)

    async def completions(self, jobs: Sequence[Job]) -> AsyncGenerator[tuple[Job, Completion], None]:
        for number, job in enumerate(reversed(jobs)):
            await asyncio.sleep(0)
            if number == self.break_after:
                raise ApiError(503, "engine_dead", "it broke", "restart")
            how: dict[str, Any] = {"finish_reason": "length", "versions": ((3, 0, 1),)}
            yield job, Completion(token_ids=(job.index,), logprobs=(-0.5,), text=f"{job.prompt}{self.ends}", **how)


@pytest.fixture(scope="module")
def sampler() -> Any:
    return make_sampler()


@pytest.fixture
def engine(sampler: Any) -> FakeEngine:
    return FakeEngine(sampler)


@pytest.fixture
async def http(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[httpx.AsyncClient, None]:
    monkeypatch.setattr("hocket.server.middleware.MAX_BODY_BYTES", 2 << 20)
    door = wrap(engine)
    async with asking(door) as client:
        yield client


async def test_completions_come_back_in_the_order_of_the_request(http: httpx.AsyncClient) -> None:
    answer = (await http.post("/generate", json={"prompts": ["a", "b"], "n": 3})).json()
    told = [[(c["text"], *c["token_ids"]) for c in row] for row in answer["completions"]]
    assert told == [[(prompt, index) for index in range(3)] for prompt in "01"]


async def test_generation_that_breaks_is_an_error_in_both_modes(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.break_after = 1
    assert error_of(await http.post("/generate", json={"prompts": ["a", "b"]})) == (503, "engine_dead")
    engine.ends = "\u2028\x85"  # which end a line, too, wherever it is not of bytes
    stream = await http.post("/generate", json={"prompts": ["a", "b"], "stream": True, "packed": True})
    assert stream.headers["content-type"] == "application/x-ndjson"
    first, end = [json.loads(line) for line in stream.text.splitlines()]
    assert (first["prompt"], first["index"]) == (1, 0)  # the last job is the first to end here
    assert first["completion"]["token_ids"] == "AAAAAA=="  # the id 0 in four bytes
    assert end["error"] == {"code": "engine_dead", "message": "it broke", "hint": "restart"}


async def test_wrong_method_and_unknown_path_have_our_error_form(http: httpx.AsyncClient) -> None:
    for path, status, code in (("/generate", 405, "method_not_allowed"), ("/nothing", 404, "not_found")):
        assert error_of(await http.get(path)) == (status, code)


async def test_a_wrong_method_is_told_all_methods_of_the_path() -> None:
    routes = [Route("/two", _nothing, methods=["POST"]), Route("/two", _nothing, methods=["DELETE"])]
    async with asking(wrap(idle_engine(), *routes)) as http:
        for path, methods in (("/generate", "POST"), ("/two", "DELETE, POST"), ("/health", "GET")):
            answer = await http.patch(path)
            assert error_of(answer) == (405, "method_not_allowed")
            assert answer.headers["allow"] == methods, path


async def _nothing(request: Request) -> Response:
    return Response()


SAMPLING = b'{"prompts": [[5]], "sampling": {%s}}'
BAD = {
    "prompt is a number": b'{"prompts": [5]}',
    "token id is true": b'{"prompts": [[true]]}',
    "token ids and messages mixed": b'{"prompts": [[5, {"role": "user", "content": "a"}]]}',
    "max_tokens huge": SAMPLING % b'"max_tokens": 1%s' % (b"0" * 40),
    "temperature too high": SAMPLING % b'"temperature": 2.1',
    "NaN temperature": SAMPLING % b'"temperature": NaN',
    "temperature that overflows": SAMPLING % b'"temperature": 1e999',
    "stop is one string": SAMPLING % b'"stop": "x"',
    "unknown sampling field": SAMPLING % b'"presence_penalty": 1.0',
    "many unknown fields": b'{"prompts": [[5]], %s"x": 1}' % b"".join(b'"x%d": 1,' % i for i in range(100_000)),
    "a list": b"[]",
    "null": b"null",
    "nothing": b"",
    "JSON cut off": b'{"prompts": [[5, 6',
    "two objects": b'{"prompts": [[5]]} {}',
    "no UTF-8": b'{"prompts": ["\xff\xfe"]}',
    "half a surrogate pair": b'{"prompts": ["\\ud800"]}',
    "deep nesting": b'{"prompts": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "integer of 5000 digits": b'{"prompts": [[' + b"9" * 5000 + b"]]}",
    "body over the limit": b'{"prompts": ["' + b"a" * (2 << 20) + b'"]}',
}


def broken(code: str) -> ErrorBody:
    return ErrorBody(code=code, message="m", hint="h")


STATES: list[tuple[EngineState, ErrorBody | None, str, int, int]] = [
    (EngineState.READY, None, "ready", 200, 200),
    (EngineState.ASLEEP, ASLEEP, "asleep", 503, 200),
    (EngineState.BROKEN, broken("reload_failed"), "failed", 503, 200),
    (EngineState.BROKEN, broken("not_resumed"), "failed", 503, 200),
    (EngineState.BROKEN_ASLEEP, broken("reload_failed"), "failed", 503, 200),
    (EngineState.LOST, DEAD, "failed", 503, 503),
    (EngineState.STOPPING, STOPPING, "failed", 503, 503),
]


@pytest.mark.parametrize(("state", "reason", "status", "ready", "live"), STATES)
async def test_a_server_is_ready_where_it_can_generate_and_alive_unless_only_a_restart_helps(
    state: EngineState, reason: ErrorBody | None, status: str, ready: int, live: int
) -> None:
    engine = make_engine(make_llm(), "model.path=checkpoints/tiny-sort")
    engine._condition = Condition(None, state=state, reason=reason)
    async with asking(wrap(engine)) as http:
        answers = [await http.get(path) for path in ("/health", "/ready", "/live")]
        assert [answer.status_code for answer in answers] == [200, ready, live]
        assert [answer.json()["status"] for answer in answers] == [status] * 3
        assert answers[0].json() == answers[1].json() == answers[2].json()


def test_every_state_of_an_engine_is_tried_above() -> None:
    assert {state for state, *_ in STATES} == set(EngineState)


async def test_a_server_whose_weights_change_is_ready() -> None:
    engine = make_engine(make_llm(), "model.path=checkpoints/tiny-sort")
    async with engine.lock, asking(wrap(engine)) as http:
        for path in ("/ready", "/live"):
            answer = await http.get(path)
            assert (answer.status_code, answer.json()["status"]) == (200, "updating")


async def test_the_end_of_the_engine_s_process_is_noticed_by_the_question_itself() -> None:
    engine = make_engine(make_llm(), "model.path=checkpoints/tiny-sort")
    engine.llm.errored = True
    async with asking(wrap(engine)) as http:
        answer = await http.get("/live")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_dead")


def test_the_example_of_a_refusal_holds() -> None:
    results = doctest.testmod(errors)
    assert results.attempted > 0
    assert results.failed == 0


@pytest.mark.parametrize("kind", BAD)
async def test_a_bad_request_is_answered_with_a_reason(http: httpx.AsyncClient, kind: str) -> None:
    response = await http.post("/generate", content=BAD[kind])
    assert response.status_code in (400, 413, 422), response.text
    error = response.json()["error"]
    assert (response.status_code == 400) is (error["code"] == "malformed_json")
    assert all(isinstance(error[key], str) and error[key] for key in ("code", "message", "hint"))
    assert len(response.content) < 5000


async def test_a_body_of_nothing_but_lists_is_not_even_parsed(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hocket.server.errors.MAX_NESTED", 5)
    assert (await http.post("/generate", content=b'{"prompts": [[5], [6], [7]]}')).status_code == 200
    refused = await http.post("/generate", content=b'{"prompts": [[5], [6], [7], [8]]}')
    assert (refused.status_code, refused.json()["error"]["message"]) == (422, "body: more than 5 lists and objects")


async def test_a_sampling_parameter_in_the_wrong_place_is_told_the_right_one(http: httpx.AsyncClient) -> None:
    error = (await http.post("/generate", json={"prompts": ["a"], "max_tokens": 4})).json()["error"]
    assert error["message"] == "max_tokens: unknown field"
    assert error["hint"] == 'put it under sampling: {"prompts": [...], "sampling": {"max_tokens": ...}}'


RELOAD = {"version": 1, "source": {"kind": "disk", "name": "v1"}}
WRONG: list[tuple[str, Any]] = [
    ("/sleep", {"level": True}),
    ("/reload_weights", {**RELOAD, "version": 0}),
    ("/reload_weights", {**RELOAD, "source": {"kind": 5, "name": "v1"}}),
    ("/reload_weights", {**RELOAD, "source": {"kind": "nccl", "group": {"name": "g"}, "turn": 1, "buckets": [[]]}}),
]


@pytest.mark.parametrize(("route", "body"), WRONG)
async def test_wrong_fields_of_control_calls_are_refused(http: httpx.AsyncClient, route: str, body: Any) -> None:
    response = await http.post(route, json=body)
    assert error_of(response) == (422, "invalid_request")
    assert error_of(await http.post(route, content=b"{")) == (400, "malformed_json")
    form = {"Content-Type": "application/x-www-form-urlencoded"}  # as `curl -d` says
    assert (await http.post(route, content=json.dumps(body).encode(), headers=form)).text == response.text


async def test_after_a_failure_only_the_routes_that_help_answer(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.reason = ErrorBody(code="reload_failed", message="half loaded", hint="reload")
    refused = await http.post("/generate", json={})
    assert refused.status_code == 503
    assert refused.json()["error"] == {"code": "reload_failed", "message": "half loaded", "hint": "reload"}
    for path in ("/health", "/openapi.json"):
        assert (await http.get(path)).status_code == 200
    assert (await http.post("/reload_weights", json={})).status_code == 422


async def test_docs_describe_all_bodies(http: httpx.AsyncClient) -> None:
    schema = (await http.get("/openapi.json")).json()
    routes = {"generate": "Generate", "reload_weights": "Reload"}
    routes |= {"sleep": "Sleep", "heartbeat": "Heartbeat"}
    for path, model in routes.items():
        body = schema["paths"][f"/{path}"]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert body == {"$ref": f"#/components/schemas/{model}Request"}
    assert {"SamplingParams", "DiskSource", "GenerateResponse"} <= schema["components"]["schemas"].keys()
    assert (await http.get("/docs")).status_code == 200
