"""What /generate makes of a body, and of what the engine answers, without an engine."""

import asyncio
import contextlib
import json
import threading
import types
from collections import defaultdict
from collections.abc import Callable
from typing import Any
from unittest.mock import AsyncMock

import pytest

from hocket.data import tokenizer as tokenizers
from hocket.protocol import SamplingParams, ToolCall
from hocket.server.errors import ApiError
from hocket.server.generate import Sampler
from support.engines import SpeakingEngine, make_sampler, make_tokenizer
from support.tokenizers import pieces_of, with_merged_bytes


@pytest.fixture(scope="module")
def reader() -> Sampler:
    return make_sampler()  # type: ignore[no-any-return]


def read(reader: Sampler, **body: Any) -> Any:
    return reader.parse(json.dumps(body).encode())


def test_fingerprint_follows_the_vocabulary_and_not_padding() -> None:
    first, second = make_tokenizer(), make_tokenizer()
    second(["a", "abc"], padding=True, truncation=True, max_length=2)
    assert tokenizers.fingerprint(first) == tokenizers.fingerprint(second)
    second.add_tokens(["new"])
    assert tokenizers.fingerprint(first) != tokenizers.fingerprint(second)


def test_each_completion_is_a_job_with_a_seed_of_its_own(reader: Sampler) -> None:
    def seeds(**body: Any) -> list[tuple[int, int, int | None]]:
        return [(job.prompt, job.index, job.seed) for job in read(reader, **body)[1]]

    assert seeds(prompts=["a", "b"], n=2, sampling={"seed": 10}) == [(0, 0, 10), (0, 1, 11), (1, 0, 12), (1, 1, 13)]
    assert seeds(prompts=["a"], n=2, sampling={"seed": 2**63 - 1}) == [(0, 0, 2**63 - 1), (0, 1, 0)]
    assert seeds(prompts=["a"]) == [(0, 0, None)]
    own = seeds(prompts=["a", "b"], seeds=[[100, 7], [2**63 - 1]], sampling={"seed": 1})
    assert own == [(0, 0, 100), (0, 1, 7), (1, 0, 2**63 - 1)]


WIDEST = {"stop": ["x"] * 16, "stop_token_ids": [1] * 16}
NO_PROMPTS = (5, None, {"role": "user", "content": "a"}, [5, -1], [5, "a"], [{"role": "user", "content": "a"}, 5])
TOO_MANY = "at most|less than or equal"


def test_what_just_fits_is_taken(reader: Sampler) -> None:
    read(reader, prompts=[[5] * 15 + [95]], sampling={"max_tokens": 16})
    _, jobs = read(reader, prompts=[[5] * 30, [5] * 17, [5]], sampling={"max_tokens": 16}, fit=True)
    assert [job.sampling.max_tokens for job in jobs] == [2, 15, 16]
    assert len(read(reader, prompts=["a"] * 1024, n=16, sampling=WIDEST)[1]) == 16 << 10
    for good in ({"temperature": 0.0, "top_k": 97}, {"temperature": 0.01}):
        reader.check_sampling(SamplingParams(**good))


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"prompts": ["a", "b"], "seeds": [[1]]}, "1 lists for 2 prompts"),
        ({"seeds": [[1, 2]], "n": 2}, "1 lists for 1 prompts, n=2"),
        ({"prompts": [[5] * 32], "fit": True}, r"32 prompt tokens \+ max_tokens 1 do not fit"),
        ({"prompts": [[5] * 17]}, r"17 prompt tokens \+ max_tokens 16 do not fit"),
        *(
            ({"prompts": ["a", wrong]}, r"prompts\.1: a prompt must be text, a list of token ids, or")
            for wrong in NO_PROMPTS
        ),
        ({"prompts": ["a"] * 129, "n": 128}, "16512 completions are more than the 16384 of one request"),
        ({"prompts": ["a"] * 1025}, TOO_MANY),
        ({"n": 129}, TOO_MANY),
        ({"seeds": [[1] * 129]}, TOO_MANY),
        ({"sampling": {"stop": ["x"] * 17}}, TOO_MANY),
        ({"sampling": {"stop_token_ids": [1] * 17}}, TOO_MANY),
        ({"begun": [0, 0]}, "2 numbers for 1 prompts"),
        ({"prompts": [[5, 6]], "begun": [3]}, r"begun\.0: 3 tokens of a prompt of 2"),
        # The engine would change it silently.
        ({"sampling": {"temperature": 0.005}}, r"below 0\.01"),
    ],
)
def test_what_can_not_be_sampled_is_refused(reader: Sampler, body: dict[str, Any], said: str) -> None:
    with pytest.raises(ApiError, match=said) as caught:
        read(reader, **{"prompts": ["a"]} | body)
    assert caught.value.status == 422


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([{"role": "wizard", "content": "a"}], "prompts.0.0.role: Input should be 'system', 'dev"),
        ([{"content": "a"}], "prompts.0.0.role: Field required"),
        ([{"role": "user"}], "prompts.0.0.content: Field required"),
        ([{"role": "user", "content": None}], "prompts.0.0.content: Input should be a valid string"),
        ([{"role": "user", "content": [{"type": "image"}]}], "prompts.0.0.content.0: Input tag 'image' found"),
        ([{"role": "user", "content": "a", "colour": 1}], "prompts.0.0.colour: unknown field"),
        ([{"role": "user", "content": "a"}, {}], "prompts.0.1.role: Field required"),
        ([{"role": "tool", "content": "a"}], "no tools here"),
    ],
)
def test_wrong_messages_are_refused_by_name(reader: Sampler, messages: Any, said: str) -> None:
    with pytest.raises(ApiError, match=said) as caught:
        read(reader, prompts=[messages])
    assert caught.value.status == 422


