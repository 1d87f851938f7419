"""Read the columns of a row as tools write them: JSON, Arrow and pandas, numpy, the hub's chats.

What is read is plain Python: text, or a chat without the nulls with which tables fill its messages. All other columns
stay as they are.
"""

import contextlib
import datetime
import json
import math
import re
from collections.abc import Collection, Mapping
from decimal import Decimal
from typing import Any

from hocket.config import DataConfig
from hocket.types import Message

LINE = "a line is one object in UTF-8, without a comma; a list of objects is a .json file"
MARKS = (
    "weight",
    "train",
    "training",
    "trainable",
    "loss",
    "loss_mask",
)  # of a turn: is it taught?
WRONG_ROLES = {"human": "user", "gpt": "assistant"}  # ShareGPT's
ROLES = ("system", "user", "assistant", "tool")
MOST_EXACT = 2**53  # above, a float does not hold every whole number
_HALF = re.compile("[\ud800-\udfff]")
_ROLE = re.compile(r"""['"](role|from)['"]\s*:""")


def columns_of(row: Any, names: Collection[str]) -> dict[str, Any]:
    """Return a row's columns, those of these names read as text or chats.

    `row`: a line of JSON as bytes, or a mapping. Raise ValueError for another, and for half a character.
    """
    columns = row
    try:
        if isinstance(row, bytes):
            columns = parsed(row)
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{error}; {LINE}") from error
    if not isinstance(columns, Mapping):
        raise ValueError(f"must be a JSON object, got {type(columns).__name__}; {LINE}")
    columns = dict(columns)
    for name in columns:
        if name in names:
            columns[name] = _read(columns[name], name)
    return columns


def parsed(text: bytes) -> Any:
    """Parse JSON. Raise ValueError where it is none, or an object has a key twice."""
    return json.loads(text, object_pairs_hook=_object)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} stands twice in one object: leave one")
    return made


def column(columns: Mapping[str, Any], data: DataConfig, setting: str, hint: str = "") -> Any:
    """Return the column that a setting names. Raise ValueError without it."""
    name = getattr(data, setting)
    if name not in columns:
        there = ", ".join(map(repr, columns))
        raise ValueError(
            f"no column {name!r}, only {there}: set {data.section}.{setting} to one of these{hint}"
        )
    return columns[name]


def answer_of(columns: Mapping[str, Any], data: DataConfig) -> str | None:
    """Return a row's answer, cut out by data.answer_pattern; None without data.answer_column."""
    name = data.answer_column
    if name is None:
        return None
    answer = as_answer(
        column(columns, data, "answer_column", ", or to null where there is no answer"), name
    )
    if data.answer_pattern is None:
        return answer
    cut = cut_out(answer, data.answer_pattern)
    if not cut:
        fact = f"{data.section}.answer_pattern {data.answer_pattern.pattern!r} finds no answer in column {name!r}"
        raise ValueError(f"{fact}: {answer!r:.80}")
    return cut


def cut_out(answer: str, pattern: re.Pattern[str]) -> str:
    """Return group 1 of the pattern, without spaces around it; "" where there is none."""
    match = pattern.search(answer)
    return (match[1] or "").strip() if match else ""


def sample_of(row: Any, data: DataConfig) -> dict[str, Any]:
    """Return a row with a completion as a run writes them: it has the columns of a section, or `prompt` and `answer`.

    An answer in which data.answer_pattern finds nothing is taken for one that is cut out already.
    """
    asked = data.prompt_column
    answered = data.answer_column or "answer"
    columns = columns_of(row, {asked, "prompt", "messages"})
    asked = asked if asked in columns else "prompt"
    answered = answered if answered in columns else "answer"
    sample = dict(columns)
    for name in (asked, "messages"):
        if not isinstance(columns.get(name), str | None):
            sample[name] = [
                unmarked(message) for message in checked(columns[name], name, (str, list))
            ]
    sample["prompt"] = sample.get(asked)
    answer = columns.get(answered)
    if answer is not None:
        answer = as_answer(answer, answered)
        if data.answer_pattern is not None:
            answer = cut_out(answer, data.answer_pattern) or answer
    used = (asked, answered, "messages", "completion")
    meta = {name: value for name, value in columns.items() if name not in used}
    return {
        **sample,
        "answer": answer,
        "meta": meta,
        "parts": {"env": columns.get("reward")},
        "failed": None,
    }


