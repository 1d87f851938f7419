"""What happens to vLLM's answers on their way to a client, with an engine that a test plays."""

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.requests import ClientDisconnect

from hocket.common.tasks import cancel
from hocket.extras.openai_api.answers import (
    ENDS,
    ClientAnswer,
    Recent,
    Responses,
    SampledRoute,
    in_settings,
    sample_again,
)
from hocket.extras.openai_api.limits import Strangers
from hocket.server import vllm_api
from hocket.server.errors import ApiError
from support.engines import asking, error_of, idle_engine, wrap


def output(text: str, *versions: int, finish: str | None = None) -> Any:
    """One of vLLM's outputs, whose tokens were sampled with these versions."""
    spans = [SimpleNamespace(version=str(version)) for version in versions] if finish else None
    return SimpleNamespace(outputs=[SimpleNamespace(text=text, finish_reason=finish, weight_versions=spans)])


class Engine:
    """In the place of vLLM: yields the outputs of one attempt after the other."""

    def __init__(self, *attempts: Sequence[Any]) -> None:
        self.attempts, self.ids = list(attempts), list[str]()

    async def __call__(self, params: Any, request_id: str) -> AsyncGenerator[Any, None]:
        self.ids.append(request_id)
        for each in self.attempts.pop(0):
            if isinstance(each, Exception):
                raise each
            yield each


def strangers(max_requests: int = 2) -> Strangers:
    return Strangers(SimpleNamespace(engine=idle_engine(), app=FastAPI(), max_requests=max_requests))  # type: ignore[arg-type]


def params(*, stream: bool) -> Any:
    from vllm.sampling_params import RequestOutputKind

    return SimpleNamespace(output_kind=RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY, n=1)


async def sampled(engine: Engine, *, stream: bool, bound: Strangers | None = None) -> list[str]:
    outputs = sample_again(bound or strangers(), engine, "prompt", params(stream=stream), "id")
    return [each.outputs[0].text async for each in outputs]


ABORTED = output("half", 1, finish="abort")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_a_weight_sync_aborts_before_its_first_output_is_sampled_again(stream: bool) -> None:
    engine = Engine([ABORTED], [ABORTED], [output("whole", 2, finish="stop")])
    assert await sampled(engine, stream=stream) == ["whole"]
    assert engine.ids == ["id", "id-again1", "id-again2"]


async def test_a_request_that_is_aborted_again_and_again_ends_with_a_503() -> None:
    engine = Engine(*[[ABORTED]] * 8)
    with pytest.raises(ApiError, match="ended 8 attempts") as raised:
        await sampled(engine, stream=False)
    assert (raised.value.status, len(engine.ids)) == (503, 8)


async def test_a_stream_that_is_aborted_later_ends_with_a_503_that_names_the_setting() -> None:
    with pytest.raises(ApiError, match="ended this stream") as raised:
        await sampled(Engine([output("a", 1), ABORTED]), stream=True)
    assert (raised.value.status, raised.value.body.code) == (503, "aborted")
    assert "sync.in_flight=keep" in raised.value.body.hint


DEAD = ApiError(503, "engine_dead", "the engine ended", "start it again")
TEXT = "the engine ended; start it again"
ENDINGS = {
    "/v1/completions": {"error": {"message": TEXT, "type": "engine_dead", "param": None, "code": 503}},
    "/v1/responses": {"type": "error", "code": "engine_dead", "message": TEXT, "param": None},
    "/v1/messages": {"type": "error", "error": {"type": "overloaded_error", "message": TEXT}},
}