def test_a_model_without_chat_template_refuses_messages() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    reader = make_sampler(tokenizer)
    with pytest.raises(ApiError, match="chat_template is not set"):
        read(reader, prompts=[[{"role": "user", "content": "a"}]])


def test_the_tools_of_a_request_are_looked_for_in_each_of_its_completions(reader: Sampler) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    _, jobs = read(reader, prompts=["a", "b"], n=2, tools={"parser": "pythonic", "tools": [tool]})
    token_ids = [ord(character) - 30 for character in "[f(x=1)]"]
    assert [job.tools(token_ids) for job in jobs] == [[ToolCall(name="f", arguments='{"x": 1}')]] * 4
    with pytest.raises(ApiError, match="tool parser 'x' can't be used") as caught:
        read(reader, prompts=["a"], tools={"parser": "x", "tools": [tool]})
    assert caught.value.status == 422


def output(token_ids: list[int], logprobs: list[float]) -> Any:
    return types.SimpleNamespace(
        token_ids=token_ids,
        logprobs=types.SimpleNamespace(logprobs=logprobs),
        finish_reason="length",
        weight_versions=[types.SimpleNamespace(version="0", start=0, end=len(token_ids))],
    )


async def test_no_tokenizer_is_used_by_two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = make_tokenizer()
    sampler = make_sampler(tokenizer)
    threads: dict[int, set[int]] = defaultdict(set)

    def watched(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            threads[id(self)].add(threading.get_ident())
            return original(self, *args, **kwargs)

        return call

    for name in ("__call__", "decode", "apply_chat_template"):
        monkeypatch.setattr(type(tokenizer), name, watched(getattr(tokenizer, name).__func__))
    _, jobs = await sampler.read(
        b'{"prompts": ["ab", [{"role": "user", "content": "c"}]], "sampling": {"max_tokens": 4}}'
    )

    sampled = AsyncMock(return_value=output(jobs[0].token_ids, [-1.0, -0.5]))
    monkeypatch.setattr("hocket.server.vllm_requests.complete", sampled)
    _, completion = await sampler.complete(jobs[0])
    assert completion.text == "ab"
    assert len(set.union(*threads.values())) == 2, "prompts are read in a thread of their own"
    assert all(len(seen) == 1 for seen in threads.values())


CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]


async def spoken(monkeypatch: pytest.MonkeyPatch, says: str | list[int], *, eos: bool = False, **body: Any) -> Any:
    """Returns the completion whose tokens a model with merged bytes says, whatever the prompt is."""
    tokenizer = with_merged_bytes()
    sampler = make_sampler(tokenizer)
    sampler._max_length = 512
    token_ids = pieces_of(tokenizer, says) if isinstance(says, str) else says
    monkeypatch.setattr("hocket.server.vllm_requests.complete", SpeakingEngine(tokenizer, *token_ids, eos=eos))
    asked = {"prompts": [[5]]} | body | {"sampling": {"max_tokens": 256, **body.get("sampling", {})}}
    _, jobs = await sampler.read(json.dumps(asked).encode())
    return (await sampler.complete(jobs[0]))[1]


@pytest.mark.parametrize(
    ("says", "how", "text", "after"),
    [
        ("🤖 the</x>", {"stop": ["</x>"]}, "🤖 the", "</x>"),
        ("a\n\n", {"stop": ["\n"]}, "a", "\n\n"),  # and the rest of the token in which it ends
        ("a<|im_start|>", {"stop": ["<|im_start|>"]}, "a", ""),  # the text has no special tokens
        ("the<|im_end|>", {}, "the", ""),
        ("a<|im_start|>b", {"max_tokens": 3}, "ab", ""),
        ("a🤖", {"max_tokens": 3}, "a\ufffd", ""),
        ("a🤖", {"max_tokens": 3, "stop": ["x"]}, "a\ufffd", ""),  # the same with and without stop strings
    ],
)
async def test_a_completions_text_is_that_of_its_tokens_up_to_the_stop_string(
    monkeypatch: pytest.MonkeyPatch, says: str, how: dict[str, Any], text: str, after: str
) -> None:
    done = await spoken(monkeypatch, says, eos=says.endswith("<|im_end|>"), sampling=how)
    assert (done.text, done.after_text) == (text, after)
    assert done.finish_reason == ("length" if "max_tokens" in how else "stop")


