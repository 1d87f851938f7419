"""The client routes of a real server: what its answers say of the versions, also while weights change."""

import concurrent.futures
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.engines import make_model, publish
from support.processes import wait_for
from support.tiny_server import TinyServer

CHAT = {"messages": [{"role": "user", "content": "a b"}], "max_tokens": 4, "ignore_eos": True}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True},
    "/v1/chat/completions": CHAT,
    "/v1/responses": {"input": "a b", "max_output_tokens": 4},
    "/v1/messages": {"model": "model", "messages": CHAT["messages"], "max_tokens": 4},
}


def events(text: str) -> Iterator[dict[str, Any]]:
    """The events of a stream that are JSON."""
    for event in text.split("\n\n"):
        data = event.partition("data: ")[2]
        if data and data != "[DONE]":
            yield json.loads(data)


def versions_of(event: dict[str, Any]) -> list[int] | None:
    named = event.get("weight_versions", event.get("response", {}).get("weight_versions"))
    return None if named is None else list(named)


@pytest.mark.parametrize("path", BODIES)
def test_every_answer_and_the_last_event_of_every_stream_name_the_version(server: TinyServer, path: str) -> None:
    version = server.health()["version"]
    answer = server.client.post(path, json=BODIES[path])
    assert answer.status_code == 200, answer.text
    assert (answer.json()["weight_versions"], answer.headers["x-weight-version"]) == ([version], str(version))
    stream = server.client.post(path, json={**BODIES[path], "stream": True})
    assert stream.status_code == 200, stream.text
    *_, last = events(stream.text)
    assert versions_of(last) == [version], stream.text
    assert stream.headers["x-weight-version"] == str(version)


def test_a_response_can_be_read_again_and_gone_on_from_by_its_id(server: TinyServer) -> None:
    version = server.health()["version"]
    first = server.client.post("/v1/responses", json=BODIES["/v1/responses"]).json()
    assert server.client.get(f"/v1/responses/{first['id']}").json() == first
    server.publish_and_load(server.model)
    again = server.client.get(f"/v1/responses/{first['id']}")
    assert (again.json()["weight_versions"], again.headers["x-weight-version"]) == ([version], str(version))
    body = {**BODIES["/v1/responses"], "previous_response_id": first["id"]}
    second = server.client.post("/v1/responses", json=body).json()
    assert (second["previous_response_id"], second["weight_versions"]) == (first["id"], [version + 1])
    assert second["usage"]["input_tokens"] > first["usage"]["total_tokens"]
    missing = server.client.get("/v1/responses/resp_none")
    assert missing.status_code == 404
    refused = server.client.post("/v1/responses", json={**BODIES["/v1/responses"], "background": True})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "no_background")


def test_while_weights_abort_what_runs_answers_are_whole_and_streams_end_with_an_error_or_whole(
    server: TinyServer,
) -> None:
    """Sixty requests on each of two routes, some of them streams, while versions come one after the other."""
    prompt = {"prompt": [5, 6, 7], "max_tokens": 24, "ignore_eos": True}
    chat = {"messages": CHAT["messages"], "max_tokens": 24, "ignore_eos": True}

    def ask(number: int) -> tuple[str, bool, httpx.Response]:
        path, body = [("/v1/completions", prompt), ("/v1/chat/completions", chat)][number % 2]
        stream = {"stream": True, "stream_options": {"include_usage": True}} if number % 3 == 0 else {}
        return path, bool(stream), server.client.post(path, json={**body, **stream})

    first = server.health()["version"]
    with concurrent.futures.ThreadPoolExecutor(24) as pool:
        asked = [pool.submit(ask, number) for number in range(120)]
        # Twenty more answers come between two versions: none is aborted as often as a request may be.
        for number in range(1, 6):
            wait_for(lambda number=number: sum(each.done() for each in asked) >= 20 * number, "more answers")
            version = server.new_version()
            publish(server.model, server.root / f"v{version:06d}", version)
            assert server.reload(version, in_flight="abort").status_code == 200
    last = server.health()["version"]
    assert last == first + 5
    for path, is_stream, answer in [each.result() for each in asked]:
        assert answer.status_code == 200, answer.text
        if not is_stream:
            assert answer.json()["usage"]["completion_tokens"] == 24
            (version,) = answer.json()["weight_versions"]  # none is of two
            assert first <= version <= last
            continue
        *_, end = events(answer.text)
        if "error" in end:
            assert end["error"]["code"] == 503, path
            assert "sync.in_flight=keep" in end["error"]["message"]
        else:
            assert end["usage"]["completion_tokens"] == 24
            assert len(end["weight_versions"]) == 1


