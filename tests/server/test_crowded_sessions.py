"""Sessions of a real server whose KV cache holds four of the longest sequences: most calls wait, or are preempted."""

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from hocket.protocol import AgentRecord

pytestmark = pytest.mark.engine

TOKENS = 180
ENDLESS: dict[str, Any] = {"model": "x", "max_tokens": TOKENS, "extra_body": {"ignore_eos": True}}
SIZES = {"hidden_size": 512, "num_attention_heads": 16, "num_key_value_heads": 16}


@pytest.fixture(scope="module")
def server(kit: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    model = kit.make_model(tied=True, seed=0, **SIZES)
    server = kit.start_server(tmp_path_factory.mktemp("crowded"), model, overrides=["server.kv_cache_mib=16"])
    assert server.health()["kv_tokens"] == 4 * kit.MAX_LENGTH  # of 2 · 2 layers · 512 · 4 bytes
    yield server
    server.stop()


def opened(server: Any) -> tuple[str, openai.OpenAI]:
    """Returns the id of a new session, and a client of it."""
    sampling = {"max_tokens": TOKENS, "temperature": 0.9}
    request = {"sampling": sampling, "max_length": 512, "max_calls": 2, "idle_timeout_s": 60}
    session_id = server.client.post("/sessions", json=request).json()["id"]
    url = f"{server.client.base_url}/sessions/{session_id}/v1"
    return session_id, openai.OpenAI(base_url=url, api_key="x", max_retries=0, timeout=120)


def close(server: Any, session_id: str) -> AgentRecord:
    return AgentRecord.model_validate_json(server.client.delete(f"/sessions/{session_id}").content)


def counted(server: Any, name: str) -> float:
    """Returns one of vLLM's own metrics."""
    found = re.search(rf"^vllm:{name}\{{.*\}} (\S+)$", server.client.get("/metrics").text, re.MULTILINE)
    assert found is not None
    return float(found[1])


def streamed(client: openai.OpenAI, prompt: list[int], told: list[str], **how: Any) -> openai.APIError | None:
    """Adds the pieces of an answer to `told` as they come; returns what has broken it off."""
    try:
        with client.completions.create(prompt=prompt, stream=True, **ENDLESS | how) as stream:
            told.extend(chunk.choices[0].text for chunk in stream)
    except openai.APIError as error:
        return error
    return None


def check(server: Any, kit: Any, calls: list[Any], texts: list[str]) -> None:
    """Checks that these and no others were recorded, as the policy of now gave them."""
    assert [call.completion.text for call in calls] == texts
    for call in calls:
        done = call.completion
        assert done.versions == ((server.health()["version"], 0, len(done.token_ids)),)
        expected = kit.reference_logprobs(server.model, call.prompt_token_ids, done.token_ids, 0.9)
        assert done.logprobs == pytest.approx(expected, abs=1e-3)


def test_calls_that_were_preempted_all_end_and_are_recorded_as_they_were_sampled(server: Any, kit: Any) -> None:
    def plays(number: int) -> tuple[list[Any], list[str]]:
        session_id, client = opened(server)
        prompt, told = [5 + number, *range(3, 93), 8], list[str]()
        with client:
            if number % 2:
                assert streamed(client, prompt, told) is None
            else:
                told.append(client.completions.create(prompt=prompt, **ENDLESS).choices[0].text)
        return close(server, session_id).calls, ["".join(told)]

    before = counted(server, "num_preemptions_total")
    for _ in range(5):  # calls that come one after the other, as threads may have it, find room
        with ThreadPoolExecutor(12) as threads:  # of the 16 blocks of 128 tokens each takes one, and then two more
            played = list(threads.map(plays, range(12)))
        if counted(server, "num_preemptions_total") > before:
            break
    assert counted(server, "num_preemptions_total") > before
    for calls, texts in played:
        check(server, kit, calls, texts)
        assert len(calls[0].completion.token_ids) == TOKENS


def test_new_weights_end_only_streams_of_which_some_was_told_and_all_others_begin_again(server: Any, kit: Any) -> None:
    version, server.next_version = server.next_version, server.next_version + 1
    new = kit.make_model(tied=True, seed=1, **SIZES)
    kit.publish(new, server.root / f"v{version:06d}", version)
    body = {"version": version, "in_flight": "abort", "source": {"kind": "disk", "name": f"v{version:06d}"}}
    # Two blocks of 128 tokens from the start, as none is that of another prompt: seven calls run at most.
    prompts = [[3 + number, *range(3, 93), *range(3, 43)] for number in range(9)]
    (of_wholes, of_streams), told = (
        ([opened(server) for _ in range(n)] for n in (3, 6)),
        [list[str]() for _ in range(6)],
    )
    with ThreadPoolExecutor(9) as threads:
        wholes = [
            threads.submit(client.completions.create, prompt=prompt, **ENDLESS)
            for prompt, (_, client) in zip(prompts[:3], of_wholes, strict=True)
        ]
        streams = [
            threads.submit(streamed, client, prompt, pieces)
            for prompt, (_, client), pieces in zip(prompts[3:], of_streams, told, strict=True)
        ]
        server.wait_for(lambda _: any(told))
        assert server.client.post("/reload_weights", json=body).status_code == 200
        errors = [stream.result() for stream in streams]
        texts = [whole.result().choices[0].text for whole in wholes]
    server.model = new
    for (session_id, client), text in zip(of_wholes, texts, strict=True):
        client.close()
        check(server, kit, close(server, session_id).calls, [text])
    for (session_id, client), pieces, error in zip(of_streams, told, errors, strict=True):
        client.close()
        check(server, kit, close(server, session_id).calls, [] if error else ["".join(pieces)])
        assert pieces
        assert error is None or "what was streamed can't be taken back: set sync.in_flight=keep" in str(error)
    assert {error is None for error in errors} == {True, False}


@pytest.mark.parametrize("leaves", [True, False])
def test_nothing_more_is_sampled_for_an_agent_that_has_left_or_whose_session_is_closed(
    server: Any, leaves: bool
) -> None:
    for _ in range(5):  # on a busy machine all may have been sampled before anybody has looked
        before = counted(server, "generation_tokens_total")
        session_id, client = opened(server)
        with client:
            stream = client.completions.create(prompt=[9], stream=True, **ENDLESS)
            chunks = iter(stream)
            next(chunks)
            if leaves:
                stream.close()
            else:
                (call,) = close(server, session_id).calls
                assert call.completion is None
                with pytest.raises(openai.APIError, match="the session was closed, which ends its calls"):
                    list(chunks)
        server.generate(prompts=[[5]], sampling={"max_tokens": 2})  # the engine counts when it works
        server.wait_for(lambda _: counted(server, "num_requests_running") == 0)
        if leaves:
            (call,) = close(server, session_id).calls
            assert call.completion is None
        if (sampled := counted(server, "generation_tokens_total") - before - 2) < TOKENS:
            break
    assert sampled < TOKENS
