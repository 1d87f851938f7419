"""Render rows and messages as the text that the model reads, and encode it as token ids."""

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
from hocket.data.template import DAY, EXCHANGE, PROBE, first_special, rendered, shows_system
from hocket.errors import DataError
from hocket.types import Image, Message, text_of

IMAGE_COLUMNS = ("image", "images")
OPENING = re.compile(r"<think>\s*(</think>\s*)?\Z")
TOOLS_NEED_TEMPLATE = "tools are shown by the chat template; set data.chat_template: true"
ToolSchemas = Sequence[Mapping[str, Any]]
Options = Mapping[str, Any] | None  # chat template options; None: those of the data section
Images = tuple[Image, ...]

log = logging.getLogger(__name__)


class TooLongError(ValueError):
    """A text has more tokens than allowed."""


def opening_of(prompt: str) -> str:
    """Return the opening of a thought with which a prompt ends: "<think>\\n". "" if there is none.

    Some templates close the thought at once: "<think>\\n\\n</think>\\n\\n".
    """
    opening = OPENING.search(prompt)
    return opening[0] if opening else ""


def _for_template(message: Message) -> Message:
    """Return a message as chat templates read it.

    It has no training mark, and the arguments of its tool calls are objects. vLLM does the same.
    """
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return unmarked(message)
    calls = copy.deepcopy(calls)
    for call in calls:
        function = call.get("function", call) if isinstance(call, dict) else {}
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            # Arguments that are no JSON stay the text that they are.
            with contextlib.suppress(ValueError):
                function["arguments"] = json.loads(function["arguments"])
    return unmarked(message) | {"tool_calls": calls}


RENDERERS: Registry[Callable[..., "Renderer"]] = Registry("renderer", vision="hocket.data.vision")
renderer = RENDERERS.register
"""Register a subclass of Renderer (decorator); `data.renderer` names it.

The class is called with (data, tokenizer, tools) and its options. It writes a chat as the text that
the model reads.

Args:
    name: its name in `data.renderer`.

Example: a plugin file that writes turns as a base model may know them from forums.

    @renderer("forum")
    class Forum(PlainText):
        def __init__(self, data, tokenizer, tools, *, sign: str = "###") -> None:
            self._sign = sign
            super().__init__(data, tokenizer, tools)

        def render(self, messages: Sequence[Message], options: Options = None, **more: Any) -> str:
            text = ""
            for message in messages:
                text += f"{self._sign} {message['role']}: {message['content']} "
            return f"{text}{self._sign} assistant:"

        def asked(self, text: str, **more: Any) -> tuple[str, tuple[Message, ...]]:
            messages = self.chat(text)
            return self.render(messages), messages
"""


