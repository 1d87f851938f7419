"""Find out what a chat template shows, by rendering made-up messages; keep the day it may show."""

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

PROBE = "hocket-0123456789"  # the content of a made-up message: its place in a text is looked up
QUESTION = {"role": "user", "content": "?"}
EXCHANGE = (QUESTION, {"role": "assistant", "content": PROBE})
SYSTEM = {"role": "system", "content": PROBE}


def rendered(tokenizer: Any, messages: Sequence[Mapping[str, Any]], /, **options: Any) -> str:
    """Render messages as text. Raise ValueError if the template refuses them.

    `options` are arguments of the tokenizer's `apply_chat_template`.
    """
    from jinja2 import TemplateError

    options.setdefault("tokenize", False)
    try:
        text: str = tokenizer.apply_chat_template(list(messages), **options)
    # A template is a program: besides its own refusals it fails in these ways.
    except (TemplateError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"the chat template refuses the messages: {error}") from error
    return text


def shows_system(tokenizer: Any) -> bool:
    """Check whether the template writes system messages.

    True also if it refuses them: then whoever renders real ones gets its error.
    """
    for text in _renderings(tokenizer, [SYSTEM, QUESTION]):
        return PROBE in text
    return True


def end_of_turn(tokenizer: Any) -> int | None:
    """Find the special token that the template writes after an answer; None if there is none."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    for text in _renderings(tokenizer, EXCHANGE):
        _, probe, after = text.rpartition(PROBE)
        if probe and after:
            return first_special(tokenizer, after)
    return None


def first_special(tokenizer: Any, text: str) -> int | None:
    """Return the first token of a text if it is a special one, else None."""
    token_ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"][:1]
    # Decoding leaves special tokens out, so nothing is left of one.
    if token_ids and tokenizer.decode(token_ids, skip_special_tokens=True) == "":
        return token_ids[0]
    return None


def _renderings(tokenizer: Any, messages: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Render messages with contents as text, then as lists of parts, as some vision models want.

    A form that the template refuses is left out.
    """
    for form in (messages, [_in_parts(message) for message in messages]):
        try:
            text = rendered(tokenizer, form)
        except ValueError:
            continue
        yield text


def _in_parts(message: Mapping[str, Any]) -> dict[str, Any]:
    return dict(message) | {"content": [{"type": "text", "text": message["content"]}]}


class Day:
    """The day that prompts show: the one on which the run began.

    A run that is resumed later, in another process, still shows its first day.
    """

    def __init__(self) -> None:
        self._began = datetime.now().astimezone()

    def begin(self) -> None:
        """Take today, for a new run."""
        self._began = datetime.now().astimezone()

    def go_on(self, day: str) -> None:
        """Take the day of a checkpoint. "": the checkpoint is older than this field."""
        if day:
            self._began = datetime.fromisoformat(day)

    def __str__(self) -> str:
        return self._began.isoformat(timespec="seconds")

    def strftime(self, form: str) -> str:
        """Return the day as text; chat templates call this as `strftime_now`."""
        return self._began.strftime(form)


DAY = Day()
