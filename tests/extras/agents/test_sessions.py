"""Sessions: the store and the door alone, then an unmodified `openai` client against a real engine."""

import asyncio
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from hocket.extras.agents import sessions as module
from hocket.extras.agents.sessions import OpenSessions
from hocket.protocol import SamplingParams, SessionRequest
from hocket.server import vllm_api
from hocket.server.app import _api_error
from hocket.server.errors import ApiError
from hocket.server.middleware import Guard
from support.engines import assert_sampled, error_of, listening, make_sampler, make_tokenizer, tolerance
from support.tiny_server import TinyServer

REQUEST = SessionRequest(sampling=SamplingParams(max_tokens=8, seed=5), max_length=20, max_calls=3, idle_timeout_s=60)


def test_a_call_is_sampled_as_the_session_says_within_the_room_there_is_and_a_limit_cuts_it_off() -> None:
    session, other = (OpenSessions().open(REQUEST) for _ in range(2))
    calls = [session.begin([1] * length, wanted) for length, wanted in ((4, 3), (15, 99), (19, 99))]
    assert [call.sampling.max_tokens for call in calls] == [3, 5, 1]  # the agent's own, 20 - 15, 20 - 19
    assert not session.record().cut_off
    with pytest.raises(ApiError, match="made its 3 calls") as refused:
        session.begin([1], 1)
    assert refused.value.status == 400  # clients would send it again after any other
    with pytest.raises(ApiError, match="20 prompt tokens leave no room in 20"):
        other.begin([1] * 20, 1)
    assert session.record().cut_off
    assert other.record().cut_off


def test_a_prompt_and_how_often_it_was_asked_decide_the_seed_so_that_calls_at_the_same_time_repeat() -> None:
    session, other = (OpenSessions().open(REQUEST) for _ in range(2))
    seeds = {(asked, session.begin(list(asked), 4).sampling.seed) for asked in ((1, 2), (1, 2), (12,))}
    assert len({seed for _, seed in seeds}) == 3
    assert {(asked, other.begin(list(asked), 4).sampling.seed) for asked in ((12,), (1, 2), (1, 2))} == seeds


def test_a_call_that_the_server_ended_does_not_count_and_leaves_its_seed_to_the_one_that_is_sent_again() -> None:
    session = OpenSessions().open(REQUEST)
    first, second, third = (session.begin([1], 4) for _ in range(3))
    for call, status in ((first, 500), (second, 503)):
        with pytest.raises(ApiError), session.serving(call):
            raise ApiError(status, "broken", "it broke", "mend it")
    again = session.begin([1], 4)
    assert again.sampling.seed == second.sampling.seed
    assert session.calls == [first, third, again]
    ids = {call.request_id for call in (first, second, third, again)}
    assert len(ids) == 4  # the engine may still be ending the one that does not count
    assert ids.isdisjoint(OpenSessions().open(REQUEST).begin([1], 4).request_id for _ in range(3))


def test_sessions_are_bounded_and_forgotten_when_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(module, "MAX_SESSIONS", 2)
    store = OpenSessions()
    first, busy = store.open(REQUEST), store.open(REQUEST)
    with pytest.raises(ApiError, match="there are 2 sessions"):
        store.open(REQUEST)
    with busy.serving(busy.begin([1], 1)):
        now = REQUEST.idle_timeout_s + 1
        store.open(REQUEST)  # takes the place of the first
        assert store.get(busy.id) is busy  # its call runs
    with pytest.raises(ApiError, match="there is no session"):
        store.get(first.id)
    late = busy.begin([2], 1)
    assert store.close(busy.id) is busy
    with pytest.raises(ApiError, match="the session was closed"), busy.serving(late):
        raise AssertionError("nobody would end it")
    with pytest.raises(ApiError, match="there is no session"):
        store.close(busy.id)


@pytest.fixture
async def door() -> Any:
    """An app in the place of vLLM's, which answers with what reached it."""
    app, store = FastAPI(), OpenSessions()

    @app.api_route("/v1/{route:path}", methods=["GET", "POST"])
    async def echo(route: str, request: Request) -> Any:
        sample: Any = vllm_api.SAMPLE.get()
        session = None if sample is None else sample.args[0]
        body = await request.json() if request.method == "POST" else None
        if body and (param := body.get("refuse")):
            message = body.get("message", "as vLLM says it")
            return JSONResponse({"error": {"message": message, "param": param}}, status_code=400)
        return {"route": route, "body": body, "session": None if session is None else session.id}

    module.add_forwarding(app, store, "the model", make_sampler())
    app.add_exception_handler(ApiError, _api_error)
    guard = Guard(app, host="", token=None)
    async with listening(guard) as port, httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        yield client, store


