"""A real server: what it samples, what it refuses, what it survives."""

import json
import re
import socket
from typing import Any

import openai
import pytest

from hocket.data import tokenizer
from hocket.protocol import GenerateResponse, Health, StreamEnd, StreamLine
from hocket.protocol.manifest import model_shapes
from support.tiny_server import TinyServer

pytestmark = pytest.mark.engine


def test_health_tells_what_is_served(server: TinyServer) -> None:
    health = Health.model_validate(server.health())
    # The model has more embeddings (96) than the tokenizer has tokens (93).
    assert (health.dtype, health.vocab_size, health.max_length) == ("float32", 96, 512)
    assert health.root == str(server.root.resolve())
    assert health.architecture == model_shapes(health.model).architecture
    cards = server.client.get("/v1/models").json()["data"]
    assert [(card["id"], card["root"]) for card in cards] == [("model", health.model), (health.model, health.model)]
    assert health.tokenizer_sha256 == tokenizer.fingerprint(tokenizer.load(health.model))


def test_logprobs_are_of_the_sampled_distribution(server: TinyServer) -> None:
    server.assert_is(temperatures=(1.0, 0.7))


def test_text_ids_and_chat_are_the_same_prompt(server: TinyServer) -> None:
    sampling = {"temperature": 0, "max_tokens": 8}
    text = "user:hi;assistant:"
    ids = [ord(character) - 30 for character in text]  # "!" (33) is id 3
    chat = [{"role": "user", "content": "hi"}]
    answer = json.dumps(server.generate(prompts=[text, ids, chat], sampling=sampling))
    first, second, third = (row[0] for row in GenerateResponse.model_validate_json(answer).completions)
    assert first.token_ids == second.token_ids == third.token_ids
    assert len(first.token_ids) == 8 or first.finish_reason == "stop"


def test_each_completion_ends_as_it_says(server: TinyServer) -> None:
    done = server.generate(prompts=[[5, 6]], n=64, sampling={"max_tokens": 60})["completions"][0]
    assert {completion["finish_reason"] for completion in done} == {"stop", "length"}, "of 96 tokens one is the end"
    for completion in done:
        stopped = completion["finish_reason"] == "stop"
        assert (completion["token_ids"][-1] == 1) is stopped  # the end token is in the ids, not in the text
        assert "<eos>" not in completion["text"]
        assert stopped or len(completion["token_ids"]) == 60


def test_stop_strings_and_stop_ids_end_a_completion(server: TinyServer) -> None:
    def sample(**how: Any) -> Any:
        sampling = {"max_tokens": 20, "seed": 3, **how}
        return server.generate(prompts=[[5, 6, 7]], sampling=sampling)["completions"][0][0]

    free = sample()
    stop_id = next(i for i in free["token_ids"] if 3 <= i < 93)
    stopped, by_text = sample(stop_token_ids=[stop_id]), sample(stop=[chr(30 + stop_id)])
    assert stopped["token_ids"] == by_text["token_ids"] == free["token_ids"][: free["token_ids"].index(stop_id) + 1]
    assert (stopped["finish_reason"], stopped["text"]) == ("stop", by_text["text"])


def test_a_seed_repeats_the_answer_and_each_sample_has_its_own(server: TinyServer) -> None:
    body = {"prompts": [[5, 6]], "n": 4, "sampling": {"seed": 11, "max_tokens": 12}}
    first, second = server.generate(**body)["completions"][0], server.generate(**body)["completions"][0]
    assert first == second
    assert len({tuple(completion["token_ids"]) for completion in first}) == 4
    other = server.generate(**{**body, "n": 1, "sampling": {"seed": 13, "max_tokens": 12}})["completions"][0][0]
    assert other["token_ids"] == first[2]["token_ids"]


def test_many_seeded_prompts_at_once_leave_the_engine_alive(server: TinyServer) -> None:
    # 12,000 prompt tokens are more than one engine step takes; vLLM's CPU worker dies of a seeded prompt cut in two.
    prompts = [[3 + (i + j) % 90 for j in range(60)] for i in range(200)]
    answer = server.generate(prompts=prompts, sampling={"seed": 1, "max_tokens": 3})
    assert all(len(row[0]["token_ids"]) > 0 for row in answer["completions"])
    assert server.client.get("/health").json()["status"] == "ready"


def test_a_stream_has_every_completion_once_and_an_end(server: TinyServer) -> None:
    body = {"prompts": [[5], [6], [7]], "n": 4, "stream": True, "sampling": {"max_tokens": 9}}
    *lines, last = server.client.post("/generate", json=body).text.splitlines()
    found = [StreamLine.model_validate_json(line) for line in lines]
    assert sorted((item.prompt, item.index) for item in found) == [(i, j) for i in range(3) for j in range(4)]
    assert StreamEnd.model_validate_json(last).error is None


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_has_its_requests_aborted(server: TinyServer, stream: bool) -> None:
    body = json.dumps({"prompts": [[5]] * 100, "n": 4, "stream": stream, "sampling": {"max_tokens": 500}}).encode()
    url = server.client.base_url
    with socket.create_connection((url.host, url.port)) as sock:
        sock.sendall(b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        server.wait_until(lambda health: health["in_flight"] >= 200)
    server.wait_until(lambda health: health["in_flight"] == 0)
    server.assert_is()
    server.wait_until(lambda _: server.metric("num_requests_running") == 0)


def test_an_openai_client_gets_the_sampled_distribution_too(server: TinyServer) -> None:
    with openai.OpenAI(base_url=f"{server.client.base_url}/v1", api_key="none", max_retries=0) as client:
        name = client.models.list().data[0].id
        chat: list[Any] = [{"role": "user", "content": "hi"}]
        answer = client.chat.completions.create(model=name, messages=chat, max_tokens=5, logprobs=True, seed=1)
    choice = answer.choices[0]
    assert choice.message.content
    assert choice.finish_reason in ("stop", "length")
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len("user:hi;assistant:")
    server.assert_openai_is(server.model)


@pytest.mark.parametrize(
    ("wanted", "matches"),
    [
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        ({"structured_outputs": {"grammar": 'root ::= "x" | "yy"'}}, "x|yy"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"const": 5}}}}, "5"),
    ],
)
def test_structured_outputs_work_with_the_packages_that_are_installed(
    server: TinyServer, wanted: dict[str, Any], matches: str
) -> None:
    body = {"prompt": [5, 6, 7], "max_tokens": 40, **wanted}
    for _ in range(3):
        answer = server.client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert re.fullmatch(matches, answer.json()["choices"][0]["text"].strip())
    assert server.client.post("/v1/completions", json={**body, "structured_outputs": {"regex": "["}}).status_code == 400


def test_what_vllm_can_not_begin_is_refused_with_the_cause(server: TinyServer) -> None:
    for path, body in (
        ("/v1/completions", {"prompt": "a", "stop": "\ud800"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "text", "text": {"a": []}}]}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": []}]}]}),
        ("/v1/chat/completions", {"messages": [{"role": [], "content": {}}]}),
        ("/v1/chat/completions", {"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]}),
    ):
        answer = server.client.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})
        assert 400 <= answer.status_code < 500, (body, answer.text)
        assert answer.json()["error"]["message"], body
    assert server.health()["status"] == "ready"
