"""Turn rows, a prompt with its response or a conversation, into token ids, and say which are taught.

Each turn of the assistant is taught, with the token that ends it, as the template writes it last, behind the messages
so far. Where a template writes an earlier turn otherwise, a sample of its own begins.
"""

import contextlib
import functools
import itertools
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hocket.config import DataConfig
from hocket.data.prompts import NO_TOKEN, Rendered, Renderer, check_messages, in_parts, opening_of, renderer_of
from hocket.errors import DataError
from hocket.types import Message, TokenSequence

Passage = tuple[str, str, list[int]]  # a text that is read, the turn behind it, and its end

log = logging.getLogger(__name__)


def load_demonstrations(data: DataConfig, tokenizer: Any, max_length: int) -> list[TokenSequence]:
    renderer = renderer_of(data, tokenizer)
    end = renderer.end_of_turn()

    def render(_: str, columns: Mapping[str, Any]) -> Rendered[list[TokenSequence]]:
        samples = _samples(renderer, data, columns, end)
        texts = [text for sample in samples for read, said, _ in sample for text in (read, read + said)]
        return texts, functools.partial(_sequences, renderer, samples)

    sequences = list(itertools.chain.from_iterable(in_parts(data, render, renderer.encode_prompts)))
    lengths = [len(sequence.mask) for sequence in sequences]
    kept = [sequence for sequence in sequences if len(sequence.mask) <= max_length]
    too_long = f"more than {max_length} tokens, the model's context or model.max_length; the longest has {max(lengths)}"
    advice = "shorten them, or raise model.max_length, at most to the model's context"
    if not kept:
        raise DataError(f"all rows of {data.source} have {too_long}: {advice}")
    num = len(lengths) - len(kept)
    if num:
        log.warning("left out %d of %d demonstrations with %s: %s", num, len(lengths), too_long, advice)
    return kept


def _samples(renderer: Renderer, data: DataConfig, columns: Mapping[str, Any], end: int) -> list[list[Passage]]:
    whole = [name for name in (data.prompt_column, "messages") if isinstance(columns.get(name), list)]
    if whole and data.response_column not in columns:
        tools = columns.get("tools") or None
        tools = _clean(json.loads(tools) if isinstance(tools, str) else tools)
        return _conversation(renderer, _turns(columns[whole[0]], whole[0], data), tools, end)
    prompt, _ = renderer.prompt(columns)
    hint = f", or {data.section}.prompt_column to one of whole conversations{data.otherwise}"
    response = renderer.column(columns, "response_column", hint)
    match _clean(response):
        case [{"role": "assistant", "content": text, **more}] if not more:  # as in TRL's prompts with completions
            response = text
    if not (isinstance(response, str) and response):
        wanted = "text or one message of the assistant (else join prompt and response as messages)"
        raise ValueError(f"column {data.response_column!r} must be {wanted}, got {response!r:.80}")
    return [[(prompt, _behind(opening_of(prompt), response, f"column {data.response_column!r}"), [end])]]


def _conversation(renderer: Renderer, messages: Sequence[Message], tools: Any, end: int) -> list[list[Passage]]:
    samples = list[list[Passage]]()
    told = said = ""  # the last sample's text, and with what stands behind its last turn
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        asked = renderer.render(messages[:index], tools=tools)
        whole = renderer.render(messages[: index + 1], tools=tools, add_generation_prompt=False)
        if whole.startswith(asked):
            turn = whole[len(asked) :]
        elif message.keys() <= {"role", "content"}:  # the template has left the turn's own thought out
            turn = _behind(opening_of(asked), message["content"], f"message {index}") + renderer.after_turn
        else:
            what = f"the chat template does not write message {index} as it lets the model begin it: {asked[-20:]!r}"
            raise ValueError(f"{what}; write all into its content, or use another template")
        calls = [call.get("function", call) for call in message.get("tool_calls", ()) if isinstance(call, dict)]
        if any(str(call.get("name", "")) not in turn for call in calls):
            raise ValueError(f"the chat template leaves the tool calls of message {index} out: use another template")
        if not samples or not asked.startswith(said):
            samples.append([])
            told = ""
        body = turn.removesuffix(renderer.after_turn)  # else it has an end of its own: <|call|>
        ends = turn.endswith(renderer.after_turn)
        samples[-1].append((asked[len(told) :], body, [end] if ends else []))
        told = asked + body
        said = asked + turn
    return samples


def _sequences(
    renderer: Renderer, samples: Sequence[Sequence[Passage]], token_ids: Iterable[list[int]]
) -> list[TokenSequence]:
    """Encode each turn behind what is read before it: alone, it might begin with a space."""
    encoded = iter(token_ids)
    sequences = []
    for sample in samples:
        ids = list[int]()
        mask = list[bool]()
        for _, said, ends in sample:
            read = next(encoded)
            whole = next(encoded)
            if whole[: len(read)] != read:  # a token of both
                whole = read + renderer.encode([said])[0]
            taught = whole[len(read) :] + ends
            if ids and read[:1] == ids[-1:]:  # the end of the turn before
                read = read[1:]
            ids += read + taught
            mask += [False] * len(read) + [True] * len(taught)
        if all(mask):
            raise ValueError(NO_TOKEN)
        sequences.append(TokenSequence(token_ids=tuple(ids), mask=tuple(mask), logprobs=(0.0,) * len(mask)))
    return sequences


def _behind(opening: str, response: str, what: str) -> str:
    if not opening:
        return response
    if response.lstrip().startswith(opening.strip()):
        response = response.lstrip().removeprefix(opening.strip()).lstrip()
    if "</think>" not in opening + response:
        raise ValueError(f"the prompt opens a thought, {what} never closes it: begin it with the thought and </think>")
    return response


def _turns(messages: Sequence[Any], column: str, data: DataConfig) -> list[Message]:
    turns = [{"content": "", **_clean(one)} if isinstance(one, dict) and "role" in one else one for one in messages]
    check_messages(turns, column)
    if {"role": "assistant", "content": ""} in turns:
        raise ValueError(f"column {column!r} has an empty turn of the assistant: remove it")
    last = turns[-1]["role"]
    if last != "assistant":
        advice = f"remove that, add the answer, or name its column in {data.section}.response_column"
        raise ValueError(f"column {column!r} ends with a message of {last!r}, which nothing answers: {advice}")
    return turns


def _clean(value: Any) -> Any:
    """Drop the nulls with which tables fill objects; parse a call's arguments, as vLLM does."""
    if isinstance(value, list):
        return [_clean(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    given = {key: _clean(item) for key, item in value.items() if item is not None}
    if isinstance(given.get("arguments"), str):
        with contextlib.suppress(ValueError):
            given["arguments"] = json.loads(given["arguments"])
    return given
