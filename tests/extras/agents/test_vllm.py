"""What sessions know of vLLM."""

import contextlib
import inspect
import math
from types import SimpleNamespace
from typing import Any

import pytest
from tests.server.test_vllm_api import arguments, environment  # noqa: F401

from hocket.extras.agents.sessions import NO_ROOM, TOO_LONG, OpenSession, recorded
from hocket.protocol import Completion, SamplingParams, SessionRequest
from hocket.server.errors import ApiError
from support.engines import asking, idle_engine, wrap
from support.tiny_server import TOKEN


def test_what_is_at_fault_in_a_prompt_that_is_too_long_has_the_names_we_know() -> None:
    from vllm.exceptions import VLLMValidationError
    from vllm.renderers import params
    from vllm.sampling_params import SamplingParams as VllmParams

    source = inspect.getsource(params)
    assert {name for name in TOO_LONG if f'parameter="{name}"' in source} == TOO_LONG
    with pytest.raises(VLLMValidationError, match=NO_ROOM):
        VllmParams(max_tokens=0)


@pytest.mark.parametrize("second", [-0.25, float("nan")])
async def test_only_a_call_that_ended_well_has_a_completion(second: float) -> None:
    async def outputs() -> Any:
        for token, value, reason in ((7, -0.5, None), (8, second, "stop")):
            entries = [{token: SimpleNamespace(logprob=value), 1: None}]  # of the sampled token, and of another one
            done = {"token_ids": [token], "logprobs": entries, "text": "a", "finish_reason": reason}
            spans = [SimpleNamespace(version="4", start=0, end=2)]
            yield SimpleNamespace(outputs=[SimpleNamespace(**done, weight_versions=spans)])

    session = OpenSession(SessionRequest(sampling=SamplingParams(), max_length=9, max_calls=1, idle_timeout_s=9))
    call = session.begin([1], 4)
    told = recorded(outputs, session, call)
    await anext(told)
    assert (session.running, call.completion) == ([call.request_id], None)
    with pytest.raises(ApiError, match="not finite") if math.isnan(second) else contextlib.nullcontext():
        assert len([output async for output in told]) == 1
    assert session.running == []
    whole = Completion(token_ids=(7, 8), logprobs=(-0.5, -0.25), text="aa", finish_reason="stop", versions=((4, 0, 2),))
    assert session.record().calls[0].completion == (None if math.isnan(second) else whole)


async def test_a_session_is_a_route_of_the_whole_app_and_needs_the_token(model: str) -> None:
    door = wrap(idle_engine(), token=TOKEN)
    routes = door.app.routes
    assert "/sessions" in {route.path for route in routes if "POST" in (getattr(route, "methods", None) or ())}
    async with asking(door) as http:
        for headers in ({}, {"Authorization": "Bearer wrong-token"}):
            assert (await http.request("POST", "/sessions", headers=headers)).status_code == 401
