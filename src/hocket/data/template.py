"""Find out what a chat template shows, by rendering made-up messages; keep the day it may show."""

import contextlib
from collections.abc import Mapping, Sequence
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


def shows(tokenizer: Any, messages: Sequence[Mapping[str, Any]]) -> bool:
    """Check whether the template writes the probe that is in `messages`.

    True also if it refuses the messages: then whoever renders real ones gets its error.
    """
    for form in (messages, [in_parts(message) for message in messages]):
        with contextlib.suppress(ValueError):
            return PROBE in rendered(tokenizer, form)
    return True


def end_of_turn(tokenizer: Any) -> int | None:
    """Find the special token that the template writes after an answer; None if there is none."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    # Try contents as text, then as lists of parts.
    after = _after_probe(tokenizer, EXCHANGE)
    if not after:
        after = _after_probe(tokenizer, [in_parts(message) for message in EXCHANGE])
    # Decoding leaves special tokens out, so the first token is one if nothing is left of it.
    token_ids: list[int] = tokenizer(after, add_special_tokens=False)["input_ids"][:1]
    if token_ids and tokenizer.decode(token_ids, skip_special_tokens=True) == "":
        return token_ids[0]
    return None


def _after_probe(tokenizer: Any, messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the text that the template writes after the probe; "" if it does not write that."""
    with contextlib.suppress(ValueError):  # the template takes no such messages
        _, probe, after = rendered(tokenizer, messages).rpartition(PROBE)
        return after if probe else ""
    return ""


def in_parts(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message with its content as a list of parts, as many vision models want it."""
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
