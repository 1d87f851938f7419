"""Render rows and messages to text, and encode it."""

import contextlib
import copy
import functools
import json
import logging
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from hocket.common.registry import Registry
from hocket.config import DataConfig
from hocket.data.columns import answer_of, checked, column, unmarked
from hocket.data.template import ASKED, DAY, PROBE, SYSTEM, TURN, shows
from hocket.errors import DataError
from hocket.types import Image, Message, text_of

PICTURES = ("image", "images")  # columns
OPENING = re.compile(r"<think>\s*(</think>\s*)?\Z")
TOOLS_NEED_TEMPLATE = "tools are shown by the chat template; set data.chat_template: true"
ToolSchemas = Sequence[Mapping[str, Any]]
Options = Mapping[str, Any] | None  # of the chat template; None: those of the section
Images = tuple[Image, ...]

log = logging.getLogger(__name__)


class TooLongError(ValueError):
    """A text has more tokens than allowed."""


def opening_of(prompt: str) -> str:
    """Return the thought, open or closed, that a prompt ends with; "" without one."""
    found = OPENING.search(prompt)
    return found[0] if found else ""


def _as_read(message: Message) -> Message:
    """Return a message as templates read it: without a mark, arguments of calls as objects, as vLLM does."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return unmarked(message)
    calls = copy.deepcopy(calls)
    for call in calls:
        function = call.get("function", call) if isinstance(call, dict) else {}
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            with contextlib.suppress(ValueError):
                function["arguments"] = json.loads(function["arguments"])
    return {**unmarked(message), "tool_calls": calls}


RENDERERS: Registry[Callable[..., "Renderer"]] = Registry("renderer", vision="hocket.data.vision")
renderer = RENDERERS.register
"""Decorator of a subclass of Renderer, which `data.renderer` then names; made of (data, tokenizer, tools, options).

Example: a plugin that writes turns as a base model may know them from forums.

    @renderer("forum")
    class Forum(PlainText):
        def __init__(self, data: DataConfig, tokenizer: Any, tools: ToolSchemas, *, sign: str = "###") -> None:
            self._sign = sign
            super().__init__(data, tokenizer, tools)

        def render(self, messages: Sequence[Message], options: Options = None, **more: Any) -> str:
            turns = [f"{self._sign} {message['role']}: {message['content']} " for message in messages]
            return "".join([*turns, f"{self._sign} assistant:"])

        def asked(self, text: str, **more: Any) -> tuple[str, tuple[Message, ...]]:
            messages = self.chat(text)
            return self.render(messages), messages