@pytest.mark.parametrize("path", ENDINGS)
@pytest.mark.parametrize("catches", [True, False])
async def test_an_engine_that_ends_is_said_in_each_protocol_s_form(path: str, catches: bool) -> None:
    """vLLM's routes make an event of an exception, or let it out."""
    app = FastAPI()

    @app.post(path)
    async def sample(request: Request) -> Any:
        async def pieces() -> AsyncGenerator[str, None]:
            yield "data: {}\n\n"
            try:
                await texts(app, stream=True)
            except ApiError:
                if not catches:
                    raise
                yield "data: a long traceback\n\n"

        if (await request.json()).get("stream"):
            return StreamingResponse(pieces(), media_type="text/event-stream")
        try:
            return await texts(app)
        except ApiError:
            if not catches:
                raise
            return JSONResponse({"error": "as vLLM says it"}, status_code=500)

    async with asking(named(app, path, [DEAD])) as http:
        answer = await http.post(path, json={})
        stream = await http.post(path, json={"stream": True})
    assert answer.status_code == 503
    assert answer.json() == (ENDINGS[path] if path == "/v1/messages" else {"error": DEAD.body.model_dump()})
    assert (stream.status_code, "traceback" in stream.text) == (200, False)
    first, last = [event for event in stream.text.strip().split("\n\n") if event != "data: [DONE]"]
    assert (first, json.loads(last.partition("data: ")[2])) == ("data: {}", ENDINGS[path])


def named(
    app: FastAPI,
    path: str,
    outputs: Sequence[Any],
    bound: Strangers | None = None,
    remembered: dict[str, set[int]] | None = None,
) -> Any:
    """A guard whose route `path` of `app` samples these outputs, and names their versions."""
    engine = idle_engine()
    engine._condition = SimpleNamespace(version=7)
    (route,) = [route for route in app.router.routes if getattr(route, "path", None) == path]
    asked: Any = route
    asked.app = SampledRoute(
        asked.app, engine=engine, strangers=bound or strangers(), remembered=Recent(remembered or {})
    )
    app.state.outputs = outputs
    return wrap(engine, route)


async def texts(app: FastAPI, *, stream: bool = False) -> list[str]:
    """The texts that the function in SAMPLE samples, as vLLM's routes would ask for them."""
    sample = vllm_api.SAMPLE.get()
    assert sample is not None
    outputs = sample(Engine(app.state.outputs), "prompt", params(stream=stream), "resp_a_0")
    return [each.outputs[0].text async for each in outputs]


async def test_an_answer_names_the_versions_of_its_tokens_in_a_field_and_a_header() -> None:
    app = FastAPI()

    @app.post("/v1/completions")
    async def complete() -> JSONResponse:
        return JSONResponse({"choices": await texts(app)})

    guard = named(app, "/v1/completions", [output("a", 3, 4, finish="stop")])
    async with asking(guard) as http:
        answer = await http.post("/v1/completions", json={})
    assert answer.json() == {"choices": ["a"], "weight_versions": [3, 4]}
    assert answer.headers["x-weight-version"] == "3, 4"
    assert int(answer.headers["content-length"]) == len(answer.content)


async def test_an_error_names_no_version_and_the_setting_in_place_of_a_flag() -> None:
    app = FastAPI()

    @app.post("/v1/completions")
    async def complete() -> JSONResponse:
        return JSONResponse({"error": {"message": "set --max-logprobs"}}, status_code=400)

    async with asking(named(app, "/v1/completions", [])) as http:
        answer = await http.post("/v1/completions", json={})
    assert answer.json() == {"error": {"message": "set server.engine.max_logprobs"}}
    assert "x-weight-version" not in answer.headers


async def test_a_stream_names_the_versions_in_the_events_that_end_it_whatever_pieces_it_comes_in() -> None:
    app = FastAPI()
    events = [
        'data: {"choices": [{"text": "a", "finish_reason": null}]}\n\n',
        'data: {"choices": [{"text": "b", "finish_reason": "stop"}]}\n\n',
        'data: {"choices": [], "usage": {"total_tokens": 2}}\n\ndata: [DONE]\n\n',
    ]

    @app.post("/v1/completions")
    async def complete() -> StreamingResponse:
        async def pieces() -> AsyncGenerator[str, None]:
            whole = "".join(events)
            yield whole[:7]
            await texts(app, stream=True)
            for start in range(7, len(whole), 7):
                yield whole[start : start + 7]

        return StreamingResponse(pieces(), media_type="text/event-stream")

    guard = named(app, "/v1/completions", [output("a"), output("b", 3, 5, finish="stop")])
    async with asking(guard) as http:
        answer = await http.post("/v1/completions", json={})
    first, last, usage, done = [line.removeprefix("data: ") for line in answer.text.strip().split("\n\n")]
    assert "weight_versions" not in first
    assert [json.loads(event)["weight_versions"] for event in (last, usage)] == [[3, 5], [3, 5]]
    assert done == "[DONE]"
    assert answer.headers["x-weight-version"] == "7"  # which the engine held as the stream began