async def test_requests_reach_vllm_s_routes_with_their_session_and_its_model(door: Any) -> None:
    client, store = door
    session = store.open(REQUEST)
    url = f"/sessions/{session.id}/v1"
    answer = (await client.post(f"{url}/chat/completions", json={"model": "gpt", "messages": [], "n": 1})).json()
    body = {"model": "the model", "messages": [], "n": 1}
    assert answer == {"route": "chat/completions", "body": body, "session": session.id}
    assert (await client.get(f"{url}/models")).json()["session"] == session.id
    for limit in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
        for wanted, gets in ((99_999, 8), (8, 8), (3, 3), ("many", "many")):
            answer = (await client.post(f"{url}/responses", json={limit: wanted})).json()
            assert answer["body"] == {"model": "the model", limit: gets}
    plain = (await client.post("/v1/completions", json={"n": 2})).json()
    assert plain == {"route": "completions", "body": {"n": 2}, "session": None}
    reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
    for path, more in ((f"{url}/models", ""), ("/v1/models", "Connection: close\r\n")):  # sent before one is answered
        writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n{more}\r\n".encode())
    answers = (await reader.read()).decode()
    assert re.findall('"session":([^}]+)}', answers) == [f'"{session.id}"', "null"]
    writer.close()


NONE_LEFT = "max_tokens must be at least 1, got 0. (parameter=max_tokens, value=0)"
ITS_OWN = "max_tokens must be at least 1, got -1. (parameter=max_tokens, value=-1)"


@pytest.mark.parametrize(
    ("param", "message", "is_too_long"),
    [
        ("input_tokens", "", True),
        ("input_text", "", True),
        ("max_tokens", NONE_LEFT, True),  # it fills the context
        ("max_tokens", ITS_OWN, False),  # the agent's own mistake
        ("temperature", "", False),
        (None, "", False),
    ],
)
async def test_a_prompt_that_vllm_refuses_as_too_long_cuts_its_session_off(
    door: Any, param: str | None, message: str, is_too_long: bool
) -> None:
    client, store = door
    session = store.open(REQUEST)
    await client.post(f"/sessions/{session.id}/v1/completions", json={"refuse": param, "message": message})
    assert session.cut_off is is_too_long


@pytest.mark.parametrize(
    ("route", "body", "status", "says"),
    [
        ("chat/completions", {"n": 2}, 400, "n: only one sampled"),
        ("completions", {"best_of": 3}, 400, "best_of: only"),
        ("completions", {"use_beam_search": True}, 400, "use_beam_search: only"),
        ("completions", {"echo": True, "max_tokens": 0}, 400, "echo, max_tokens: only"),
        ("chat/completions", {"max_completion_tokens": 0}, 400, "max_completion_tokens: only"),
        ("responses", {"max_output_tokens": 0}, 400, "max_output_tokens: only"),
        ("embeddings", {}, 404, "has no POST /v1/embeddings"),
        ("models", {}, 404, "has no POST /v1/models"),
        ("../generate", {}, 404, "not found"),
    ],
)
async def test_what_can_not_be_recorded_is_refused(
    door: Any, route: str, body: dict[str, Any], status: int, says: str
) -> None:
    client, store = door
    response = await client.post(f"/sessions/{store.open(REQUEST).id}/v1/{route}", json=body)
    assert response.status_code == status
    assert says.lower() in response.text.lower()
    assert error_of(await client.post("/sessions/none/v1/completions", json={})) == (404, "no_session")


@pytest.fixture
def opened(server: TinyServer) -> Iterator[tuple[str, openai.OpenAI]]:
    """A session of a real server, and a client of it."""
    session_id, client = server.open_session(max_length=200, max_calls=6, max_tokens=24, seed=7, temperature=0.8)
    with client:
        yield session_id, client


@pytest.mark.engine
def test_what_a_client_was_given_is_recorded_as_sampled(server: TinyServer, opened: tuple[str, openai.OpenAI]) -> None:
    session_id, client = opened
    chat: list[Any] = [{"role": "user", "content": "hello"}]
    # All of this would change the distribution, were it granted.
    wishes: dict[str, Any] = {"temperature": 0.1, "top_p": 0.2, "seed": 1, "presence_penalty": 1.5}
    whole = client.chat.completions.create(model="gpt-4o", messages=chat, **wishes, extra_body={"top_k": 3})
    stream = client.chat.completions.create(model="x", messages=chat, stream=True, max_tokens=12)
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    plain = client.completions.create(model="x", prompt=[5, 6, 7], logprobs=2, max_tokens=200, stop="~")
    assert client.models.list().data[0].id == whole.model

    calls = server.record_of(session_id).calls
    told = [whole.choices[0].message.content, streamed, plain.choices[0].text]
    assert [call.completion.text for call in calls] == told
    assert (calls[0].id, calls[2].id) == (whole.id, plain.id)  # by which an agent names them
    rendered = make_tokenizer()("user:hello;assistant:")["input_ids"]
    assert [list(call.prompt_token_ids) for call in calls] == [rendered, rendered, [5, 6, 7]]
    assert len({call.seed for call in calls}) == 3
    for call, most in zip(calls, (24, 12, 24), strict=True):
        done = call.completion
        assert done.versions == ((server.health()["version"], 0, len(done.token_ids)),)
        assert len(done.token_ids) == most or done.finish_reason == "stop"
        assert_sampled(server.model, call.prompt_token_ids, done.token_ids, done.logprobs, 0.8)
        sampling = {"max_tokens": most, "seed": call.seed, "temperature": 0.8}
        if call is calls[2]:
            sampling["stop"] = ["~"]
        (same,) = server.generate(prompts=[call.prompt_token_ids], sampling=sampling)["completions"][0]
        assert (tuple(same["token_ids"]), same["text"]) == (done.token_ids, done.text)
        # The engine computes a request in another batch: with sums in another order.
        assert same["logprobs"] == pytest.approx(done.logprobs, abs=tolerance(server.model, 0.8), rel=0)
    assert plain.choices[0].logprobs is not None  # an agent's own wish to see some is still granted
    shown = plain.choices[0].logprobs.token_logprobs
    assert shown == list(calls[2].completion.logprobs[: len(shown or ())])


