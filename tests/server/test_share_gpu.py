"""A real server that shares its GPU: on a CPU vLLM's worker frees nothing, but states, refusals and order are real."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from hocket.protocol import Health
from support.engines import assert_sampled, error_of, make_model
from support.tiny_server import TinyServer

pytestmark = pytest.mark.engine


@pytest.fixture
def server(server: TinyServer) -> TinyServer:
    """The server, awake, with good weights."""
    server.publish_and_load(server.model)
    assert server.health()["status"] == "ready"
    return server


def post(server: TinyServer, route: str, **body: Any) -> Health:
    response = server.client.post(route, json=body)
    assert response.status_code == 200, response.text
    return Health.model_validate_json(response.content)


def test_it_refuses_work_while_it_sleeps_and_after_it_dropped_its_weights_until_a_reload(server: TinyServer) -> None:
    held = server.publish_and_load(server.model)
    health = post(server, "/sleep", level=2)
    assert (health.status, health.error) == ("asleep", None)
    for route in ("/generate", "/v1/completions"):
        refused = server.client.post(route, json={"model": health.model, "prompt": "a"})
        assert error_of(refused) == (503, "asleep")
    assert server.client.get("/metrics").status_code == 200
    assert error_of(server.reload(held.version, compare=True)) == (503, "asleep")
    again = server.reload(held.version).json()
    assert again["checksum"] == held.checksum
    assert again["seconds"] != held.seconds  # else it would be the first answer, without loading
    new = make_model(seed=31)
    post(server, "/sleep", level=2)
    server.publish_and_load(new)
    assert server.health()["version"] == held.version + 1
    server.assert_is(new)


@pytest.mark.long
def test_an_agent_s_session_outlives_a_sleep_with_the_call_that_was_kept(server: TinyServer) -> None:
    version = server.health()["version"]
    body: dict[str, Any] = {"model": "x", "prompt": [5, 6, 7, 8], "extra_body": {"ignore_eos": True}}
    for _ in range(8):  # on a busy machine the call may have ended before the engine falls asleep
        session_id, client = server.open_session(max_tokens=400)
        with client, ThreadPoolExecutor(1) as thread:
            answer = thread.submit(client.completions.create, max_tokens=400, **body)
            server.wait_until(lambda _, session_id=session_id: bool(server.record_of(session_id).calls))
            post(server, "/sleep", level=1, in_flight="keep")
            with pytest.raises(openai.InternalServerError, match="the engine is asleep") as refused:
                client.completions.create(max_tokens=4, **body)
            assert refused.value.status_code == 503  # which clients send again
            kept = not answer.done()
            assert server.reload(version).status_code == 200  # which is held, and so not loaded
            text = answer.result(60).choices[0].text
            client.completions.create(max_tokens=4, **body)
        first, second = server.record_of(session_id, "DELETE").calls
        assert first.completion is not None
        assert second.completion is not None
        assert [len(call.token_ids) for call in (first.completion, second.completion)] == [400, 4]
        assert first.completion.text == text
        assert_sampled(server.model, [5, 6, 7, 8], first.completion.token_ids, first.completion.logprobs)
        if kept:
            return
    pytest.fail("no call was ever in flight")