def as_answer(value: Any, name: str) -> str:
    """Return an answer as text, a number in digits.

    72.0 is 72, as pandas makes floats of all numbers in a column with a null. Raise ValueError for what is neither.
    """
    value = _plain(value)
    if type(value) is datetime.date:
        value = value.isoformat()
    is_number = (
        isinstance(value, int | float | Decimal)
        and not isinstance(value, bool)
        and math.isfinite(value)
    )
    if not isinstance(value, str) and not is_number:
        fact = f"column {name!r} must be text or a number, got {value!r:.80}"
        if isinstance(value, datetime.datetime):
            fact += ", which `datasets` makes of text in JSON, too: name the .jsonl file itself without hf:"
        raise ValueError(f"{fact}; write it as text, or remove the row")
    if isinstance(value, str):
        check_characters(value, f"column {name!r}")
        if not value.strip():
            raise ValueError(f"column {name!r} is empty")
        return value
    if isinstance(value, float) and abs(value) > MOST_EXACT:
        raise ValueError(
            f"column {name!r} is {value!r}, a float that may have lost digits: write it as text"
        )
    digits = f"{Decimal(str(value)):f}"
    if "." in digits:
        digits = digits.rstrip("0").rstrip(".")
    return "0" if digits == "-0" else digits


def check_characters(value: Any, place: str) -> None:
    """Raise ValueError for half a character in any text of a value."""
    if isinstance(value, str) and (half := _HALF.search(value)):
        fact = f"{place} has half a character, {half[0]!r}, at place {half.start()}"
        raise ValueError(f"{fact}: another program has cut an emoji or the like; repair the text")
    if isinstance(value, Mapping):
        value = [*value.keys(), *value.values()]
    if isinstance(value, list | tuple):
        for part in value:
            check_characters(part, place)


def without_nulls(value: Any) -> Any:
    """Drop the nulls with which tables fill objects."""
    if isinstance(value, list):
        return [without_nulls(part) for part in value]
    if isinstance(value, Mapping):
        return {key: without_nulls(part) for key, part in value.items() if part is not None}
    return value


def checked(messages: Any, name: str, contents: tuple[type, ...] = (str,)) -> list[Message]:
    """Return the messages of a chat in column `name`. Raise ValueError for what is none.

    Those that are shown, but not taught, have the weight 0; of the other marks nothing is left.
    """
    if not (isinstance(messages, list) and messages):
        raise ValueError(
            f"column {name!r} must be text or a list of messages, got {messages!r:.80}"
        )
    return [
        _checked(message, f"message {number} of column {name!r}", name, contents)
        for number, message in enumerate(messages)
    ]