@pytest.mark.engine
def test_constraints_are_refused_and_calls_are_counted(server: TinyServer, opened: tuple[str, openai.OpenAI]) -> None:
    session_id, client = opened
    chat: list[Any] = [{"role": "user", "content": "hello"}]
    as_json = {"response_format": {"type": "json_object"}}
    refused: list[dict[str, Any]] = [{"logit_bias": {"5": 3}}, as_json, {**as_json, "stream": True}]
    for wish in [*refused, {"extra_body": {"min_tokens": 3}}, {"extra_body": {"bad_words": ["a"]}}]:
        with pytest.raises(openai.BadRequestError, match=r"can't be trained|can be trained"):
            client.chat.completions.create(model="x", messages=chat, **wish)
    assert server.record_of(session_id).calls == ()
    for _ in range(6):
        client.chat.completions.create(model="x", messages=chat, max_tokens=2)
    assert not server.record_of(session_id).cut_off
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        client.completions.create(model="x", prompt=[5] * 9999)
    assert server.record_of(session_id).cut_off
    with pytest.raises(openai.BadRequestError, match=r"has made its 6 calls \(env.max_turns\)"):
        client.chat.completions.create(model="x", messages=chat, stream=True)
    assert len(server.record_of(session_id, "DELETE").calls) == 6
    with pytest.raises(openai.NotFoundError, match="there is no session"):
        client.chat.completions.create(model="x", messages=chat)


@pytest.mark.engine
def test_calls_of_the_responses_and_messages_routes_are_recorded_as_those_of_chat_are(
    server: TinyServer, opened: tuple[str, openai.OpenAI]
) -> None:
    session_id, client = opened
    ask = httpx.Client(base_url=str(client.base_url), headers={"x-api-key": client.api_key}, timeout=60)
    chat = [{"role": "user", "content": "hello"}]
    body = {"model": "claude", "messages": chat, "max_tokens": 12}
    with ask:
        response = client.responses.create(model="gpt-5", input="hello", max_output_tokens=12, temperature=0.1)
        events = list(client.responses.create(model="gpt-5", input="hello", max_output_tokens=12, stream=True))
        message = ask.post("messages", json=body)
        assert message.status_code == 200, message.text
        stream = ask.post("messages", json={**body, "stream": True})
        too_long = ask.post("messages", json={**body, "messages": [{"role": "user", "content": "hello " * 999}]})
    calls = server.record_of(session_id).calls
    completed = events[-1]
    assert completed.type == "response.completed"
    texts = [response.output_text, completed.response.output_text, message.json()["content"][0]["text"]]
    assert [call.completion.text for call in calls][:3] == texts
    assert '"message_stop"' in stream.text
    assert [call.id for call in calls][:3] == [response.id, completed.response.id, message.json()["id"]]
    rendered = make_tokenizer()("user:hello;assistant:")["input_ids"]
    assert [list(call.prompt_token_ids) for call in calls] == [rendered] * 4
    assert len({call.seed for call in calls}) == 4
    for call in calls:
        done = call.completion
        assert_sampled(server.model, call.prompt_token_ids, done.token_ids, done.logprobs, 0.8)
    assert too_long.status_code == 400, too_long.text
    assert server.record_of(session_id).cut_off


async def test_an_agent_goes_on_from_no_response_but_its_own(door: Any) -> None:
    client, store = door
    session, other = store.open(REQUEST), store.open(REQUEST)
    other.begin([1], 4, "resp_other")
    session.begin([1], 4, "resp_own")
    url = f"/sessions/{session.id}/v1/responses"
    refused = await client.post(url, json={"input": "a", "previous_response_id": "resp_other"})
    assert error_of(refused) == (404, "no_response")
    answer = await client.post(url, json={"input": "a", "previous_response_id": "resp_own"})
    assert answer.json()["route"] == "responses"