@renderer("chat")
class Renderer:
    """Renders with the tokenizer's chat template, which writes all special tokens.

    Example: the first prompt of a file, as text, as a Prompt's fields, and as token ids.

        renderer = Renderer(DataConfig(source="rows.jsonl"), tokenizer, tools=())
        text, fields = renderer.row({"prompt": "1 + 1 = ?", "answer": "2"})
        (token_ids,) = renderer.encode_prompts([text])
        prompt = Prompt(id="rows.jsonl:1", token_ids=array("I", token_ids), **fields)
    """

    contents: tuple[type, ...] = (str,)  # the types that the content of a message may have
    placeholder: int | None = None  # the token that stands for an image; None: no images are taken

    def __init__(self, data: DataConfig, tokenizer: Any, tools: ToolSchemas) -> None:
        self._data = data
        self._tokenizer = tokenizer
        self._tools = list(tools) or None
        self._warnings: set[str] = set()
        self.check()

    def check(self) -> None:
        """Render a question as a trial. Raise DataError if the chat template can't."""
        if self._tokenizer.chat_template is None:
            setting = f"{self._data.section}.chat_template=false"
            raise DataError(
                "the tokenizer has no chat template: put one as chat_template.jinja into its "
                f"folder, or set {setting} for plain text"
            )
        try:
            self.render(self.chat("?"))
        except ValueError as error:
            if self._tools:
                raise DataError(str(error)) from error
            if self._data.system_prompt is not None:
                setting = f"{self._data.section}.system_prompt"
                raise DataError(
                    f"{setting}: {error}; leave it out, or write it into the prompts"
                ) from error
            # Else the template may refuse only this question: each row that it refuses is named.

    # Rows

    def row(self, columns: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        """Render a row. Returns its text, and all fields of its Prompt that follow from the row."""
        data = self._data
        text, messages = self.prompt(columns)
        if columns.get("tools"):
            self._warn(
                f"the column 'tools' of {data.source} is for rewards and environments: the model "
                "is shown the tools of env.tools alone, which the environment can call"
            )

        # Rewards and people read the last user message, or the whole of a plain text.
        question = columns[data.prompt_column]
        if messages is not None:
            of_user = [message for message in messages if message["role"] == "user"]
            last = of_user[-1] if of_user else messages[-1]
            question = text_of(last["content"])

        used = (data.prompt_column, data.answer_column)
        return text, {
            "messages": messages,
            "text": question,
            "opening": opening_of(text),
            "options": data.template_options,
            "answer": answer_of(columns, data),
            "meta": {name: value for name, value in columns.items() if name not in used},
        }

    def prompt(
        self, columns: Mapping[str, Any], tools: Any = None
    ) -> tuple[str, tuple[Message, ...] | None]:
        """Render a row's prompt. Returns the text, and the chat in it; None for plain text.

        tools: the row's own tool schemas, which are then the only ones that are shown.
        """
        options = {"tools": tools} if tools else {}
        name = self._data.prompt_column
        value = column(columns, self._data, "prompt_column")
        if isinstance(value, str):
            if not value.strip():
                raise ValueError(f"column {name!r} is empty")
            return self.asked(value, **options)

        # A chat: it must end where the model is to go on.
        messages = self.with_system_prompt(checked(value, name, self.contents))
        if messages[-1]["role"] == "assistant":
            raise ValueError(
                f"column {name!r} ends with an assistant message: nothing is left to answer"
            )
        text = self.render(messages, **options)
        return text, tuple(unmarked(message) for message in messages)

    def asked(self, text: str, **more: Any) -> tuple[str, tuple[Message, ...] | None]:
        """Render a prompt that is text. Returns as `prompt` does; `more` goes to `render`."""
        messages = self.chat(text)
        return self.render(messages, **more), messages

    def chat(self, text: str) -> tuple[Message, ...]:
        """Return the chat in which the user says `text`."""
        return tuple(self.with_system_prompt([{"role": "user", "content": text}]))

    def with_system_prompt(self, messages: list[Message]) -> list[Message]:
        """Put data.system_prompt before a chat, unless that has a system message already."""
        system_prompt = self._data.system_prompt
        if system_prompt is None:
            return messages
        first: Message = {"role": "system", "content": system_prompt}
        # Templates render one system message, or refuse a second one: the row's own has precedence.
        present = [message for message in messages if message["role"] in ("system", "developer")]
        if not present:
            return [first, *messages]
        if present != [first]:
            self._warn(
                f"chats of {self._data.source} that have a system message of their own keep it; "
                f"{self._data.section}.system_prompt is for the others"
            )
        return messages

    # Warnings

    def _warn(self, text: str) -> None:
        """Log a warning, but each only once."""
        if text not in self._warnings:
            self._warnings.add(text)
            log.warning(text)

    def warn_special_tokens(self, text: str) -> None:
        """Warn of special tokens that a text spells out: the tokenizer reads them as real ones."""
        for token in self._special.findall(text):
            advice = "remove it from the text"
            if self._data.chat_template:
                setting = f"{self._data.section}.chat_template=false"
                advice += f", or set {setting} where a template has written the rows already"
            self._warn(
                f"a text spells {token!r}, which is read as that special token, and may begin or "
                f"end a turn: {advice}"
            )

    @functools.cached_property
    def _special(self) -> re.Pattern[str]:
        """Match any special token; nothing if the tokenizer has none."""
        tokens = self._tokenizer.added_tokens_decoder.values()
        spellings = [re.escape(token.content) for token in tokens if token.special]
        return re.compile("|".join(spellings) or r"\Z.")

    # Images: here there are none; hocket.data.vision overrides these methods.

    def split_images(self, columns: Mapping[str, Any]) -> tuple[Mapping[str, Any], Sequence[Any]]:
        """Split a row into columns without images and the images.

        Raise ValueError for images if the model takes none.
        """
        for name in IMAGE_COLUMNS:
            value = columns.get(name)
            images = value if isinstance(value, list) else [value]
            if any(image is not None for image in images):
                raise ValueError(
                    f"column {name!r} has images, and the model takes none; "
                    "name one that does in model.path, or remove the column"
                )
        return columns, ()

    def insert_images(
        self,
        token_ids: list[int],
        raw_images: Sequence[Any],
        before: Sequence[Image] = (),
        *,
        whole: bool = True,
    ) -> tuple[list[int], Images]:
        """Put each image's tokens in the place of its placeholder. Returns the ids and the images.

        raw_images: images as `split_images` and `split_observation` return them. before: the
        images of the sequence before `token_ids`. whole: False if the ids may be only a prefix,
        which has placeholders for the first images.
        """
        return token_ids, ()

    def split_observation(self, observation: Any) -> tuple[Any, Sequence[Any]]:
        """Split an environment's observation into one without images and the images."""
        return observation, ()

    def image_files(self, rows: Iterable[Mapping[str, Any]]) -> list[Any]:
        """Describe the image files that rows name, as a cache of prompts depends on them."""
        return []

    # Token ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, special tokens included."""
        text: str = self._tokenizer.decode(token_ids)
        return text

    def encode_prompts(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of rendered prompts."""
        return self.encode(texts)

    def encode(self, texts: Sequence[str], *, at_most: float = math.inf) -> list[list[int]]:
        """Return the token ids of each text; no special token is added.

        Raise TooLongError if a text is certain to have more than `at_most` tokens, before time
        goes into encoding it. A text that is shorter may still have more.
        """
        if any(len(text) > at_most * self._most_characters for text in texts):
            raise TooLongError(f"a text has more than {at_most} tokens")
        encoded = self._tokenizer(list(texts), add_special_tokens=False)
        token_ids: list[list[int]] = encoded["input_ids"]
        return token_ids

    @functools.cached_property
    def _most_characters(self) -> int:
        """The most characters of a text that one token may stand for."""
        # A tokenizer may normalize a text first, and make one character of up to four.
        return 4 * max(map(len, self._tokenizer.get_vocab()))

    # The chat template

    def render(self, messages: Sequence[Message], options: Options = None, **more: Any) -> str:
        """Render a chat as text, up to the point where the model's next turn begins.

        `more` are arguments of the tokenizer's `apply_chat_template`. Raise ValueError if the
        template refuses the messages, or leaves out tools or a system message.
        """
        # Contents come from rows and environments: they may spell special tokens.
        for message in messages:
            self.warn_special_tokens(text_of(message.get("content") or ""))
        arguments: dict[str, Any] = {
            "tools": self._tools,
            "add_generation_prompt": True,
            "tokenize": False,
            "strftime_now": DAY.strftime,
        }
        # The caller's arguments win over template options, and these over the defaults.
        arguments.update(self._data.template_options if options is None else options)
        arguments.update(more)
        readable = [_for_template(message) for message in messages]
        text = rendered(self._tokenizer, readable, **arguments)
        if not self._shows_system and any(message["role"] == "system" for message in messages):
            raise ValueError(
                "the chat template leaves system messages out; take one that shows them"
            )
        # A template that reads the tools writes another text without them.
        without_tools = arguments | {"tools": None}
        if arguments["tools"] and text == rendered(self._tokenizer, readable, **without_tools):
            raise ValueError(
                "the chat template does not show the model its tools; take one that does "
                "(chat_template.jinja in the model's folder), or leave the tools out"
            )
        return text

    @functools.cached_property
    def _shows_system(self) -> bool:
        return shows_system(self._tokenizer)

    def missing_opening(self) -> str:
        """Find the text that begins a model's turn, if the template ends no prompt with it.

        Such a template ignores `add_generation_prompt`: the model would have to write this text
        itself. "" if prompts end with it.
        """
        # Render the question with and without the beginning of an answer, and with a whole answer.
        try:
            prompt = self.render(EXCHANGE[:1])
            question = self.render(EXCHANGE[:1], add_generation_prompt=False)
            exchange = self.render(EXCHANGE, add_generation_prompt=False)
        except ValueError:  # the rows that it refuses will be named
            return ""
        before_answer, probe, _ = exchange.partition(PROBE)
        if not probe or prompt != question:
            return ""
        opening = before_answer.removeprefix(prompt)
        # Nothing was removed if the template writes the question differently before an answer.
        if opening == before_answer or not opening.strip():
            return ""
        return opening

    def following(
        self,
        messages: Sequence[Message],
        options: Options = None,
        *,
        ended: int | None,
        at_most: float = math.inf,
    ) -> list[int]:
        """Return the tokens between a turn of the model and its next one, with `messages`.

        They are what the template writes after a made-up turn. The real turn can't be rendered:
        the template may rewrite it, and the model need not write a text as the tokenizer would.

        ended: the token that ended the model's turn. None: the turn was cut off, and the
        template's end of turn is added. Raise ValueError if the template can't render the
        messages, or TooLongError.
        """
        exchange = list(EXCHANGE) + list(messages)
        _, probe, after = self.render(exchange, options).partition(PROBE)
        if not probe:
            raise ValueError("the chat template does not show what the model said before")
        (token_ids,) = self.encode([after], at_most=at_most)
        # The model has sampled its end of turn already.
        return token_ids[1:] if token_ids[:1] == [ended] else token_ids

    @functools.cached_property
    def after_turn(self) -> str:
        """The text that the template writes after a turn of the model.

        Raise DataError if the template does not show the turn: nothing in its text is the end.
        """
        exchange = self.render(EXCHANGE, add_generation_prompt=False)
        _, probe, after = exchange.rpartition(PROBE)
        if not probe:
            raise DataError(
                "the chat template does not show what the assistant said, so that no turn can be "
                "taught: take one that does (chat_template.jinja in the model's folder)"
            )
        return after

    def end_of_turn(self) -> int:
        """Return the token that ends an answer: the chat template's, else the tokenizer's EOS."""
        end: int | None = first_special(self._tokenizer, self.after_turn)
        if end is None:
            end = self._tokenizer.eos_token_id
        if end is None:
            raise DataError(
                "the tokenizer has no end-of-sequence token: no response could ever end"
            )
        return end


@renderer("plain")
class PlainText(Renderer):
    """Takes prompts as they are, after the token that the tokenizer puts before a text."""

    after_turn = ""

    def check(self) -> None:
        if self._tools:
            raise DataError(TOOLS_NEED_TEMPLATE)

    def asked(self, text: str, **more: Any) -> tuple[str, None]:
        if more:
            raise ValueError(TOOLS_NEED_TEMPLATE)
        return text, None

    def encode_prompts(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of prompts, each begun by the tokenizer's BOS if it adds one."""
        encoded = self.encode(texts)
        bos = [self._tokenizer.bos_token_id]
        # An empty text shows whether the tokenizer adds BOS.
        if self._tokenizer("")["input_ids"][:1] != bos:
            return encoded
        # A row may have written it already.
        return [token_ids if token_ids[:1] == bos else bos + token_ids for token_ids in encoded]

    def split_images(self, columns: Mapping[str, Any]) -> tuple[Mapping[str, Any], Sequence[Any]]:
        takes_images = getattr(self._tokenizer, "placeholder", None) is not None
        if takes_images and columns.keys() & set(IMAGE_COLUMNS):
            raise ValueError("images need data.chat_template: true")
        return super().split_images(columns)

    def render(self, messages: Sequence[Message], options: Options = None, **more: Any) -> str:
        raise ValueError("messages need data.chat_template: true")