@pytest.mark.parametrize(
    ("says", "how"),
    [
        (f"{CALL}<|im_end|>", {}),
        (CALL, {"stop": ["</tool_call>"]}),  # many tokens, the last of which is not all of it
        (f"{CALL}<|im_end|>", {"stop": ["</tool_call><|im_end|>"]}),
        (f"{CALL}the", {"stop": ["ZZ", ">the"]}),
    ],
)
async def test_calls_are_found_in_all_that_the_model_wrote_also_where_a_stop_string_ends_it(
    monkeypatch: pytest.MonkeyPatch, says: str, how: dict[str, Any]
) -> None:
    tools = {"parser": "hermes", "tools": TOOLS}
    done = await spoken(monkeypatch, says, eos=not how, sampling=how, tools=tools)
    assert [call.name for call in done.tool_calls] == ["f"]


async def test_a_tag_that_is_one_token_may_end_the_sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = with_merged_bytes()
    tool = tokenizer.convert_tokens_to_ids("<tool>")
    seen: list[list[int]] = []
    monkeypatch.setattr("hocket.server.vllm_requests.find_calls", lambda *_: lambda ids: seen.append(list(ids)) or [])
    tools = {"parser": "hermes", "tools": TOOLS}
    done = await spoken(monkeypatch, [7, tool], sampling={"stop_token_ids": [tool]}, tools=tools)
    assert (done.text, seen) == (tokenizer.decode([7]), [[7, tool]])


@pytest.mark.parametrize("stop", [[], ["</tool_call>"]])
async def test_a_turn_that_goes_on_has_its_text_and_calls_whole_wherever_it_was_cut(
    monkeypatch: pytest.MonkeyPatch, stop: list[str]
) -> None:
    tokenizer = with_merged_bytes()
    ids = pieces_of(tokenizer, f"🤖 {CALL}")
    asked: dict[str, Any] = {"tools": {"parser": "hermes", "tools": TOOLS}, "sampling": {"stop": stop}}
    for cut in range(1, len(ids)):
        done = await spoken(monkeypatch, ids[cut:], prompts=[[5, *ids[:cut]]], begun=[cut], **asked)
        assert done.text == (f"🤖 {CALL}" if not stop else f"🤖 {CALL}".removesuffix(stop[0]))
        assert done.text + done.after_text == f"🤖 {CALL}"
        assert len(done.tool_calls) == 1
        assert list(done.token_ids) == ids[cut:]


async def test_log_probs_that_are_no_numbers_are_the_weights_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler, bad = make_sampler(), output([1, 2], [-1.0, float("nan")])
    monkeypatch.setattr("hocket.server.vllm_requests.complete", AsyncMock(return_value=bad))
    _, jobs = await sampler.read(b'{"prompts": [[5]]}')
    with pytest.raises(ApiError, match="log-probs that are not finite") as refused:
        await sampler.complete(jobs[0])
    assert refused.value.status == 500


async def test_the_engine_gets_a_request_in_parts_and_one_message_ends_them(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler, begun = make_sampler(), list[str]()

    async def complete(llm: Any, token_ids: Any, sampling: Any, seed: Any, request_id: str, _: int) -> Any:
        begun.append(request_id)
        if len(begun) > 3:  # the first three end
            await asyncio.Event().wait()
        return output([1, 2], [-1.0, -0.5])

    monkeypatch.setattr("hocket.server.vllm_requests.complete", complete)
    sampler._llm.abort = AsyncMock()
    _, jobs = await sampler.read(b'{"prompts": [[5], [6]], "n": 100}')
    async with contextlib.aclosing(sampler.completions(jobs)) as finished:
        done = [await anext(finished) for _ in range(3)]
        async with asyncio.timeout(60):
            while len(begun) < 11:
                await asyncio.sleep(0)
    assert [job for job, _ in done] == jobs[:3]
    assert begun == [job.request_id for job in jobs[:11]], "8 at a time: twice what the engine decodes at once"
    sampler._llm.abort.assert_awaited_once_with([job.request_id for job in jobs])
    assert len(set(begun)) == 11
    async with contextlib.aclosing(sampler.completions(jobs[:0])) as finished:
        assert [done async for done in finished] == []
    sampler._llm.abort.assert_awaited_once()
