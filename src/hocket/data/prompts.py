"""Turn rows into prompts: each row is checked, rendered and encoded exactly once.

The chat template writes every special token itself, the beginning-of-sequence token included, so its text is encoded
without adding any; plain text gets the one that the tokenizer puts before text, unless it starts with it.
"""

import functools
import itertools
import json
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from tqdm import tqdm

from hocket.config import DataConfig
from hocket.data import cache
from hocket.data import tokenizer as tokenizers
from hocket.data.sources import identity, read_rows
from hocket.errors import DataError
from hocket.types import Message, Prompt

PROBE = "hocket-0123456789"  # the text of a made-up model turn, to find the template's text around it
TURN = ({"role": "user", "content": "?"}, {"role": "assistant", "content": PROBE})
NUM_SHOWN = 5  # rows that an error names
PART = 1024  # rows that are encoded together
NO_TOKEN = "the tokenizer makes no token of it"
OPENING = re.compile(r"<think>\s*(</think>\s*)?\Z")  # at the end of a prompt

Options = Mapping[str, Any] | None  # of the chat template; None: those of the section

T = TypeVar("T")


class TooLongError(ValueError):
    """A text has more tokens than allowed."""


def opening_of(prompt: str) -> str:
    """Return the thought that a prompt ends with: opened, or opened and closed again; "" without one."""
    found = OPENING.search(prompt)
    return found[0] if found else ""


def load_prompts(
    data: DataConfig, tokenizer: Any, *, max_prompt_tokens: int, tools: Sequence[Mapping[str, Any]] = ()
) -> tuple[cache.Prompts | cache.KeptPrompts, list[int]]:
    """Return the prompts of `data.source` that are short enough, and the number of tokens of each one that is there.

    None is cut. Prompts of a large source come from the cache. Raise DataError for a bad row.
    """
    longest = min(max_prompt_tokens, data.max_prompt_tokens or max_prompt_tokens)
    renderer = Renderer(data, tokenizer, tools)
    if any(token.special and token.content == "</think>" for token in tokenizer.added_tokens_decoder.values()):
        advice = 'set "special": false for <think> and </think> in tokenizer.json and tokenizer_config.json'
        raise DataError(f"the tokenizer has </think> as a special token: no reward would see a thought end; {advice}")
    if opening := renderer.missing_opening():
        advice = f"{{% if add_generation_prompt %}}{{{{ {opening!r} }}}}{{% endif %}}"
        what = f"the chat template begins the model's turn with {opening!r}, but ends no prompt so"
        raise DataError(f"{what}: the model would have to write that itself; add {advice} at the end of the template")

    def origin() -> tuple[object, ...] | None:
        content, template = identity(data), tokenizer.chat_template
        if content is None:
            return None
        settings = data.model_dump_json(exclude={"max_prompt_tokens"})
        today = time.strftime("%F") if "strftime_now" in str(template) else None
        return content, settings, template, today, list(tools), tokenizers.fingerprint(tokenizer)

    return cache.load(origin, longest, lambda: _prompts(data, renderer))


def _prompts(data: DataConfig, renderer: "Renderer") -> Iterator[Prompt]:
    is_file = not data.source.startswith(("task:", "hf:"))
    for rendered, problems in in_parts(data, renderer.row):
        token_ids = renderer.encode_prompts([text for _, (text, _) in rendered])
        for (place, (_, fields)), ids in zip(rendered, token_ids, strict=True):
            if not ids:
                problems[place] = NO_TOKEN
            yield Prompt(id=Path(place).name if is_file else place, token_ids=tuple(ids), **fields)


def in_parts(
    data: DataConfig, render: Callable[[Mapping[str, Any]], T]
) -> Iterator[tuple[list[tuple[str, T]], dict[str, str]]]:
    """Yield (place, rendered row) in parts, as encoding all at once takes gigabytes, and what is wrong, by place.

    Raise DataError at the end for the rows that `render` raises a ValueError for, or the caller has added.
    """
    num_rows, problems = 0, dict[str, str]()
    rows = iter(tqdm(read_rows(data), f"encoding {data.source}", unit=" rows", delay=2, mininterval=5))
    while part := list(itertools.islice(rows, PART)):
        rendered, num_rows = [], num_rows + len(part)
        for place, columns in part:
            try:
                rendered.append((place, render(columns_of(columns))))
            except ValueError as error:
                problems[place] = str(error)
        if not problems:  # else go on, to name the others
            yield rendered, problems
    if problems:
        unit = "line" if data.source.endswith(".jsonl") else "row, from 0"
        what = f"{len(problems)} of {num_rows} rows of {data.source}"
        lines = [f"  {place}: {problem}" for place, problem in problems.items()]
        if len(lines) > NUM_SHOWN:
            lines[NUM_SHOWN:] = [f"  ... and {len(lines) - NUM_SHOWN} more"]
        advice = "; repair or remove them" if len(problems) < num_rows else ""
        raise DataError("\n".join([f"{what} can't be used{advice} ({unit}):", *lines]))
    if not num_rows:
        raise DataError(f"{data.source} has no rows")


