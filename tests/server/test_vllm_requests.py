"""What vLLM is asked for, and the tool calls in its answers."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.server.test_vllm_api import environment  # noqa: F401

from hocket.data import tokenizer
from hocket.protocol import SamplingParams, Toolbox
from hocket.server import vllm_requests, vllm_text
from hocket.server.errors import ApiError


def test_sampling_reaches_vllm_unchanged() -> None:
    sampling = SamplingParams(temperature=0.7, top_p=0.9, top_k=5, max_tokens=3, stop=("x",), stop_token_ids=(2,))
    made = vllm_requests.sampling_params(sampling, seed=9, begun=4)
    assert (made.temperature, made.top_p, made.top_k, made.max_tokens) == (0.7, 0.9, 5, 3)
    assert (made.stop, made.stop_token_ids, made.seed, made.n) == (["x"], [2], 9, 1)
    assert made.extra_args == {vllm_text.BEGUN: 4}
    assert (made.logprobs, made.flat_logprobs, made.presence_penalty, made.min_p) == (0, True, 0.0, 0.0)


CALCULATE = {
    "type": "function",
    "function": {
        "name": "calculate",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    },
}


@pytest.fixture(scope="module")
def tools_tokenizer() -> Any:
    return tokenizer.load(str(Path(__file__).parents[2] / "checkpoints" / "tiny-tools"))


CALL = '<tool_call>{"name": "%s", "arguments": %s}</tool_call>'
SUM = {"expression": "1+2"}


@pytest.mark.parametrize(
    ("parser", "text", "calls"),
    [
        ("hermes", CALL % ("calculate", json.dumps(SUM)) + CALL % ("other", "{}"), [("calculate", SUM), ("other", {})]),
        ("hermes", (CALL % ("calculate", json.dumps(SUM))).rstrip()[:-1], [("calculate", SUM)]),  # a stop string's rest
        ("hermes", "no call at all", []),
        ("hermes", '<tool_call>{"name": "calculate", "argum', []),
        ("hermes", "<tool_call>[1]</tool_call>", []),
        ("pythonic", '[calculate(expression="1+2")]', [("calculate", SUM)]),
    ],
)
def test_vllms_parsers_find_the_calls_in_token_ids(
    tools_tokenizer: Any, parser: str, text: str, calls: list[Any]
) -> None:
    find = vllm_requests.find_calls(tools_tokenizer, Toolbox(parser=parser, tools=(CALCULATE,)))
    for found in (find(tools_tokenizer.encode(text)), find(tools_tokenizer.encode(text))):  # it keeps no state
        assert [(call.name, json.loads(call.arguments)) for call in found] == calls
        assert all(call.id == "" for call in found)  # vLLM's own are random


@pytest.mark.parametrize(
    ("parser", "tool", "said"),
    [
        ("herms", CALCULATE, "tool parser 'herms' can't be used: .*not found"),
        ("llama3_json", CALCULATE, "'llama3_json' can't be used: .*bot token"),
        ("hermes", {"name": "calculate"}, "tools.0.function"),
    ],
)
def test_tools_that_could_not_be_parsed_are_refused(tools_tokenizer: Any, parser: str, tool: Any, said: str) -> None:
    with pytest.raises(ApiError, match=f"(?s){said}") as refused:
        vllm_requests.find_calls(tools_tokenizer, Toolbox(parser=parser, tools=(tool,)))
    assert "vLLM has the parsers " in refused.value.body.hint