async def test_the_end_of_a_response_has_the_versions_in_the_response_itself() -> None:
    app = FastAPI()

    @app.post("/v1/responses")
    async def respond() -> StreamingResponse:
        async def pieces() -> AsyncGenerator[str, None]:
            await texts(app, stream=True)
            yield 'event: response.completed\ndata: {"type": "response.completed", "response": {"id": "a"}}\n\n'

        return StreamingResponse(pieces(), media_type="text/event-stream")

    guard = named(app, "/v1/responses", [output("a", 3, finish="stop")])
    async with asking(guard) as http:
        answer = await http.post("/v1/responses", json={})
    kind, data = answer.text.strip().split("\n")
    assert kind == "event: response.completed"
    assert json.loads(data.removeprefix("data: "))["response"] == {"id": "a", "weight_versions": [3]}


async def test_one_request_too_many_is_told_when_to_come_again() -> None:
    app = FastAPI()
    bound = strangers(max_requests=1)

    @app.post("/v1/completions")
    async def complete() -> list[str]:
        return await texts(app)

    guard = named(app, "/v1/completions", [output("a", 3, finish="stop")], bound)
    async with asking(guard) as http:
        with bound.request():
            answer = await http.post("/v1/completions", json={})
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "2")
        assert "server.max_requests" in answer.json()["error"]["hint"]
        assert (await http.post("/v1/completions", json={})).json() == ["a"]  # no JSON object: it has no field


@pytest.mark.parametrize(("constraint", "status"), [("a grammar", 422), (None, 200)])
async def test_a_grammar_that_the_engine_can_not_make_is_the_client_s_fault(constraint: Any, status: int) -> None:
    app = FastAPI()

    @app.post("/v1/completions")
    async def complete() -> list[str]:
        sample = vllm_api.SAMPLE.get()
        assert sample is not None
        asked = params(stream=False)
        asked.structured_outputs = constraint
        outputs = sample(Engine(app.state.outputs), "prompt", asked, "id")
        return [each.outputs[0].text async for each in outputs]

    async with asking(named(app, "/v1/completions", [output("", 1, finish="error")])) as http:
        answer = await http.post("/v1/completions", json={})
    assert answer.status_code == status
    if status == 422:
        assert "structured output" in answer.json()["error"]["message"]


async def test_a_request_takes_a_slot_for_each_of_its_sequences_and_gives_back_what_it_took() -> None:
    """Five slots: four sequences at once of the fake engine, and a quarter more."""
    bound, events = strangers(), list[str]()

    async def hold(name: str, number: int, until: asyncio.Event) -> None:
        async with bound.slots(number):
            events.append(name)
            await until.wait()

    first, never = asyncio.Event(), asyncio.Event()
    running = asyncio.create_task(hold("three", 3, first))
    await asyncio.sleep(0)
    leaving = asyncio.create_task(hold("left", 3, never))  # has two of its three, and leaves
    waiting = asyncio.create_task(hold("ninety", 90, first))
    for _ in range(5):
        await asyncio.sleep(0)
    assert events == ["three"]
    leaving.cancel()
    first.set()
    await asyncio.gather(running, waiting)
    assert events == ["three", "ninety"]
    assert leaving.cancelled()
    async with asyncio.timeout(1), bound.slots(5):
        pass


async def test_a_client_that_does_not_read_its_stream_loses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hocket.extras.openai_api.answers.SEND_TIMEOUT_S", 0.0)

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    answer = ClientAnswer(send, "/v1/completions", idle_engine())
    headers = [(b"content-type", b"text/event-stream")]
    answer._engine._condition = SimpleNamespace(version=7)  # type: ignore[assignment]
    await answer.send({"type": "http.response.start", "status": 200, "headers": headers})
    with pytest.raises(ClientDisconnect):
        await answer.send({"type": "http.response.body", "body": b"data: {}\n\n", "more_body": True})


async def test_one_message_too_many_is_told_so_in_the_form_of_its_protocol() -> None:
    app = FastAPI()
    bound = strangers(max_requests=1)

    @app.post("/v1/messages")
    async def create() -> list[str]:
        return await texts(app)

    async with asking(named(app, "/v1/messages", [], bound)) as http:
        with bound.request():
            answer = await http.post("/v1/messages", json={})
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "2")
    assert answer.json()["error"]["type"] == "rate_limit_error"


