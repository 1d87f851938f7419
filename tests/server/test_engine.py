"""A real server: what it samples, what it refuses, what it survives."""

import json
import re
import socket
from typing import Any

import openai
import pytest

from hocket import tokenizer
from hocket.protocol import GenerateResponse, Health, StreamEnd, StreamLine

pytestmark = pytest.mark.engine


def test_health_tells_what_is_served(server: Any) -> None:
    health = Health.model_validate(server.health())
    assert (health.status, health.dtype, health.error) == ("ready", "float32", None)
    # The model has more embeddings (96) than the tokenizer has tokens (93).
    assert (health.vocab_size, health.max_length) == (96, 512)
    assert health.root == str(server.root.resolve())
    path = server.client.get("/v1/models").json()["data"][0]["id"]
    assert health.model == path
    assert health.tokenizer_sha256 == tokenizer.fingerprint(tokenizer.load(path))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_of_the_sampled_distribution(server: Any, temperature: float) -> None:
    assert max(server.gaps(temperature=temperature)) < 1e-4


def test_text_ids_and_chat_are_the_same_prompt(server: Any) -> None:
    sampling = {"temperature": 0, "max_tokens": 8}
    text = "user:hi;assistant:"
    ids = [ord(character) - 30 for character in text]  # "!" (33) is id 3
    chat = [{"role": "user", "content": "hi"}]
    answer = json.dumps(server.generate(prompts=[text, ids, chat], sampling=sampling))
    first, second, third = (row[0] for row in GenerateResponse.model_validate_json(answer).completions)
    assert first.token_ids == second.token_ids == third.token_ids
    assert len(first.token_ids) == 8 or first.finish_reason == "stop"


def test_each_completion_ends_as_it_says(server: Any) -> None:
    done = server.generate(prompts=[[5, 6]], n=64, sampling={"max_tokens": 60})["completions"][0]
    by_reason = {reason: [c for c in done if c["finish_reason"] == reason] for reason in ("stop", "length")}
    assert len(by_reason["stop"]) + len(by_reason["length"]) == 64
    assert by_reason["stop"], "with 96 tokens some of 64 completions must have met the end token within 60"
    for completion in done:
        assert len(completion["logprobs"]) == len(completion["token_ids"])
        assert all(-50 < value <= 0 for value in completion["logprobs"])
    for completion in by_reason["stop"]:
        assert completion["token_ids"][-1] == 1  # the end token is in the ids, not in the text
        assert "<eos>" not in completion["text"]
    for completion in by_reason["length"]:
        assert len(completion["token_ids"]) == 60


def test_stop_strings_and_stop_ids_end_a_completion(server: Any) -> None:
    def sample(**how: Any) -> Any:
        sampling = {"max_tokens": 20, "seed": 3, **how}
        return server.generate(prompts=[[5, 6, 7]], sampling=sampling)["completions"][0][0]

    free = sample()
    stop_id = next(i for i in free["token_ids"] if 3 <= i < 93)
    stopped, by_text = sample(stop_token_ids=[stop_id]), sample(stop=[chr(30 + stop_id)])
    assert stopped["token_ids"] == by_text["token_ids"] == free["token_ids"][: free["token_ids"].index(stop_id) + 1]
    assert (stopped["finish_reason"], stopped["text"]) == ("stop", by_text["text"])


def test_a_seed_repeats_the_answer_and_each_sample_has_its_own(server: Any) -> None:
    body = {"prompts": [[5, 6]], "n": 4, "sampling": {"seed": 11, "max_tokens": 12}}
    first, second = server.generate(**body)["completions"][0], server.generate(**body)["completions"][0]
    assert first == second
    assert len({tuple(completion["token_ids"]) for completion in first}) == 4
    other = server.generate(**{**body, "n": 1, "sampling": {"seed": 13, "max_tokens": 12}})["completions"][0][0]
    assert other["token_ids"] == first[2]["token_ids"]


def test_many_seeded_prompts_at_once_leave_the_engine_alive(server: Any) -> None:
    # 12,000 prompt tokens are more than one engine step takes; vLLM's CPU worker dies of a seeded prompt cut in two.
    prompts = [[3 + (i + j) % 90 for j in range(60)] for i in range(200)]
    answer = server.generate(prompts=prompts, sampling={"seed": 1, "max_tokens": 3})
    assert all(len(row[0]["token_ids"]) > 0 for row in answer["completions"])
    assert server.client.get("/health").json()["status"] == "ready"