def test_a_model_is_known_by_the_last_part_of_its_path_and_a_wrong_name_is_told_the_right_one(
    server: TinyServer,
) -> None:
    path = server.health()["model"]
    assert [card["id"] for card in server.client.get("/v1/models").json()["data"]] == ["model", path]
    for name in ("model", path):
        assert server.client.get(f"/v1/models/{name}").json()["id"] == name
        assert server.client.post("/v1/completions", json={**BODIES["/v1/completions"], "model": name}).is_success
    for no_name in ({}, {"model": ""}, {"model": None}):
        assert server.client.post("/v1/completions", json={**BODIES["/v1/completions"], **no_name}).is_success
    for wrong in (
        server.client.get("/v1/models/gpt-4"),
        server.client.post("/v1/chat/completions", json={**CHAT, "model": "gpt-4"}),
        server.client.post("/v1/messages", json={**BODIES["/v1/messages"], "model": "gpt-4"}),
    ):
        assert wrong.status_code == 404
        assert "'gpt-4' here: this server serves 'model'" in wrong.json()["error"]["message"]


def test_tokens_are_counted_made_and_read_and_the_load_and_version_are_there(server: TinyServer) -> None:
    post = server.client.post
    tokens = post("/tokenize", json={"prompt": "a b"}).json()["tokens"]
    assert post("/detokenize", json={"tokens": tokens}).json()["prompt"] == "ab"  # the tiny tokenizer has no space
    body = {"model": "model", "messages": CHAT["messages"]}
    count = post("/v1/messages/count_tokens", json=body).json()["input_tokens"]
    assert count == post("/v1/chat/completions", json=CHAT).json()["usage"]["prompt_tokens"]
    assert server.client.get("/load").json() == {"server_load": 0}
    assert server.client.get("/version").json()["version"].startswith("0.32")


def test_tools_without_a_parser_name_the_setting(server: TinyServer) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    answer = server.client.post("/v1/chat/completions", json={**CHAT, "tools": [tool]})
    assert answer.status_code == 400
    assert "server.engine.tool_call_parser" in answer.text
    assert "--" not in answer.text


@pytest.mark.long
def test_a_trainer_s_request_goes_before_strangers_that_wait_and_one_too_many_is_told_so(tmp_path: Path) -> None:
    """Two sequences at once, 24 strangers who ask again and again; the trainer's is the third to be sampled, or so."""
    settings = ["server.engine={max_num_seqs: 2}", "server.max_requests=20", "model.max_length=200"]
    body = {"prompt": [5, 6, 7], "max_tokens": 150, "ignore_eos": True}
    answers: list[httpx.Response] = []
    enough = threading.Event()

    def stranger() -> None:
        while not enough.is_set():
            answers.append(server.client.post("/v1/completions", json=body))

    def count(status: int) -> int:
        return sum(answer.status_code == status for answer in list(answers))

    with (
        TinyServer(tmp_path, make_model(seed=0), *settings) as server,
        concurrent.futures.ThreadPoolExecutor(24) as pool,
    ):
        strangers = [pool.submit(stranger) for _ in range(24)]
        try:
            wait_for(lambda: count(429) and count(200), "one too many was told so, and others were answered")
            before = count(200)
            server.generate(prompts=[[5, 6, 7]], sampling={"max_tokens": 2})
            # Those that the engine had, and those that it took as these ended; all others still wait.
            assert count(200) - before <= 8
        finally:
            enough.set()
        for each in strangers:
            each.result()
    late = next(answer for answer in answers if answer.status_code == 429)
    assert late.headers["retry-after"] == "2"
    assert "20 requests" in late.json()["error"]["message"]
    assert {answer.status_code for answer in answers} == {200, 429}
    assert {answer.json()["usage"]["completion_tokens"] for answer in answers if answer.is_success} == {150}
