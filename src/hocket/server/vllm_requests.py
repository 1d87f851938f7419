"""Ask vLLM 0.32's engine for completions, and read what it answers, by its private names too."""

import asyncio
import contextlib
import logging
import re
from collections.abc import Callable, Sequence
from typing import Any

from hocket.protocol import SamplingParams, Toolbox, ToolCall, VersionSpan
from hocket.server.errors import ApiError, encodable, invalid

logger = logging.getLogger("hocket")

FindCalls = Callable[[Sequence[int]], list[ToolCall]]
"""(token ids of a text) -> the tool calls in them."""
CUT_TAG = re.compile(r"</?[\w|]*\Z")
"""The beginning of a tag at the end of a text."""
SHARED = {"temperature", "top_p", "top_k", "max_tokens"}
"""Parameters that have one name here and in vLLM."""
CONSTRAINTS = (
    "allowed_token_ids",
    "bad_words",
    "logit_bias",
    "logprob_token_ids",
    "min_tokens",
    "repetition_detection",
    "structured_outputs",
    "thinking_token_budget",
)
"""Parameters that sample from another distribution than the policy's, or stop it early."""
AGENT_PARAMS = (
    "ignore_eos",
    "include_stop_str_in_output",
    "output_kind",
    "prompt_logprobs",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "stream_interval",
)
"""Sampling parameters that an agent may set itself."""


def sampling_params(sampling: SamplingParams, seed: int | None, begun: int = 0) -> Any:
    """Make vLLM's parameters for one completion, whose output comes at the end.

    `begun` is the number of the prompt's last tokens that belong to the same turn.
    """
    from vllm.sampling_params import RequestOutputKind
    from vllm.sampling_params import SamplingParams as VllmParams

    from hocket.server.vllm_text import BEGUN

    return VllmParams(
        n=1,
        **sampling.model_dump(include=SHARED),
        stop=list(sampling.stop),
        stop_token_ids=list(sampling.stop_token_ids),
        seed=seed,
        logprobs=0,
        flat_logprobs=True,
        detokenize=bool(sampling.stop),  # otherwise the text is decoded once, at the end
        output_kind=RequestOutputKind.FINAL_ONLY,
        extra_args={BEGUN: begun},
    )


def refuse_constraints(params: Any) -> None:
    """Raise ApiError where an agent's parameters give what can't be trained."""
    set_names = [name for name in CONSTRAINTS if getattr(params, name)]
    if set_names:
        message = f"{', '.join(set_names)}: what is sampled under constraints is not the policy, and can't be trained"
        hint = "leave them out; response_format, and a tool_choice other than auto and none, are constraints, too"
        raise ApiError(400, "not_recorded", message, hint)


def call_params(params: Any, sampling: SamplingParams) -> Any:
    """Make vLLM's parameters for a call: sampled as its session says, answered as its agent asks."""
    from vllm.sampling_params import SamplingParams as VllmParams

    from_agent = {name: getattr(params, name) for name in AGENT_PARAMS}
    return VllmParams(
        **from_agent,
        **sampling.model_dump(include=SHARED),
        stop=list(params.stop) + list(sampling.stop),
        stop_token_ids=list(params.stop_token_ids) + list(sampling.stop_token_ids),
        seed=sampling.seed,
        logprobs=max(params.logprobs or 0, 0),
    )


def version_spans(output: Any) -> tuple[VersionSpan, ...]:
    """Read the spans (weight version, start, end) over the tokens of vLLM's CompletionOutput."""
    return tuple((int(span.version), span.start, span.end) for span in output.weight_versions)


def image_prompt(llm: Any, token_ids: list[int], images: Sequence[Any]) -> Any:
    """Make vLLM's prompt with images. Raises vLLM's errors.

    It is made in the only thread in which vLLM's routes make theirs: the processor is theirs, too.
    """
    renderer = llm.renderer
    made = renderer._mm_executor.submit(
        renderer._process_multimodal, token_ids, {"image": images}, None, None
    )
    return made.result()


async def complete(
    llm: Any,
    prompt: Any,
    sampling: SamplingParams,
    seed: int | None,
    request_id: str,
    begun: int = 0,
) -> Any:
    """Sample one completion of token ids, or of vLLM's own prompt. A cancelled call aborts it.

    Raises ApiError where vLLM refuses the request.
    """
    from vllm.exceptions import VLLMClientError
    from vllm.inputs.engine import tokens_input

    if isinstance(prompt, list):
        prompt = tokens_input(prompt)
    params = sampling_params(sampling, seed, begun)
    try:
        outputs = [output async for output in llm.generate(prompt, params, request_id)]
        return outputs[-1].outputs[0]
    except VLLMClientError as error:
        hint = "change the request as the message says"
        raise ApiError(422, "refused_by_engine", str(error), hint) from error


async def abort(llm: Any, request_ids: Sequence[str]) -> None:
    """End requests with one message to the engine: n messages take it n² time."""
    from vllm.v1.engine.exceptions import EngineDeadError

    if request_ids:
        # A dead engine has ended them. A cancelled abort would let some of them run for ever.
        with contextlib.suppress(EngineDeadError):
            await asyncio.shield(llm.abort(request_ids))


def find_calls(tokenizer: Any, tools: Toolbox) -> FindCalls:
    """Make a function that finds calls of these tools by vLLM's parser. Raises ApiError without one."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    try:
        request = ChatCompletionRequest(messages=[], tools=list(tools.tools))
        parser = ToolParserManager.get_tool_parser(tools.parser)(tokenizer, request.tools)
    # There is no such parser, it lacks a package or token, or a tool is none of OpenAI's API.
    except (KeyError, ImportError, RuntimeError, ValueError) as error:
        parsers = ", ".join(ToolParserManager.list_registered())
        message = f"tools: vLLM's tool parser {tools.parser!r} can't be used: {error}"
        hint = f"vLLM has the parsers {parsers}; each tool is as in OpenAI's API"
        raise invalid(message, hint) from error
    request = parser.adjust_request(request)

    def parse(text: str) -> Any:
        try:
            return parser.extract_tool_calls(text, request=request).tool_calls
        # Some parsers raise where what a model wrote is malformed: then there is no call in it.
        except Exception:
            logger.exception("vLLM's tool parser %s failed on %.200r", tools.parser, text)
            return []

    def find(token_ids: Sequence[int]) -> list[ToolCall]:
        text = tokenizer.decode(token_ids, skip_special_tokens=request.skip_special_tokens)
        # A call is complete even if the tag that closes it was cut off.
        return list(map(_tool_call, parse(text) or parse(CUT_TAG.sub("", text))))

    return find


def _tool_call(call: Any) -> ToolCall:
    """Turn a call of vLLM's into one of hocket's."""
    # vLLM's own id is random, and would end up among the tokens that the model sees.
    is_random = call.id.startswith("chatcmpl-tool-")
    return ToolCall(
        name=encodable(call.function.name),
        arguments=encodable(call.function.arguments),
        id="" if is_random else encodable(call.id),
    )
