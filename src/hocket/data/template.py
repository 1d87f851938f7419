"""What a chat template shows, found by rendering messages that are made up, and the day that it may write."""

import contextlib
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

PROBE = "hocket-0123456789"  # the content of a made-up message
ASKED = {"role": "user", "content": "?"}
TURN = (ASKED, {"role": "assistant", "content": PROBE})
SYSTEM = {"role": "system", "content": PROBE}


def rendered(tokenizer: Any, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
    """Render messages as text. Raises ValueError where the template refuses them."""
    from jinja2 import TemplateError

    try:
        text: str = tokenizer.apply_chat_template(list(messages), **{"tokenize": False, **options})
    # A template is a program: besides its own refusals it fails in these ways.
    except (TemplateError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"the chat template refuses the messages: {error}") from error
    return text


def shows(tokenizer: Any, messages: Sequence[Mapping[str, Any]]) -> bool:
    """Say whether the template writes the probe in messages; True where it refuses them, as it says that itself."""
    for written in (messages, [in_parts(message) for message in messages]):
        with contextlib.suppress(ValueError):
            return PROBE in rendered(tokenizer, written)
    return True


def end_of_turn(tokenizer: Any) -> int | None:
    """Find the special token that the chat template writes behind an answer; None where there is none."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    behind = _behind(tokenizer, TURN) or _behind(tokenizer, [in_parts(message) for message in TURN])
    token_ids: list[int] = tokenizer(behind, add_special_tokens=False)["input_ids"][:1]
    if token_ids and tokenizer.decode(token_ids, skip_special_tokens=True) == "":
        return token_ids[0]
    return None


def _behind(tokenizer: Any, messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the text that the template writes behind the probe; "" where it does not show that."""
    with contextlib.suppress(ValueError):  # it takes no such messages
        _, probe, behind = rendered(tokenizer, messages).rpartition(PROBE)
        return behind if probe else ""
    return ""


def in_parts(message: Mapping[str, Any]) -> dict[str, Any]:
    """Write a message as templates of models that take images want it."""
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


class Day:
    """The day that prompts show: that on which the run began, also where it goes on later, in another process."""

    def __init__(self) -> None:
        self._began = datetime.now().astimezone()

    def begin(self) -> None:
        self._began = datetime.now().astimezone()

    def go_on(self, day: str) -> None:
        """Take the day of a checkpoint, "" if that was written before days were kept."""
        if day:
            self._began = datetime.fromisoformat(day)

    def __str__(self) -> str:
        return self._began.isoformat(timespec="seconds")

    def strftime(self, form: str) -> str:
        """Return the day as text; chat templates call this as `strftime_now`."""
        return self._began.strftime(form)


DAY = Day()
