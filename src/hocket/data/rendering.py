"""One row as the text that the model sees, and that text as token ids.

The chat template writes every special token itself, the beginning-of-sequence token included, so its text is encoded
without adding any; plain text gets the one that the tokenizer puts before text, unless it starts with it.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from hocket.config import DataConfig
from hocket.data.sources import Row
from hocket.errors import DataError
from hocket.types import Message, Prompt

PROBE = "hocket-0123456789"
"""What the model says in made-up turns, by which the template's text around it is found."""


class TooLongError(ValueError):
    """A text has more tokens than it may."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A checked row, `rendered` to text but not yet to tokens. `where` is its place; the rest is as in Prompt."""

    where: str
    id: str
    rendered: str
    messages: tuple[Message, ...] | None
    text: str
    answer: str | None
    difficulty: float | None
    meta: Mapping[str, Any]

    def prompt(self, token_ids: Sequence[int]) -> Prompt:
        """Returns the prompt with these tokens."""
        return Prompt(
            id=self.id,
            token_ids=tuple(token_ids),
            messages=self.messages,
            text=self.text,
            answer=self.answer,
            difficulty=self.difficulty,
            meta=self.meta,
        )


class Renderer:
    """Renders the rows of one data section.

    Args:
        tokenizer: a Hugging Face tokenizer.
        tools: kept as an attribute; functions that the chat template shows to the model, as OpenAI's API describes one.

    Raises:
        DataError: the section asks for what the tokenizer lacks, or contradicts itself.
    """

    def __init__(self, data: DataConfig, tokenizer: Any, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        if data.chat_template and tokenizer.chat_template is None:
            raise DataError("the tokenizer has no chat template; set data.chat_template: false for plain text")
        if data.system_prompt is not None and not data.chat_template:
            raise DataError("data.system_prompt needs data.chat_template: true")
        if tools and not data.chat_template:
            raise DataError("tools are shown by the chat template; set data.chat_template: true")
        self._data = data
        self.tools = tuple(tools)
        self._tokenizer = tokenizer
        self._pattern = _compile(data)

    def draft(self, row: Row, *, with_response: bool = False) -> Draft:
        """Checks and renders one row. Raises ValueError that says what is wrong with it.

        Args:
            with_response: the row is a demonstration: it needs a response, kept in `meta`, and no answer.
        """
        if row.values is None:
            raise ValueError(row.error)
        data = self._data
        value = _column(row.values, data.prompt_column)
        messages = self._messages(value)
        if with_response and not (isinstance(response := _column(row.values, data.response_column), str) and response):
            raise ValueError(f"column {data.response_column!r} must be text, got {_shorten(response)}")
        return Draft(
            where=row.where,
            id=row.id,
            rendered=self.render(messages) if messages is not None else value,
            messages=messages,
            text=value if messages is None else _last_user_text(messages),
            answer=None if with_response else self._answer(row.values),
            difficulty=None if with_response else self._difficulty(row.values),
            meta={k: v for k, v in row.values.items() if k not in (data.prompt_column, data.answer_column)},
        )

    def encode_prompts(self, rendered: Sequence[str]) -> list[list[int]]:
        """Returns the token ids of rendered prompts."""
        token_ids = self.encode(rendered)
        if self._data.chat_template:
            return token_ids
        bos = self._tokenizer.bos_token_id
        if bos is None or self._tokenizer("")["input_ids"][:1] != [bos]:
            return token_ids
        return [ids if ids[:1] == [bos] else [bos, *ids] for ids in token_ids]

    def encode(self, texts: Sequence[str], *, at_most: float = math.inf) -> list[list[int]]:
        """Returns the token ids of each text, with no special token that is not written in it.

        Args:
            at_most: a text that is too long for so few tokens is refused before that takes seconds.

        Raises:
            TooLongError: there is such a text; one that is not refused may still have more tokens.
        """
        if not texts:
            return []
        if any(len(text) > at_most * self._most_characters for text in texts):
            raise TooLongError(f"a text has more than {at_most} tokens")
        encoded: list[list[int]] = self._tokenizer(list(texts), add_special_tokens=False)["input_ids"]
        return encoded

    def render(self, messages: Sequence[Message]) -> str:
        """Returns the chat as text, up to where the model's next turn begins. Raises ValueError where it can't be."""
        from jinja2 import TemplateError

        if not self._data.chat_template:
            raise ValueError("messages need data.chat_template: true; without one there is plain text alone")
        try:
            text: str = self._tokenizer.apply_chat_template(
                list(messages), tools=list(self.tools) or None, add_generation_prompt=True, tokenize=False
            )
        except TemplateError as error:
            raise ValueError(f"the chat template refuses the messages: {error}") from error
        return text

    @functools.cached_property
    def _most_characters(self) -> int:
        """How many characters a token stands for at the most; of four, a tokenizer may compose or leave out three."""
        return 4 * max(map(len, self._tokenizer.get_vocab()))  # a byte is written as at least one character

    def following(self, messages: Sequence[Message], *, ended: int | None, at_most: float = math.inf) -> list[int]:
        """Returns the tokens between a turn of the model and its next one, in which it is told `messages`.

        They are what the template writes after a made-up turn, so that nothing of the real one is rendered or encoded
        again: a template may rewrite earlier turns, and the model need not write a text as the tokenizer would.

        Args:
            ended: the token with which the model ended its turn, None where it was cut off: what ends a turn in the
                template is then added.
            at_most: as for `encode`.

        Raises:
            ValueError: the template can't render them; TooLongError, which is one: see `encode`.
        """
        turn = [{"role": "user", "content": "?"}, {"role": "assistant", "content": PROBE}]
        _, found, after = self.render([*turn, *messages]).partition(PROBE)
        if not found:
            raise ValueError("the chat template does not show what the model said before")
        (token_ids,) = self.encode([after], at_most=at_most)
        return token_ids[1:] if token_ids[:1] == [ended] else token_ids

    def end_of_turn(self) -> int:
        """Returns the token with which the model ends its answer: the chat template's own, else the tokenizer's EOS."""
        eos: int | None = self._tokenizer.eos_token_id
        if self._data.chat_template:
            messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": PROBE}]
            text = self._tokenizer.apply_chat_template(messages, tokenize=False)
            after = self.encode([text.rpartition(PROBE)[2]])[0][:1]
            if after and self._tokenizer.decode(after, skip_special_tokens=True) == "":
                return after[0]
        if eos is None:
            raise DataError("the tokenizer has no end-of-sequence token, so that no response could ever end")
        return eos

    def _messages(self, value: Any) -> tuple[Message, ...] | None:
        """Returns the chat of a prompt column's value; None where it stays plain text."""
        column = self._data.prompt_column
        if isinstance(value, str):
            if not value.strip():
                raise ValueError(f"column {column!r} is empty")
            if not self._data.chat_template:
                return None
            system = self._data.system_prompt
            user = {"role": "user", "content": value}
            return (user,) if system is None else ({"role": "system", "content": system}, user)
        if not isinstance(value, list):
            raise ValueError(f"column {column!r} must be text or a list of messages, got {_shorten(value)}")
        if not self._data.chat_template:
            raise ValueError(f"column {column!r} is a list of messages, which needs data.chat_template: true")
        if not value:
            raise ValueError(f"column {column!r} is empty")
        for index, message in enumerate(value):
            if not isinstance(message, dict) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
                raise ValueError(
                    f"message {index} of column {column!r} must be {{'role': text, 'content': text}}, "
                    f"got {_shorten(message)}"
                )
        if value[-1]["role"] == "assistant":
            raise ValueError(f"column {column!r} ends with an assistant message: there is nothing left to answer")
        return tuple(value)

    def _answer(self, values: Mapping[str, Any]) -> str | None:
        column = self._data.answer_column
        if column is None:
            return None
        if column not in values:
            raise ValueError(f"{_no_column(values, column)}; data.answer_column: null where there is no answer")
        value = values[column]
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise ValueError(f"column {column!r} must be text or a number, got {_shorten(value)}")
        answer = str(value)
        if not answer.strip():
            raise ValueError(f"column {column!r} is empty")
        if self._pattern is None:
            return answer
        match = self._pattern.search(answer)
        if match is None or not (match[1] or "").strip():
            raise ValueError(
                f"data.answer_pattern {self._pattern.pattern!r} finds no answer in column {column!r}: "
                f"{_shorten(answer)}"
            )
        return match[1].strip()

    def _difficulty(self, values: Mapping[str, Any]) -> float | None:
        column = self._data.difficulty_column
        if column is None:
            return None
        value = _column(values, column)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"column {column!r} (data.difficulty_column) must be a number, got {_shorten(value)}")
        return float(value)


def _column(values: Mapping[str, Any], name: str) -> Any:
    if name not in values:
        raise ValueError(_no_column(values, name))
    return values[name]


def _no_column(values: Mapping[str, Any], name: str) -> str:
    return f"no column {name!r}, only {', '.join(map(repr, values)) or 'an empty object'}"


def _last_user_text(messages: Sequence[Message]) -> str:
    texts = [message["content"] for message in messages if message["role"] == "user"]
    return str(texts[-1] if texts else messages[-1]["content"])


def _compile(data: DataConfig) -> re.Pattern[str] | None:
    if data.answer_pattern is None:
        return None
    if data.answer_column is None:
        raise DataError("data.answer_pattern needs data.answer_column")
    try:
        pattern = re.compile(data.answer_pattern)
    except re.error as error:
        raise DataError(f"data.answer_pattern {data.answer_pattern!r} is no regular expression: {error}") from error
    if pattern.groups < 1:
        raise DataError(f"data.answer_pattern {data.answer_pattern!r} needs a group (...) around the answer")
    return pattern


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