def test_a_stream_has_every_completion_once_and_an_end(server: Any) -> None:
    seen = set()
    with server.client.stream(
        "POST", "/generate", json={"prompts": [[5], [6], [7]], "n": 4, "stream": True, "sampling": {"max_tokens": 9}}
    ) as response:
        *lines, last = list(response.iter_lines())
    for line in lines:
        item = StreamLine.model_validate_json(line)
        seen.add((item.prompt, item.index))
        assert item.completion.versions[0][1] == 0
        assert item.completion.versions[-1][2] == len(item.completion.token_ids)
    assert seen == {(prompt, index) for prompt in range(3) for index in range(4)}
    assert StreamEnd.model_validate_json(last).error is None


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_has_its_requests_aborted(server: Any, stream: bool) -> None:
    body = json.dumps({"prompts": [[5]] * 100, "n": 4, "stream": stream, "sampling": {"max_tokens": 500}}).encode()
    url = server.client.base_url
    with socket.create_connection((url.host, url.port)) as sock:
        sock.sendall(b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        server.wait_for(lambda health: health["in_flight"] >= 200)
    server.wait_for(lambda health: health["in_flight"] == 0)
    assert max(server.gaps()) < 1e-4
    server.wait_for(lambda _: server.metric("num_requests_running") == 0)


def test_an_openai_client_gets_the_sampled_distribution_too(server: Any, kit: Any) -> None:
    with openai.OpenAI(base_url=f"{server.client.base_url}/v1", api_key="none", max_retries=0) as client:
        name = client.models.list().data[0].id
        chat: list[Any] = [{"role": "user", "content": "hi"}]
        answer = client.chat.completions.create(model=name, messages=chat, max_tokens=5, logprobs=True)
    choice = answer.choices[0]
    assert choice.message.content
    assert choice.finish_reason in ("stop", "length")
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len("user:hi;assistant:")
    body = {"model": name, "prompt": [5, 6, 7], "max_tokens": 24, "logprobs": 0, "return_token_ids": True}
    plain = server.client.post("/v1/completions", json=body).json()["choices"][0]
    expected = kit.reference_logprobs(server.model, [5, 6, 7], plain["token_ids"])
    assert plain["logprobs"]["token_logprobs"] == pytest.approx(expected, abs=1e-4)


def test_a_server_works_for_one_trainer_and_for_those_who_are_none(server: Any) -> None:
    group = {"session": "g", "host": "127.0.0.1", "port": 5, "backend": "gloo", "device": None, "timeout_s": 1.0}
    session = {"sampling": {}, "max_length": 9, "max_calls": 1, "idle_timeout_s": 9.0}
    bodies = {
        "/generate": {"prompts": [[5]], "sampling": {"max_tokens": 1}},
        "/sessions": session,
        "/reload_weights": {"version": 9000, "source": {"kind": "disk", "name": "nothing"}},
        "/init_weight_group": group,
        "/sleep": {},
        "/wake_up": {},
    }

    def ask(route: str, trainer: str | None, **more: Any) -> tuple[int, str]:
        answer = server.client.post(route, json={**bodies.get(route, {}), "trainer": trainer, **more})
        return answer.status_code, (answer.json().get("error") or {}).get("code", "")

    assert ask("/heartbeat", "first") == (200, "")
    try:
        for route in (*bodies, "/heartbeat"):
            assert ask(route, "second") == (409, "other_trainer"), route
        for trainer in ("first", None):
            assert ask("/generate", trainer) == ask("/sessions", trainer) == (200, "")
            assert ask("/reload_weights", trainer) == (404, "no_such_version")
        assert ask("/heartbeat", "second", take_over=True) == ask("/generate", "second") == (200, "")
        assert ask("/generate", "first") == (409, "other_trainer")
    finally:
        assert ask("/heartbeat", "second", leaving=True) == (200, "")
    assert ask("/generate", "first") == ask("/heartbeat", "first", leaving=True) == (200, "")


@pytest.mark.parametrize(
    ("wanted", "matches"),
    [
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        ({"structured_outputs": {"regex": "[a-c]{3}"}}, "[a-c]{3}"),
        ({"structured_outputs": {"grammar": 'root ::= "x" | "yy"'}}, "x|yy"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"const": 5}}}}, "5"),
    ],
)
def test_structured_outputs_work_with_the_packages_that_are_installed(
    server: Any, wanted: dict[str, Any], matches: str
) -> None:
    body = {"prompt": [5, 6, 7], "max_tokens": 40, **wanted}
    for _ in range(3):
        answer = server.client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert re.fullmatch(matches, answer.json()["choices"][0]["text"].strip())
    assert server.client.post("/v1/completions", json={**body, "structured_outputs": {"regex": "["}}).status_code == 400


def test_what_vllm_can_not_begin_is_refused_with_the_cause(server: Any) -> None:
    for path, body in (
        ("/v1/completions", {"prompt": "a", "stop": "\ud800"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "text", "text": {"a": []}}]}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": []}]}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [[]]}]}),
        ("/v1/chat/completions", {"messages": [{"role": [], "content": {}}]}),
        ("/v1/chat/completions", {"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]}),
        ("/v1/completions", {"prompt": "a", "n": 10_000}),
        ("/v1/completions", {"prompt": [[5]] * 1000, "n": 20}),
    ):
        answer = server.client.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})
        assert 400 <= answer.status_code < 500, (body, answer.text)
        assert answer.json()["error"]["message"], body
    assert server.health()["status"] == "ready"