def columns_of(row: Any) -> Mapping[str, Any]:
    """Parse a row of a file. Raise ValueError if it is no JSON object."""
    columns = json.loads(row) if isinstance(row, bytes) else row
    if not isinstance(columns, Mapping):
        raise ValueError(f"must be a JSON object, got {type(columns).__name__}")
    return columns


def check_messages(messages: Sequence[Any], column: str) -> None:
    """Raise ValueError where one is no message."""
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
            what = f"message {index} of column {column!r}"
            raise ValueError(f"{what} must be {{'role': text, 'content': text}}, got {message!r:.80}")


class Renderer:
    """Render rows and messages with the chat template of a Hugging Face tokenizer, and encode them."""

    def __init__(self, data: DataConfig, tokenizer: Any, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        if data.chat_template and tokenizer.chat_template is None:
            advice = f"put one as chat_template.jinja into its folder, or set {data.section}.chat_template=false"
            raise DataError(f"the tokenizer of the model has no chat template: {advice} for plain text")
        if tools and not data.chat_template:
            raise DataError("tools are shown by the chat template; set data.chat_template: true")
        self._data, self._tokenizer = data, tokenizer
        self._tools = list(tools) or None

    def row(self, columns: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        """Return a row's text and Prompt fields. Raise ValueError that names its fault."""
        data = self._data
        text, messages = self.prompt(columns)
        asked = [message["content"] for message in messages or () if message["role"] == "user"]
        return text, {
            "messages": messages,
            "text": text if messages is None else (asked or [messages[-1]["content"]])[-1],
            "opening": opening_of(text),
            "options": data.chat_template_kwargs,
            "answer": self._answer(columns),
            "meta": {k: v for k, v in columns.items() if k not in (data.prompt_column, data.answer_column)},
        }

    def prompt(self, columns: Mapping[str, Any]) -> tuple[str, tuple[Message, ...] | None]:
        """Return a row's prompt, and the chat that it was rendered from; None for plain text."""
        value = self.column(columns, "prompt_column")
        messages = self._messages(value)
        return value if messages is None else self.render(messages), messages

    def encode_prompts(self, texts: Sequence[str]) -> list[list[int]]:
        token_ids = self.encode(texts)
        bos = self._tokenizer.bos_token_id
        if self._data.chat_template or bos is None or self._tokenizer("")["input_ids"][:1] != [bos]:
            return token_ids
        return [ids if ids[:1] == [bos] else [bos, *ids] for ids in token_ids]

    def encode(self, texts: Sequence[str], *, at_most: float = math.inf) -> list[list[int]]:
        """Return each text's token ids, no special token added; raise TooLongError early if one exceeds `at_most`."""
        if any(len(text) > at_most * self._most_characters for text in texts):
            raise TooLongError(f"a text has more than {at_most} tokens")
        encoded: list[list[int]] = self._tokenizer(list(texts), add_special_tokens=False)["input_ids"]
        return encoded

    def render(self, messages: Sequence[Message], options: Options = None, **more: Any) -> str:
        """Return the chat as text, up to where the model's next turn begins. Raise ValueError if it can't be.

        `more` are options besides: the tools of these messages, or no generation prompt.
        """
        from jinja2 import TemplateError

        if not self._data.chat_template:
            raise ValueError("messages need data.chat_template: true; without one there is plain text alone")
        given = {"tools": self._tools, "add_generation_prompt": True, "tokenize": False}
        given |= self._data.chat_template_kwargs if options is None else options
        try:
            text: str = self._tokenizer.apply_chat_template(list(messages), **given | more)
        # A template is a small program: besides its own refusals it fails in these ways on what it did not expect.
        except (TemplateError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"the chat template refuses the messages: {error}") from error
        return text

    def missing_opening(self) -> str:
        """Return what the template writes before a turn of the model, if it ignores `add_generation_prompt`."""
        try:
            asked, plain = (self.render(TURN[:1], add_generation_prompt=opens) for opens in (True, False))
            before, found, _ = self.render(TURN, add_generation_prompt=False).partition(PROBE)
        except ValueError:  # without a template, or where it takes no such chat: the rows will tell
            return ""
        opening = before.removeprefix(asked)
        return opening if found and asked == plain and opening != before and opening.strip() else ""

    @functools.cached_property
    def _most_characters(self) -> int:
        # A byte is written as at least one character; of four, a tokenizer may compose or leave out three.
        return 4 * max(map(len, self._tokenizer.get_vocab()))

    def following(
        self, messages: Sequence[Message], options: Options = None, *, ended: int | None, at_most: float = math.inf
    ) -> list[int]:
        """Return the tokens between a turn of the model and its next one, in which it receives `messages`.

        They are what the template writes after a made-up turn, so that nothing of the real one is rendered or encoded
        again: a template may rewrite earlier turns, and the model need not write a text as the tokenizer would.
        `ended` is the token with which the model ended its turn; None if it was cut off, and the template's own end of
        turn is added. Raise ValueError if the template can't render them, TooLongError as `encode` does.
        """
        _, found, after = self.render([*TURN, *messages], options).partition(PROBE)
        if not found:
            raise ValueError("the chat template does not show what the model said before")
        (token_ids,) = self.encode([after], at_most=at_most)
        return token_ids[1:] if token_ids[:1] == [ended] else token_ids

    @functools.cached_property
    def after_turn(self) -> str:
        """What the chat template writes after a last turn of the model: its end, and maybe a line break."""
        return self.render(TURN, add_generation_prompt=False).rpartition(PROBE)[2] if self._data.chat_template else ""

    def end_of_turn(self) -> int:
        """Return the token with which the model ends its answer: the chat template's own, else the tokenizer's EOS."""
        eos: int | None = self._tokenizer.eos_token_id
        after = self.encode([self.after_turn])[0][:1]
        if after and self._tokenizer.decode(after, skip_special_tokens=True) == "":
            return after[0]
        if eos is None:
            raise DataError("the tokenizer has no end-of-sequence token, so that no response could ever end")
        return eos

    def _messages(self, value: Any) -> tuple[Message, ...] | None:
        """Return the chat of a prompt column's value; None if it stays plain text."""
        column, system = self._data.prompt_column, self._data.system_prompt
        if not isinstance(value, str | list):
            raise ValueError(f"column {column!r} must be text or a list of messages, got {value!r:.80}")
        if not (value.strip() if isinstance(value, str) else value):
            raise ValueError(f"column {column!r} is empty")
        if isinstance(value, str):
            first = () if system is None else ({"role": "system", "content": system},)
            return (*first, {"role": "user", "content": value}) if self._data.chat_template else None
        check_messages(value, column)
        if value[-1]["role"] == "assistant":
            raise ValueError(f"column {column!r} ends with an assistant message: there is nothing left to answer")
        return tuple(value)

    def _answer(self, columns: Mapping[str, Any]) -> str | None:
        column, pattern = self._data.answer_column, self._data.answer_pattern
        if column is None:
            return None
        value = self.column(columns, "answer_column", ", or to null where there is no answer")
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise ValueError(f"column {column!r} must be text or a number, got {value!r:.80}")
        answer = str(value)
        if not answer.strip():
            raise ValueError(f"column {column!r} is empty")
        if pattern is None:
            return answer
        match = pattern.search(answer)
        if match is None or not (match[1] or "").strip():
            what = f"data.answer_pattern {pattern.pattern!r} finds no answer in column {column!r}"
            raise ValueError(f"{what}: {answer!r:.80}")
        return match[1].strip()

    def column(self, columns: Mapping[str, Any], setting: str, hint: str = "") -> Any:
        """Return the value of the column that `setting` names; without it, raise ValueError with those there are."""
        name, there = getattr(self._data, setting), ", ".join(map(repr, columns)) or "an empty object"
        if name not in columns:
            advice = f"set {self._data.section}.{setting} to one of these{hint}"
            raise ValueError(f"no column {name!r}, only {there}: {advice}")
        return columns[name]
