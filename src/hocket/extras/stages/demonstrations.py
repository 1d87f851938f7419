"""Encode demonstrations, and mark the tokens that are taught.

A row is a prompt with its response, or a conversation. Each turn of the assistant is taught, with
the token that ends it, as the template writes it in the last place. Where the template writes an
earlier turn differently from then on, the next turn begins a new sample.
"""

import functools
import itertools
import json
import logging
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from hocket.config import DataConfig
from hocket.data.columns import check_characters, checked, column, without_nulls
from hocket.data.prompts import NO_TOKEN, Rendered, in_parts, renderer_of
from hocket.data.renderer import Renderer, opening_of
from hocket.errors import DataError
from hocket.types import Message, TokenSequence

T = TypeVar("T")

log = logging.getLogger(__name__)


class TaughtTurn(NamedTuple):
    """A turn of the assistant that is taught, with the text that the model reads before it."""

    context: str  # from the last turn of the sample to this one; of the first: the whole prompt
    text: str
    end: list[int]  # the tokens that end the turn; []: its text has an end of its own


def load_demonstrations(data: DataConfig, tokenizer: Any, max_length: int) -> list[TokenSequence]:
    """Load the rows of data.source as sequences of at most `max_length` tokens."""
    renderer = renderer_of(data, tokenizer)
    end = renderer.end_of_turn()
    names = [data.prompt_column, "messages", data.response_column]

    def render(_: str, columns: Mapping[str, Any]) -> Rendered[list[TokenSequence]]:
        columns, pictures = renderer.split_images(columns)
        samples = _samples(renderer, data, columns, end)
        return texts_of(samples), functools.partial(sequences, renderer, samples, pictures=pictures)

    of_rows = in_parts(data, names, render, renderer.encode_prompts)
    rows = list(itertools.chain.from_iterable(of_rows))
    return fitting("demonstrations", rows, [len(row.mask) for row in rows], data, max_length)


def texts_of(samples: Iterable[Sequence[TaughtTurn]]) -> list[str]:
    """Return the texts whose ids `sequences` needs: each context, without and with its turn."""
    texts = []
    for sample in samples:
        for turn in sample:
            texts += [turn.context, turn.context + turn.text]
    return texts


def fitting(
    name: str, rows: Sequence[T], lengths: Sequence[int], data: DataConfig, max_length: int
) -> list[T]:
    """Return the rows that are short enough, and log how many are not.

    `name` is what the log calls them. Raise DataError if all are too long.
    """
    kept = [row for row, length in zip(rows, lengths, strict=True) if length <= max_length]
    too_long = (
        f"more than {max_length} tokens, the model's context or model.max_length; "
        f"the longest has {max(lengths)}"
    )
    advice = "shorten them, or raise model.max_length, at most to the model's context"
    if not kept:
        raise DataError(f"all rows of {data.source} have {too_long}: {advice}")
    num_long = len(lengths) - len(kept)
    if num_long:
        counts = f"{num_long} of {len(lengths)} {name}"
        log.warning("left out %s with %s: %s", counts, too_long, advice)
    return kept


def _samples(
    renderer: Renderer, data: DataConfig, columns: Mapping[str, Any], end: int
) -> list[list[TaughtTurn]]:
    """Render a row as samples, each with the turns that it teaches."""
    chats = [
        name for name in (data.prompt_column, "messages") if isinstance(columns.get(name), list)
    ]
    tools = tools_of(columns)
    if chats and data.response_column not in columns:
        otherwise = f", or name its column in {data.section}.response_column"
        messages = turns_of(renderer, columns[chats[0]], chats[0], otherwise)
        return conversation(renderer, renderer.with_system_prompt(messages), tools, end)
    prompt, _ = renderer.prompt(columns, tools)
    hint = f", or {data.section}.prompt_column to one of whole conversations{data.otherwise}"
    response = column(columns, data, "response_column", hint)
    return [answered(renderer, prompt, response, data.response_column, end)]


def tools_of(columns: Mapping[str, Any]) -> Any:
    """Read the tool schemas of a row, which may be JSON; None without any."""
    tools = columns.get("tools") or None
    tools = without_nulls(json.loads(tools) if isinstance(tools, str) else tools)
    check_characters(tools, "column 'tools'")
    return tools


def answered(
    renderer: Renderer, prompt: str, response: Any, name: str, end: int
) -> list[TaughtTurn]:
    """Return the sample of a rendered prompt and its response, from the column `name`."""
    if isinstance(response, list) and len(response) == 1:  # as in TRL's prompts with completions
        (message,) = checked(response, name)
        if message["role"] == "assistant" and message.keys() == {"role", "content"}:
            response = message["content"]
    if not (isinstance(response, str) and response.strip()):
        wanted = "text or one message of the assistant (else join prompt and response as messages)"
        raise ValueError(f"column {name!r} must be {wanted}, got {response!r:.80}")
    renderer.warn_special_tokens(response)
    text = _after_opening(opening_of(prompt), response, f"column {name!r}")
    return [TaughtTurn(prompt, text, [end])]


