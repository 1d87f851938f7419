"""Turn rows, a prompt with its response or a conversation, into token ids, and say which are
taught.

Each turn of the assistant is taught, with the token that ends it, as the template writes it last,
behind the messages so far. Where a template writes an earlier turn otherwise, a sample of its own
begins.
"""

import functools
import itertools
import json
import logging
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from hocket.config import DataConfig
from hocket.data.columns import check_characters, checked, column, without_nulls
from hocket.data.prompts import NO_TOKEN, Rendered, in_parts, renderer_of
from hocket.data.renderer import Renderer, opening_of
from hocket.errors import DataError
from hocket.types import Message, TokenSequence

Passage = tuple[str, str, list[int]]  # a text that is read, the turn behind it, and its end
T = TypeVar("T")

log = logging.getLogger(__name__)


def load_demonstrations(data: DataConfig, tokenizer: Any, max_length: int) -> list[TokenSequence]:
    renderer = renderer_of(data, tokenizer)
    end = renderer.end_of_turn()
    names = [data.prompt_column, "messages", data.response_column]

    def render(_: str, columns: Mapping[str, Any]) -> Rendered[list[TokenSequence]]:
        columns, pictures = renderer.split_images(columns)
        samples = _samples(renderer, data, columns, end)
        return texts_of(samples), functools.partial(sequences, renderer, samples, pictures=pictures)

    rows = list(
        itertools.chain.from_iterable(in_parts(data, names, render, renderer.encode_prompts))
    )
    return fitting("demonstrations", rows, [len(row.mask) for row in rows], data, max_length)


def texts_of(samples: Iterable[Sequence[Passage]]) -> list[str]:
    """Return what `sequences` needs encoded."""
    return [text for sample in samples for read, said, _ in sample for text in (read, read + said)]


def fitting(
    what: str, rows: Sequence[T], lengths: Sequence[int], data: DataConfig, max_length: int
) -> list[T]:
    """Return the rows that are short enough, and say how many are not; raise DataError if none
    is."""
    kept = [row for row, length in zip(rows, lengths, strict=True) if length <= max_length]
    too_long = f"more than {max_length} tokens, the model's context or model.max_length; the longest has {max(lengths)}"
    advice = "shorten them, or raise model.max_length, at most to the model's context"
    if not kept:
        raise DataError(f"all rows of {data.source} have {too_long}: {advice}")
    num = len(lengths) - len(kept)
    if num:
        log.warning("left out %d of %d %s with %s: %s", num, len(lengths), what, too_long, advice)
    return kept


def _samples(
    renderer: Renderer, data: DataConfig, columns: Mapping[str, Any], end: int
) -> list[list[Passage]]:
    whole = [
        name for name in (data.prompt_column, "messages") if isinstance(columns.get(name), list)
    ]
    if whole and data.response_column not in columns:
        otherwise = f", or name its column in {data.section}.response_column"
        turns = renderer.with_system_prompt(
            turns_of(renderer, columns[whole[0]], whole[0], otherwise)
        )
        return conversation(renderer, turns, tools_of(columns), end)
    prompt, _ = renderer.prompt(columns, tools_of(columns))
    hint = f", or {data.section}.prompt_column to one of whole conversations{data.otherwise}"
    response = column(columns, data, "response_column", hint)
    return [answered(renderer, prompt, response, data.response_column, end)]


def tools_of(columns: Mapping[str, Any]) -> Any:
    tools = columns.get("tools") or None
    tools = without_nulls(json.loads(tools) if isinstance(tools, str) else tools)
    check_characters(tools, "column 'tools'")
    return tools