"""


@renderer("chat")
class Renderer:
    """Render rows and messages with a chat template, which writes all special tokens, and encode them."""

    contents: tuple[type, ...] = (str,)  # of messages
    placeholder: int | None = None  # the token that stands for an image

    def __init__(self, data: DataConfig, tokenizer: Any, tools: ToolSchemas) -> None:
        self._data = data
        self._tokenizer = tokenizer
        self._tools = list(tools) or None
        self._warnings: set[str] = set()
        self.check()

    def check(self) -> None:
        if self._tokenizer.chat_template is None:
            setting = f"{self._data.section}.chat_template=false"
            advice = f"put one as chat_template.jinja into its folder, or set {setting}"
            raise DataError(f"the tokenizer has no chat template: {advice} for plain text")
        try:
            self.render(self.chat("?"))
        except ValueError as error:
            if self._data.system_prompt is not None and not self._tools:
                setting = f"{self._data.section}.system_prompt"
                raise DataError(
                    f"{setting}: {error}; leave it out, or write it into the prompts"
                ) from error
            if self._tools:  # else the rows tell it
                raise DataError(str(error)) from error

    def row(self, columns: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        """Return a row's text and the fields of its Prompt."""
        data = self._data
        text, messages = self.prompt(columns)
        if columns.get("tools"):
            fact = f"the column 'tools' of {data.source} is for rewards and environments"
            self._warn(
                f"{fact}: the model is shown the tools of env.tools alone, which the environment can call"
            )
        said = columns[data.prompt_column]
        if messages is not None:
            said = text_of(
                next((m for m in reversed(messages) if m["role"] == "user"), messages[-1])[
                    "content"
                ]
            )
        return text, {
            "messages": messages,
            "text": said,
            "opening": opening_of(text),
            "options": data.template_options,
            "answer": answer_of(columns, data),
            "meta": {
                k: v
                for k, v in columns.items()
                if k not in (data.prompt_column, data.answer_column)
            },
        }

    def prompt(
        self, columns: Mapping[str, Any], tools: Any = None
    ) -> tuple[str, tuple[Message, ...] | None]:
        """Return a row's prompt as text, and the chat that it renders; None: plain text.

        tools: the row's own, which are shown beside no others.
        """
        shown = {"tools": tools} if tools else {}
        name = self._data.prompt_column
        value = column(columns, self._data, "prompt_column")
        if isinstance(value, str):
            if not value.strip():
                raise ValueError(f"column {name!r} is empty")
            return self.asked(value, **shown)
        messages = self.introduced(checked(value, name, self.contents))
        if messages[-1]["role"] == "assistant":
            raise ValueError(
                f"column {name!r} ends with an assistant message: nothing is left to answer"
            )
        return self.render(messages, **shown), tuple(unmarked(message) for message in messages)

    def asked(self, text: str, **more: Any) -> tuple[str, tuple[Message, ...] | None]:
        messages = self.chat(text)
        return self.render(messages, **more), messages

    def chat(self, text: str) -> tuple[Message, ...]:
        return tuple(self.introduced([{"role": "user", "content": text}]))

    def introduced(self, messages: list[Message]) -> list[Message]:
        """Return a chat behind data.system_prompt, or, with a system message of its own, as it is."""
        system_prompt = self._data.system_prompt
        if system_prompt is None:
            return messages
        first: Message = {"role": "system", "content": system_prompt}
        others = [message for message in messages if message["role"] in ("system", "developer")]
        if not others:
            return [first, *messages]
        if others != [first]:
            kept = f"chats of {self._data.source} that have a system message of their own keep it"
            self._warn(f"{kept}; {self._data.section}.system_prompt is for the others")
        return messages

    def _warn(self, text: str) -> None:
        """Say a sentence once."""
        if text not in self._warnings:
            self._warnings.add(text)
            log.warning(text)

    def notice(self, text: str) -> None:
        """Say once of each special token that a text spells it: the tokenizer reads it as the template's own."""
        for token in self._special.findall(text):
            fact = f"a text spells {token!r}, which is read as that special token, and may begin or end a turn"
            advice = "remove it from the text"
            if self._data.chat_template:
                setting = f"{self._data.section}.chat_template=false"
                advice += f", or set {setting} where a template has written the rows already"
            self._warn(f"{fact}: {advice}")

    @functools.cached_property
    def _special(self) -> re.Pattern[str]:
        special = [
            token.content
            for token in self._tokenizer.added_tokens_decoder.values()
            if token.special
        ]
        return re.compile("|".join(map(re.escape, special)) or r"\Z.")  # none: nothing matches

    def seen(self, columns: Mapping[str, Any]) -> tuple[Mapping[str, Any], Sequence[Any]]:
        """Return columns without pictures, and the pictures. Raise ValueError for those that no one sees."""
        for name in PICTURES:
            value = columns.get(name)
            if any(
                picture is not None for picture in (value if isinstance(value, list) else [value])
            ):
                advice = "name one that does in model.path, or remove the column"
                raise ValueError(
                    f"column {name!r} has pictures, and the model takes none; {advice}"
                )
        return columns, ()

    def expanded(
        self,
        token_ids: list[int],
        pictures: Sequence[Any],
        before: Sequence[Image] = (),
        *,
        whole: bool = True,
    ) -> tuple[list[int], Images]:
        """Return token ids with those of the pictures, and these."""
        return token_ids, ()

    def observed(self, observation: Any) -> tuple[Any, Sequence[Any]]:
        """Return an environment's observation without its pictures, and the pictures."""
        return observation, ()

    def origin(self, rows: Iterable[Mapping[str, Any]]) -> list[Any]:
        """Return the contents of files that rows name, which a cache of prompts depends on, too."""
        return []

    def decode(self, token_ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(token_ids)
        return text

    def encode_prompts(self, texts: Sequence[str]) -> list[list[int]]:
        return self.encode(texts)

    def encode(self, texts: Sequence[str], *, at_most: float = math.inf) -> list[list[int]]:
        """Return each text's token ids, none added; raise TooLongError early if one exceeds `at_most`."""
        if any(len(text) > at_most * self._most_characters for text in texts):
            raise TooLongError(f"a text has more than {at_most} tokens")
        encoded: list[list[int]] = self._tokenizer(list(texts), add_special_tokens=False)[
            "input_ids"
        ]
        return encoded

    def render(self, messages: Sequence[Message], options: Options = None, **more: Any) -> str:
        """Return the chat as text, up to where the model's next turn begins.

        Raise ValueError if it can't be, or if the template leaves tools or a system message out.
        """
        from jinja2 import TemplateError

        for message in messages:
            self.notice(text_of(message.get("content") or ""))
        given: dict[str, Any] = {
            "tools": self._tools,
            "add_generation_prompt": True,
            "tokenize": False,
        }
        given["strftime_now"] = DAY.strftime
        given |= self._data.template_options if options is None else options
        try:
            text: str = self._tokenizer.apply_chat_template(
                [*map(_as_read, messages)], **given | more
            )
        # A template is a program: besides its own refusals it fails in these ways.
        except (TemplateError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"the chat template refuses the messages: {error}") from error
        self._check_shown(text, messages, options, given | more)
        return text

    def _check_shown(
        self, text: str, messages: Sequence[Message], options: Options, given: Mapping[str, Any]
    ) -> None:
        """Raise ValueError where the template leaves out what the model is to know."""
        if given["tools"]:
            without = {name: given[name] for name in ("add_generation_prompt", "tokenize")}
            if text == self.render(messages, options, **without, tools=None):
                advice = "take one that does (chat_template.jinja in the model's folder), or leave the tools out"
                raise ValueError(f"the chat template does not show the model its tools; {advice}")
        if not self._shows_system and any(message["role"] == "system" for message in messages):
            raise ValueError(
                "the chat template leaves system messages out; take one that shows them"
            )

    @functools.cached_property
    def _shows_system(self) -> bool:
        return shows(self._tokenizer, [SYSTEM, ASKED])

    def missing_opening(self) -> str:
        """Find the text before a model's turn, for a template that ignores `add_generation_prompt`."""
        try:
            asked = self.render(TURN[:1])
            plain = self.render(TURN[:1], add_generation_prompt=False)
            before, found, _ = self.render(TURN, add_generation_prompt=False).partition(PROBE)
        except ValueError:  # the rows will tell
            return ""
        opening = before.removeprefix(asked)
        return opening if found and asked == plain and opening != before and opening.strip() else ""

    @functools.cached_property
    def _most_characters(self) -> int:
        # Of four characters, a tokenizer may compose or leave out three.
        return 4 * max(map(len, self._tokenizer.get_vocab()))

    def following(
        self,
        messages: Sequence[Message],
        options: Options = None,
        *,
        ended: int | None,
        at_most: float = math.inf,
    ) -> list[int]:
        """Return the tokens between a turn of the model and its next one, with `messages`.

        They are what the template writes after a made-up turn: it may rewrite the real one, and the model need not
        write a text as the tokenizer would. `ended`: the token that ended the model's turn; None, where it was cut
        off, adds the template's own. Raise ValueError if the template can't render them, or TooLongError.
        """
        _, found, after = self.render([*TURN, *messages], options).partition(PROBE)
        if not found:
            raise ValueError("the chat template does not show what the model said before")
        (token_ids,) = self.encode([after], at_most=at_most)
        return token_ids[1:] if token_ids[:1] == [ended] else token_ids

    @functools.cached_property
    def after_turn(self) -> str:
        return self.render(TURN, add_generation_prompt=False).rpartition(PROBE)[2]

    def end_of_turn(self) -> int:
        """Return the token that ends an answer: the chat template's own, else the tokenizer's EOS."""
        eos: int | None = self._tokenizer.eos_token_id
        after = self.encode([self.after_turn])[0][:1]
        if after and self._tokenizer.decode(after, skip_special_tokens=True) == "":
            return after[0]
        if eos is None:
            raise DataError(
                "the tokenizer has no end-of-sequence token: no response could ever end"
            )
        return eos


@renderer("plain")
class PlainText(Renderer):
    """Take prompts as they are, behind the token that the tokenizer puts before text."""

    after_turn = ""

    def check(self) -> None:
        if self._tools:
            raise DataError(TOOLS_NEED_TEMPLATE)

    def asked(self, text: str, **more: Any) -> tuple[str, None]:
        if more:
            raise ValueError(TOOLS_NEED_TEMPLATE)
        return text, None

    def encode_prompts(self, texts: Sequence[str]) -> list[list[int]]:
        token_ids = self.encode(texts)
        bos = [self._tokenizer.bos_token_id]
        if self._tokenizer("")["input_ids"][:1] != bos:
            return token_ids
        return [ids if ids[:1] == bos else bos + ids for ids in token_ids]

    def seen(self, columns: Mapping[str, Any]) -> tuple[Mapping[str, Any], Sequence[Any]]:
        if getattr(self._tokenizer, "placeholder", None) is not None and columns.keys() & set(
            PICTURES
        ):
            raise ValueError("images need data.chat_template: true")
        return super().seen(columns)

    def render(self, messages: Sequence[Message], options: Options = None, **more: Any) -> str:
        raise ValueError("messages need data.chat_template: true")