def test_only_events_that_end_something_are_looked_into() -> None:
    begin = b'event: message_start\ndata: {"type":"message_start","message":{"usage":{"output_tokens":0}}}'
    counted = b'data: {"choices":[{"finish_reason":null}],"usage":{"total_tokens":2}}'  # continuous_usage_stats
    quoted = b'data: {"text":"\\"finish_reason\\": \\"stop\\", \\"choices\\": []"}'
    for event in (b'{"finish_reason":null}', quoted, begin, counted):
        assert not ENDS.search(event), event
    usage = b'data: {"choices":[],"usage":{"total_tokens":2}}'
    named = (b"event: message_delta\n", b"event: message_stop\n", b"event: response.failed\n")
    for event in (b'{"finish_reason":"stop"}', usage, *named):
        assert ENDS.search(event), event


async def test_a_stored_response_has_the_versions_that_sampled_it_or_none_where_they_are_forgotten() -> None:
    app = FastAPI()

    @app.get("/v1/responses/{response_id}")
    async def read(response_id: str) -> dict[str, str]:
        return {"id": response_id}

    guard = named(app, "/v1/responses/{response_id}", [], remembered={"resp_a": {3, 5}})
    async with asking(guard) as http:
        known = await http.get("/v1/responses/resp_a")
        forgotten = await http.get("/v1/responses/resp_b")
    assert (known.json(), known.headers["x-weight-version"]) == ({"id": "resp_a", "weight_versions": [3, 5]}, "3, 5")
    assert forgotten.json() == {"id": "resp_b"}
    assert "x-weight-version" not in forgotten.headers


def test_the_oldest_of_many_responses_is_forgotten_and_so_is_one_whose_messages_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hocket.extras.openai_api.answers.MAX_STORED", 2)
    messages = Recent[str]()
    responses = Responses(messages)
    for key in ("a", "b"):
        messages[key], responses[key] = "asked", "answer"
    assert (responses.get("a"), responses.get("b")) == ("answer", "answer")
    messages["c"] = "its client left before the answer"
    assert (responses.get("a"), responses.get("b"), responses.get("c")) == (None, "answer", None)
    for key in ("d", "e"):
        messages[key], responses[key] = "asked", "answer"
    assert list(responses) == list(messages) == ["d", "e"]


async def test_a_stored_response_is_not_streamed_again() -> None:
    app = FastAPI()

    @app.get("/v1/responses/{response_id}")
    async def read(response_id: str) -> dict[str, str]:
        return {"id": response_id}

    async with asking(named(app, "/v1/responses/{response_id}", [])) as http:
        for stream in ("true", "True", "1", "yes"):
            assert error_of(await http.get(f"/v1/responses/resp_a?stream={stream}")) == (400, "no_stream")
        for query in ("?stream=false", "?stream=0", "?include=a", ""):
            assert (await http.get(f"/v1/responses/resp_a{query}")).json() == {"id": "resp_a"}


def test_flags_become_settings() -> None:
    message = b'"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'
    assert in_settings(message) == b'"auto" tool choice requires server.engine.tool_call_parser to be set'


async def test_a_client_that_leaves_keeps_no_slot_whether_it_waits_for_one_or_has_it() -> None:
    bound = strangers()
    bound._free, bound._num_slots = asyncio.Semaphore(1), 1
    begun, blocked = asyncio.Event(), asyncio.Event()

    async def endless(params: Any, request_id: str) -> AsyncGenerator[Any, None]:
        begun.set()
        yield output("a", 1)
        await blocked.wait()

    async def ask() -> None:
        async for _ in sample_again(bound, endless, "prompt", params(stream=True), "id"):
            pass

    first = asyncio.create_task(ask())
    await begun.wait()
    waiting = asyncio.create_task(ask())
    await asyncio.sleep(0)
    assert bound._free.locked()
    await cancel((waiting,))
    assert bound._free.locked()
    await cancel((first,))
    assert not bound._free.locked()
    assert await sampled(Engine([output("b", 1, finish="stop")]), stream=False, bound=bound) == ["b"]
