"""A real server that shares its GPU: on a CPU vLLM's worker frees nothing, but states, refusals and order are real."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from hocket.protocol import AgentRecord, Health, SleepResponse

pytestmark = pytest.mark.engine
ALL = ["weights", "kv_cache"]


@pytest.fixture
def server(server: Any) -> Any:
    """The server, awake, with good weights."""
    asleep = server.client.post("/wake_up", json={"tags": ["weights"]}).json()["asleep"]
    if asleep or server.health()["status"] != "ready":
        server.publish_and_load(server.model)
        server.client.post("/wake_up", json={})
    assert server.health()["status"] == "ready"
    return server


def post(server: Any, route: str, **body: Any) -> list[str]:
    """Returns what is asleep afterwards."""
    response = server.client.post(route, json=body)
    assert response.status_code == 200, response.text
    return list(SleepResponse.model_validate_json(response.content).asleep)


def refusal(server: Any, route: str, **body: Any) -> tuple[int, str]:
    response = server.client.post(route, json=body)
    return response.status_code, response.json()["error"]["code"]


def greedy(server: Any) -> Any:
    return server.generate(prompts=[[5, 6, 7]], sampling={"temperature": 0, "max_tokens": 24})["completions"]


def test_while_it_sleeps_it_says_so_and_refuses_work(server: Any) -> None:
    post(server, "/sleep", level=1)
    health = Health.model_validate(server.health())
    assert (health.status, health.error) == ("asleep", None)
    work: dict[str, Any] = {
        "/generate": {"prompts": [[5]]},
        "/v1/completions": {"model": health.model, "prompt": "a", "max_tokens": 2},
    }
    for route, body in work.items():
        assert refusal(server, route, **body) == (503, "asleep")
    assert server.client.get("/metrics").status_code == 200
    assert server.reload(99, "v000099").json()["error"]["code"] == "asleep"
    assert server.reload(99, "v000099").status_code == 409
    assert post(server, "/wake_up", tags=["kv_cache"]) == ["weights"]
    assert refusal(server, "/generate", **work["/generate"]) == (503, "asleep")
    assert post(server, "/wake_up", tags=["weights"]) == []
    assert max(server.gaps()) < 1e-4


def test_an_engine_that_dropped_its_weights_generates_only_after_a_reload(server: Any, kit: Any) -> None:
    held = server.publish_and_load(server.model)
    post(server, "/sleep", level=2)
    assert refusal(server, "/wake_up") == (409, "no_weights")
    assert post(server, "/wake_up", tags=["weights"]) == ["kv_cache"]
    assert refusal(server, "/wake_up", tags=["kv_cache"]) == (409, "no_weights")
    again = server.reload(held["version"], f"v{held['version']:06d}").json()
    assert again["checksum"] == held["checksum"]
    assert again["seconds"] != held["seconds"]  # else it would be the first answer, without loading
    new = kit.make_model(tied=True, seed=31)
    server.publish_and_load(new)
    assert server.health()["status"] == "asleep"
    assert refusal(server, "/generate", prompts=[[5]]) == (503, "asleep")
    assert post(server, "/wake_up", tags=["kv_cache"]) == []
    assert server.health()["version"] == held["version"] + 1
    assert max(server.gaps(model=new)) < 1e-4


def test_sleeping_and_waking_twice_is_as_once_and_half_awake_falls_asleep_again(server: Any) -> None:
    before = greedy(server)
    assert post(server, "/wake_up") == []
    assert [post(server, "/sleep", level=1) for _ in range(2)] == [ALL, ALL]
    assert [post(server, "/wake_up", tags=["weights"]) for _ in range(2)] == [["kv_cache"]] * 2
    assert post(server, "/sleep", level=1) == ALL
    assert [post(server, "/wake_up") for _ in range(2)] == [[], []]
    assert server.health()["status"] == "ready"
    assert greedy(server) == before


def test_a_load_that_fails_while_the_cache_sleeps_keeps_the_engine_from_generating(server: Any, kit: Any) -> None:
    post(server, "/sleep", level=1)
    post(server, "/wake_up", tags=["weights"])
    version = server.new_version()
    kit.publish(server.model, server.root / f"v{version:06d}", version)
    kit.flip_a_byte(server.root / f"v{version:06d}")
    assert server.reload(version, f"v{version:06d}").status_code == 500
    assert refusal(server, "/wake_up") == (409, "no_weights")
    assert server.health()["status"] == "failed"
    server.publish_and_load(server.model)
    assert post(server, "/wake_up") == []
    assert max(server.gaps()) < 1e-4


def test_an_agent_s_session_outlives_a_sleep_with_the_call_that_was_kept(server: Any, kit: Any) -> None:
    request = {"sampling": {"max_tokens": 400}, "max_length": 512, "max_calls": 2, "idle_timeout_s": 60}
    body: dict[str, Any] = {"model": "x", "prompt": [5, 6, 7, 8], "extra_body": {"ignore_eos": True}}
    for _ in range(8):  # on a busy machine the call may have ended before the engine falls asleep
        path = f"/sessions/{server.client.post('/sessions', json=request).json()['id']}"
        url = f"{server.client.base_url}{path}/v1"
        with openai.OpenAI(base_url=url, api_key="x", max_retries=0) as client, ThreadPoolExecutor(1) as thread:
            answer = thread.submit(client.completions.create, max_tokens=400, **body)
            server.wait_for(lambda _, path=path: bool(server.client.get(path).json()["calls"]))
            post(server, "/sleep", level=1, in_flight="keep")
            with pytest.raises(openai.InternalServerError, match="the engine is asleep") as refused:
                client.completions.create(max_tokens=4, **body)
            assert refused.value.status_code == 503  # which clients send again
            kept = not answer.done()
            post(server, "/wake_up")
            text = answer.result(60).choices[0].text
            client.completions.create(max_tokens=4, **body)
        first, second = AgentRecord.model_validate_json(server.client.delete(path).content).calls
        assert first.completion is not None
        assert second.completion is not None
        assert [len(call.token_ids) for call in (first.completion, second.completion)] == [400, 4]
        assert first.completion.text == text
        expected = kit.reference_logprobs(server.model, [5, 6, 7, 8], first.completion.token_ids)
        assert first.completion.logprobs == pytest.approx(expected, abs=1e-4)
        if kept:
            return
    pytest.fail("no call was ever in flight")


def test_drained_requests_end_first_and_aborted_ones_are_told_to_come_again(server: Any) -> None:
    answer = server.in_flight(prompts=[[5, 6, 7, 8]], n=96)
    post(server, "/sleep", level=1, in_flight="drain")
    post(server, "/wake_up")  # what came too late to be drained goes on
    assert answer.result(60).status_code == 200
    answer = server.in_flight()
    post(server, "/sleep", level=1, in_flight="abort")
    aborted = answer.result(60)
    assert (aborted.status_code, aborted.json()["error"]["code"]) == (503, "aborted")  # which a pool plays again


def test_a_server_not_started_for_it_refuses_and_goes_on(servers: Any) -> None:
    other = servers("untied float32")
    assert refusal(other, "/sleep", level=1) == (409, "no_sleep_mode")
    assert post(other, "/wake_up") == []
    assert max(other.gaps()) < 1e-4