def conversation(
    renderer: Renderer, messages: Sequence[Message], tools: Any, end: int, *, first: int = 0
) -> list[list[TaughtTurn]]:
    """Return samples that teach the assistant's turns from message `first` on."""
    samples = list[list[TaughtTurn]]()
    # The last sample's text up to its last turn, and with what the template writes after that.
    before = closed = ""
    for index, message in enumerate(messages):
        if message["role"] != "assistant" or message.get("weight") == 0 or index < first:
            continue
        prompt, written = _rendered_turn(renderer, messages, index, tools)
        if not samples or not prompt.startswith(closed):  # an earlier turn was rewritten
            samples.append([])
            before = ""
        text = written.removesuffix(renderer.after_turn)
        has_usual_end = written.endswith(renderer.after_turn)  # a tool call may have its own
        context = prompt[len(before) :]
        samples[-1].append(TaughtTurn(context, text, [end] if has_usual_end else []))
        before = prompt + text
        closed = prompt + written
    if not samples:
        raise ValueError(
            "no turn of the assistant is taught, as all have the weight 0: remove the row"
        )
    return samples


def _rendered_turn(
    renderer: Renderer, messages: Sequence[Message], index: int, tools: Any
) -> tuple[str, str]:
    """Render the prompt before message `index`, and that message as a turn of the assistant.

    Raise ValueError where the template can't show the turn whole.
    """
    message = messages[index]
    whole = renderer.render(messages[: index + 1], tools=tools, add_generation_prompt=False)
    if index == 0:
        advice = "mark it with weight: 0, which shows it and does not teach it, or remove it"
        raise ValueError(f"message 0 is the assistant's, and answers nothing: {advice}")
    prompt = renderer.render(messages[:index], tools=tools)
    if whole.startswith(prompt):
        turn = whole[len(prompt) :]
    elif message.keys() <= {"role", "content"}:
        # The template leaves out the thought that its own prompt opens: take it from the message.
        turn = _after_opening(opening_of(prompt), message["content"], f"message {index}")
        turn += renderer.after_turn
    else:
        raise ValueError(
            f"the chat template does not write message {index} as it lets the model begin it: "
            f"{prompt[-20:]!r}; write all into its content, or use another template"
        )
    for call in message.get("tool_calls", ()):
        if isinstance(call, dict):
            function = call.get("function", call)
            if str(function.get("name", "")) not in turn:
                raise ValueError(
                    f"the chat template leaves the tool calls of message {index} out: "
                    "use another template"
                )
    return prompt, turn


def sequences(
    renderer: Renderer,
    samples: Sequence[Sequence[TaughtTurn]],
    token_ids: Iterable[list[int]],
    pictures: Sequence[Any] = (),
) -> list[TokenSequence]:
    """Join the turns of each sample to one sequence, whose mask marks the tokens that are taught.

    `token_ids` are those of the texts that `texts_of` returns. A turn's own are the rest behind
    its context: encoded alone, it might begin with a space.
    """
    encoded = iter(token_ids)
    joined = []
    for sample in samples:
        ids = list[int]()
        mask = list[bool]()
        for turn in sample:
            context = next(encoded)
            whole = next(encoded)
            if whole[: len(context)] != context:  # a token spans the boundary
                whole = context + renderer.encode([turn.text])[0]
            taught = whole[len(context) :] + turn.end
            if ids and context[:1] == ids[-1:]:  # the end of the turn before, which is taught
                context = context[1:]
            ids += context + taught
            mask += [False] * len(context) + [True] * len(taught)
        if all(mask):
            raise ValueError(NO_TOKEN)
        ids, images = renderer.insert_images(ids, pictures, whole=sample is samples[-1])
        for image in images:
            mask[image.start : image.start + 1] = [False] * image.length
        zeros = (0.0,) * len(mask)
        sequence = TokenSequence(
            token_ids=array("I", ids), mask=tuple(mask), logprobs=zeros, images=images
        )
        joined.append(sequence)
    return joined


def _after_opening(opening: str, response: str, name: str) -> str:
    """Return a response as it continues a prompt that ends with `opening`, a thought that began.

    Raise ValueError where nothing closes the thought; `name` is what the message calls the
    response.
    """
    if not opening:
        return response
    if response.lstrip().startswith(opening.strip()):
        response = response.lstrip().removeprefix(opening.strip()).lstrip()
    if "</think>" not in opening + response:
        raise ValueError(
            f"the prompt opens a thought, {name} never closes it: begin it with the thought and "
            "</think>"
        )
    return response


def turns_of(renderer: Renderer, messages: Any, name: str, otherwise: str = "") -> list[Message]:
    """Check the messages of a conversation, which must end with the assistant's.

    `name` is their column, and `otherwise` more advice for a row that ends with another role.
    """
    turns = checked(messages, name, renderer.contents)
    last = turns[-1]["role"]
    if last != "assistant":
        advice = f"remove that, or add the answer{otherwise}"
        raise ValueError(
            f"column {name!r} ends with a message of {last!r}, which nothing answers: {advice}"
        )
    return turns
