"""Agents written for other clients play an episode in a session of a real server, where these are installed."""

import asyncio
from typing import Any

import pytest

from hocket.common.registry import load_plugins
from hocket.envs import Task
from hocket.extras.agents.agent import AGENTS
from support.engines import assert_sampled, make_tokenizer
from support.processes import ROOT
from support.tiny_server import TinyServer

STOPS = list("aeiouAEIOU[]{}-+")  # so that an answer has an end before its limit


@pytest.fixture(params=["openai_agents_guess", "anthropic_guess"])
def name(request: pytest.FixtureRequest) -> str:
    """The name of an agent, and of its file."""
    module = {"openai_agents_guess": "agents", "anthropic_guess": "anthropic"}[request.param]
    pytest.importorskip(module, reason=f"what {request.param} needs is not installed")
    return str(request.param)


@pytest.mark.engine
def test_an_agent_for_another_client_is_recorded_as_sampled(name: str, server: TinyServer) -> None:
    load_plugins([str(ROOT / "examples" / "agents" / f"{name}.py")])
    sampling: dict[str, Any] = {"max_tokens": 64, "seed": 7, "temperature": 0.8, "stop": STOPS}
    session_id, client = server.open_session(max_length=400, max_calls=6, **sampling)
    client.close()
    task = Task(
        messages=[{"role": "user", "content": "guess"}],
        text="guess",
        answer="7",
        meta={},
        seed=1,
        base_url=str(client.base_url).rstrip("/"),
        api_key="none",
        model="policy",
    )
    reward = asyncio.run(AGENTS.get(name)(task))

    record = server.record_of(session_id, "DELETE")
    assert 0.0 <= reward <= 1.0
    assert 1 <= len(record.calls) <= 3
    tokenizer = make_tokenizer()
    chat = "user:guess;"
    for call in record.calls:
        done = call.completion
        assert done is not None
        assert list(call.prompt_token_ids) == tokenizer(f"{chat}assistant:")["input_ids"]
        assert done.versions == ((server.health()["version"], 0, len(done.token_ids)),)
        assert_sampled(server.model, call.prompt_token_ids, done.token_ids, done.logprobs, 0.8)
        hint = "higher" if done.text.isdecimal() and int(done.text) < 7 else "lower"
        chat += f"assistant:{done.text};user:{hint};"
    assert len({call.seed for call in record.calls}) == len(record.calls)