def _checked(message: Any, place: str, name: str, contents: tuple[type, ...]) -> Message:
    if not isinstance(message, Mapping):
        raise _no_message(message, place)
    if "role" not in message and {"from", "value"} <= message.keys():
        advice = "rename 'from' to 'role' (human: user, gpt: assistant) and 'value' to 'content'"
        raise ValueError(f"{_no_message(message, place)}: {advice}")
    read = {key: value for key, value in message.items() if key not in MARKS}
    role = read.get("role")
    if role == "assistant":
        read.setdefault("content", "")  # beside calls or a thought
    if not isinstance(role, str) or not isinstance(read.get("content"), contents):
        is_list = isinstance(read.get("content"), list)
        advice = ": only models that take images have parts that are no text" if is_list else ""
        raise ValueError(f"{_no_message(message, place)}{advice}")
    plain = role.strip().lower()
    right = WRONG_ROLES.get(plain, plain)
    if right in ROLES and role != right:
        raise ValueError(
            f"{place} has the role {role!r}, which chat templates do not know: write {right!r}"
        )
    if "function_call" in read:
        raise ValueError(
            f"{place} has a function_call, which chat templates leave out: write it as tool_calls"
        )
    if not isinstance(read.get("tool_calls", []), list):
        raise ValueError(f"{place} must have a list of tool_calls, got {read['tool_calls']!r:.80}")
    content = read["content"]
    blank = isinstance(content, str) and not content.strip()
    if blank and (role == "user" or (role == "assistant" and len(read) == 2)):
        raise ValueError(f"column {name!r} has an empty turn of the {role}: remove it")
    return read if _is_taught(message, place) else {**read, "weight": 0}


def _no_message(message: Any, place: str) -> ValueError:
    return ValueError(f"{place} must be {{'role': text, 'content': text}}, got {message!r:.80}")


def _is_taught(message: Message, place: str) -> bool:
    marks = {key: message[key] for key in MARKS if key in message}
    if any(value not in (0, 1) for value in marks.values()):
        raise ValueError(
            f"{place} is marked {marks}, but a turn is taught (1) or only shown (0): mark it so"
        )
    if message["role"] != "assistant" and any(marks.values()):
        raise ValueError(
            f"{place} is marked {marks}, but only turns of the assistant are taught: remove the mark"
        )
    return all(marks.values())


def unmarked(message: Message) -> Message:
    return {key: value for key, value in message.items() if key != "weight"}


def _read(value: Any, name: str) -> Any:
    """Return text, or a chat; what is neither as it is."""
    value = _plain(value)
    if isinstance(value, str):
        value = _chat_in(value, name)
    check_characters(value, f"column {name!r}")
    return [_message(part) for part in value] if isinstance(value, list) else value


def _plain(value: Any) -> Any:
    """Return lists and numbers in place of numpy's."""
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if isinstance(value, Mapping):
        return {key: _plain(part) for key, part in value.items()}
    if getattr(value, "shape", None) == () and str(value.dtype).startswith("float"):
        return float(str(value))  # a float32's 0.1, not 0.10000000149011612
    return _plain(value.tolist()) if hasattr(value, "tolist") else value


def _chat_in(text: str, name: str) -> Any:
    """Return the chat that a text is, as tables without lists have it; another text as it is."""
    bare = text.strip()
    if not (bare.startswith("[") and bare.endswith("]") and _ROLE.search(bare)):
        return text
    try:
        chat = json.loads(bare, object_pairs_hook=_object)
    except ValueError as error:
        fact = f"column {name!r} is a chat as text, but not as JSON: {error}"
        raise ValueError(f"{fact}; write it by json.dumps: {bare!r:.80}") from error
    is_chat = all(
        isinstance(part, dict) and not part.keys().isdisjoint({"role", "from"}) for part in chat
    )
    return chat if is_chat else text


def _message(message: Any) -> Any:
    """Return a message without nulls and empty calls, its parts of text as one text."""
    if not isinstance(message, Mapping):
        return message
    message = {
        key: value for key, value in without_nulls(message).items() if value == value
    }  # NaN: a null of pandas
    if isinstance(message.get("tool_calls"), str):
        with contextlib.suppress(ValueError):
            message["tool_calls"] = json.loads(message["tool_calls"])
    if not message.get("tool_calls", True):
        del message["tool_calls"]
    content = message.get("content")
    if isinstance(content, list) and content and all(map(_is_text, content)):
        message["content"] = "".join(part["text"] for part in content)
    return message


def _is_text(part: Any) -> bool:
    return (
        isinstance(part, Mapping)
        and part.get("type") == "text"
        and isinstance(part.get("text"), str)
    )