def answered(renderer: Renderer, prompt: str, response: Any, name: str, end: int) -> list[Passage]:
    if isinstance(response, list) and len(response) == 1:  # as in TRL's prompts with completions
        (message,) = checked(response, name)
        if message["role"] == "assistant" and message.keys() == {"role", "content"}:
            response = message["content"]
    if not (isinstance(response, str) and response.strip()):
        wanted = "text or one message of the assistant (else join prompt and response as messages)"
        raise ValueError(f"column {name!r} must be {wanted}, got {response!r:.80}")
    renderer.warn_special_tokens(response)
    return [(prompt, _behind(opening_of(prompt), response, f"column {name!r}"), [end])]


def conversation(
    renderer: Renderer, messages: Sequence[Message], tools: Any, end: int, *, first: int = 0
) -> list[list[Passage]]:
    """Return samples that teach the assistant's turns from message `first` on."""
    samples = list[list[Passage]]()
    told = said = ""  # the last sample's text, and with what stands behind its last turn
    for index, message in enumerate(messages):
        if message["role"] != "assistant" or message.get("weight") == 0 or index < first:
            continue
        whole = renderer.render(messages[: index + 1], tools=tools, add_generation_prompt=False)
        if index == 0:
            advice = "mark it with weight: 0, which shows it and does not teach it, or remove it"
            raise ValueError(f"message 0 is the assistant's, and answers nothing: {advice}")
        asked = renderer.render(messages[:index], tools=tools)
        if whole.startswith(asked):
            turn = whole[len(asked) :]
        elif message.keys() <= {
            "role",
            "content",
        }:  # the template has left the turn's own thought out
            turn = (
                _behind(opening_of(asked), message["content"], f"message {index}")
                + renderer.after_turn
            )
        else:
            what = f"the chat template does not write message {index} as it lets the model begin it: {asked[-20:]!r}"
            raise ValueError(f"{what}; write all into its content, or use another template")
        calls = [
            call.get("function", call)
            for call in message.get("tool_calls", ())
            if isinstance(call, dict)
        ]
        if any(str(call.get("name", "")) not in turn for call in calls):
            raise ValueError(
                f"the chat template leaves the tool calls of message {index} out: use another template"
            )
        if not samples or not asked.startswith(said):
            samples.append([])
            told = ""
        body = turn.removesuffix(renderer.after_turn)  # else it has an end of its own: <|call|>
        ends = turn.endswith(renderer.after_turn)
        samples[-1].append((asked[len(told) :], body, [end] if ends else []))
        told = asked + body
        said = asked + turn
    if not samples:
        raise ValueError(
            "no turn of the assistant is taught, as all have the weight 0: remove the row"
        )
    return samples


def sequences(
    renderer: Renderer,
    samples: Sequence[Sequence[Passage]],
    token_ids: Iterable[list[int]],
    pictures: Sequence[Any] = (),
) -> list[TokenSequence]:
    """Encode each turn behind what is read before it: alone, it might begin with a space."""
    encoded = iter(token_ids)
    found = []
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
        ids, images = renderer.insert_images(ids, pictures, whole=sample is samples[-1])
        for image in images:
            mask[image.start : image.start + 1] = [False] * image.length
        zeros = (0.0,) * len(mask)
        found.append(
            TokenSequence(
                token_ids=array("I", ids), mask=tuple(mask), logprobs=zeros, images=images
            )
        )
    return found


def _behind(opening: str, response: str, what: str) -> str:
    if not opening:
        return response
    if response.lstrip().startswith(opening.strip()):
        response = response.lstrip().removeprefix(opening.strip()).lstrip()
    if "</think>" not in opening + response:
        raise ValueError(
            f"the prompt opens a thought, {what} never closes it: begin it with the thought and </think>"
        )
    return response


def turns_of(renderer: Renderer, messages: Any, name: str, otherwise: str = "") -> list[Message]:
    """Return the checked messages of a conversation that ends with the assistant's."""
    turns = checked(messages, name, renderer.contents)
    last = turns[-1]["role"]
    if last != "assistant":
        advice = f"remove that, or add the answer{otherwise}"
        raise ValueError(
            f"column {name!r} ends with a message of {last!r}, which nothing answers: {advice}"
        )
    return turns
