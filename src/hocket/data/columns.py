"""Read the columns of a row, whichever tool wrote them: JSON, Arrow, pandas, numpy, hub chats.

The columns that hold a text or a chat become plain Python: text, or a list of messages without
the nulls with which tables fill them. All other columns stay as they are.
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
# Keys that data sets use to mark whether a turn is taught (1) or only shown (0).
MARKS = ("weight", "train", "training", "trainable", "loss", "loss_mask")
WRONG_ROLES = {"human": "user", "gpt": "assistant"}  # the roles of ShareGPT's format
ROLES = ("system", "user", "assistant", "tool")
MOST_EXACT = 2**53  # above this number a float can't hold every whole number
_HALF = re.compile("[\ud800-\udfff]")  # a surrogate: half of a character in UTF-16
_ROLE = re.compile(r"""['"](role|from)['"]\s*:""")


def columns_of(row: Any, names: Collection[str]) -> dict[str, Any]:
    """Return a row's columns by name. Those in `names` are read as texts or chats.

    row: a line of JSON as bytes, or a mapping. Raise ValueError if it is neither, or if a text
    has half a character.
    """
    try:
        columns = parsed(row) if isinstance(row, bytes) else row
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{error}; {LINE}") from error
    if not isinstance(columns, Mapping):
        raise ValueError(f"must be a JSON object, got {type(columns).__name__}; {LINE}")
    columns = dict(columns)
    for name in columns:
        if name in names:
            columns[name] = _text_or_chat(columns[name], name)
    return columns


def parsed(text: str | bytes) -> Any:
    """Parse JSON. Raise ValueError if it is not valid, or if an object has a key twice."""
    return json.loads(text, object_pairs_hook=_object)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a JSON object of its pairs. Raise ValueError if a key stands twice."""
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} stands twice in one object: leave one")
    return values


def column(columns: Mapping[str, Any], data: DataConfig, setting: str, hint: str = "") -> Any:
    """Return the value of the column that a setting names. Raise ValueError if it is missing.

    hint: what else the setting may be, for the error.
    """
    name = getattr(data, setting)
    if name not in columns:
        names = ", ".join(map(repr, columns))
        raise ValueError(
            f"no column {name!r}, only {names}: set {data.section}.{setting} to one of these{hint}"
        )
    return columns[name]


# Texts and chats, as tables and hub data sets have them


def _text_or_chat(value: Any, name: str) -> Any:
    """Read the value of column `name`: a text or a chat. Another value stays as it is."""
    value = _without_numpy(value)
    if isinstance(value, str):
        value = _chat_in(value, name)
    check_characters(value, f"column {name!r}")
    return [_repaired(message) for message in value] if isinstance(value, list) else value


def _without_numpy(value: Any) -> Any:
    """Replace numpy's arrays and numbers by lists and numbers of Python."""
    if isinstance(value, list | tuple):
        return [_without_numpy(part) for part in value]
    if isinstance(value, Mapping):
        return {key: _without_numpy(part) for key, part in value.items()}
    if not hasattr(value, "tolist"):  # nothing of numpy
        return value
    if getattr(value, "shape", None) == () and str(value.dtype).startswith("float"):
        return float(str(value))  # a float32's 0.1, not 0.10000000149011612
    return _without_numpy(value.tolist())


def _chat_in(text: str, name: str) -> Any:
    """Return the chat that a text holds as JSON, as in CSV files; other text stays as it is."""
    # A text that only looks like a list must stay text: it needs a role, too.
    bare = text.strip()
    if not (bare.startswith("[") and bare.endswith("]") and _ROLE.search(bare)):
        return text
    try:
        chat = parsed(bare)
    except ValueError as error:
        raise ValueError(
            f"column {name!r} is a chat as text, but not as JSON: {error}; "
            f"write it by json.dumps: {bare!r:.80}"
        ) from error
    for part in chat:
        if not isinstance(part, dict) or part.keys().isdisjoint({"role", "from"}):
            return text
    return chat


def _repaired(message: Any) -> Any:
    """Undo what tables do to a message: drop nulls and empty calls, and join parts of text.

    `checked` refuses later what is wrong with the message itself.
    """
    if not isinstance(message, Mapping):
        return message
    message = without_nulls(message)
    for key in list(message):
        if message[key] != message[key]:  # NaN, with which pandas fills tables
            del message[key]
    if isinstance(message.get("tool_calls"), str):
        # Calls that are no JSON stay text; `checked` refuses them.
        with contextlib.suppress(ValueError):
            message["tool_calls"] = json.loads(message["tool_calls"])
    if not message.get("tool_calls", True):
        del message["tool_calls"]
    # Parts that are all text are one text: templates of models without images read only that.
    content = message.get("content")
    if isinstance(content, list) and content and all(map(_is_text, content)):
        message["content"] = "".join(part["text"] for part in content)
    return message


def _is_text(part: Any) -> bool:
    if not isinstance(part, Mapping) or part.get("type") != "text":
        return False
    return isinstance(part.get("text"), str)


def without_nulls(value: Any) -> Any:
    """Drop the nulls with which tables fill objects."""
    if isinstance(value, list):
        return [without_nulls(part) for part in value]
    if isinstance(value, Mapping):
        return {key: without_nulls(part) for key, part in value.items() if part is not None}
    return value


def check_characters(value: Any, place: str) -> None:
    """Raise ValueError if a text in `value` has half a character. `place` names it in the error."""
    if isinstance(value, str):
        half = _HALF.search(value)
        if half:
            raise ValueError(
                f"{place} has half a character, {half[0]!r}, at place {half.start()}: another "
                "program has cut an emoji or the like; repair the text"
            )
    elif isinstance(value, Mapping):
        check_characters(list(value.items()), place)
    elif isinstance(value, list | tuple):
        for part in value:
            check_characters(part, place)


# Answers


def answer_of(columns: Mapping[str, Any], data: DataConfig) -> str | None:
    """Return a row's answer as text, cut out by data.answer_pattern.

    None without data.answer_column. Raise ValueError if the pattern finds nothing.
    """
    name = data.answer_column
    if name is None:
        return None
    value = column(columns, data, "answer_column", ", or to null where there is no answer")
    answer = as_answer(value, name)
    if data.answer_pattern is None:
        return answer
    match = cut_out(answer, data.answer_pattern)
    if not match:
        raise ValueError(
            f"{data.section}.answer_pattern {data.answer_pattern.pattern!r} finds no answer in "
            f"column {name!r}: {answer!r:.80}"
        )
    return match


def cut_out(answer: str, pattern: re.Pattern[str]) -> str:
    """Return group 1 of the pattern's first match, without the spaces around it. "" if none."""
    match = pattern.search(answer)
    return (match[1] or "").strip() if match else ""


def as_answer(value: Any, name: str) -> str:
    """Return an answer in column `name` as text; a number is written in digits.

    72.0 becomes "72": pandas makes floats of all numbers in a column that has a null. Raise
    ValueError if it is neither text nor a number.
    """
    # A table may have a column of dates: they become text, as in 2026-01-31.
    value = _without_numpy(value)
    if type(value) is datetime.date:
        value = value.isoformat()

    if isinstance(value, str):
        check_characters(value, f"column {name!r}")
        if not value.strip():
            raise ValueError(f"column {name!r} is empty")
        return value

    # A bool is an int in Python, but no number in an answer.
    is_number = isinstance(value, int | float | Decimal) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value):
        fact = f"column {name!r} must be text or a number, got {value!r:.80}"
        if isinstance(value, datetime.datetime):
            fact += (
                ", which `datasets` makes of text in JSON, too: "
                "name the .jsonl file itself without hf:"
            )
        raise ValueError(f"{fact}; write it as text, or remove the row")
    if isinstance(value, float) and abs(value) > MOST_EXACT:
        raise ValueError(
            f"column {name!r} is {value!r}, a float that may have lost digits: write it as text"
        )
    # Write it without an exponent, trailing zeros or "-0": models answer with plain digits.
    digits = f"{Decimal(str(value)):f}"
    if "." in digits:
        digits = digits.rstrip("0").rstrip(".")
    return "0" if digits == "-0" else digits


# Chats: what is wrong with one


def checked(messages: Any, name: str, contents: tuple[type, ...] = (str,)) -> list[Message]:
    """Check the messages of a chat in column `name`, and return them without training marks.

    Only a turn that is shown but not taught keeps a mark: weight 0. contents: the types that a
    message's content may have. Raise ValueError if this is no chat.
    """
    if not (isinstance(messages, list) and messages):
        raise ValueError(
            f"column {name!r} must be text or a list of messages, got {messages!r:.80}"
        )
    sound = []
    for number, message in enumerate(messages):
        place = f"message {number} of column {name!r}"
        sound.append(_checked(message, place, name, contents))
    return sound


def _checked(message: Any, place: str, name: str, contents: tuple[type, ...]) -> Message:
    if not isinstance(message, Mapping):
        raise ValueError(_no_message(message, place))
    if "role" not in message and {"from", "value"} <= message.keys():
        advice = "rename 'from' to 'role' (human: user, gpt: assistant) and 'value' to 'content'"
        raise ValueError(f"{_no_message(message, place)}: {advice}")
    # The marks are left out here; at the end they become a weight of 0, or nothing.
    fields = {key: value for key, value in message.items() if key not in MARKS}
    role = fields.get("role")
    if role == "assistant":
        fields.setdefault("content", "")  # tool calls or a thought may be all of a turn
    content = fields.get("content")
    if not isinstance(role, str) or not isinstance(content, contents):
        advice = ""
        if isinstance(content, list):
            advice = ": only models that take images have parts that are no text"
        raise ValueError(f"{_no_message(message, place)}{advice}")

    # Templates compare roles letter by letter, and ignore keys that they do not know. Roles beyond
    # ROLES, such as "developer", are left to them.
    lower_case = role.strip().lower()
    known = WRONG_ROLES.get(lower_case, lower_case)
    if known in ROLES and role != known:
        raise ValueError(
            f"{place} has the role {role!r}, which chat templates do not know: write {known!r}"
        )
    if "function_call" in fields:
        raise ValueError(
            f"{place} has a function_call, which chat templates leave out: write it as tool_calls"
        )
    calls = fields.get("tool_calls", [])
    if not isinstance(calls, list):
        raise ValueError(f"{place} must have a list of tool_calls, got {calls!r:.80}")

    # An assistant's turn without text is empty only if it has nothing but role and content.
    is_blank = isinstance(content, str) and not content.strip()
    has_only_text = len(fields) == 2
    if is_blank and (role == "user" or (role == "assistant" and has_only_text)):
        raise ValueError(f"column {name!r} has an empty turn of the {role}: remove it")
    if not _is_taught(message, place):
        fields["weight"] = 0
    return fields


def _no_message(message: Any, place: str) -> str:
    return f"{place} must be {{'role': text, 'content': text}}, got {message!r:.80}"


def _is_taught(message: Message, place: str) -> bool:
    """Check whether training teaches a turn: yes, unless it is marked with 0."""
    marks = {key: message[key] for key in MARKS if key in message}
    if any(value not in (0, 1) for value in marks.values()):
        raise ValueError(
            f"{place} is marked {marks}, but a turn is taught (1) or only shown (0): mark it so"
        )
    if message["role"] != "assistant" and any(marks.values()):
        raise ValueError(
            f"{place} is marked {marks}, but only turns of the assistant are taught: "
            "remove the mark"
        )
    return all(marks.values())


def unmarked(message: Message) -> dict[str, Any]:
    """Return a message without the weight that `checked` leaves in it."""
    return {key: value for key, value in message.items() if key != "weight"}


# Rows that have a completion, too


def sample_of(row: Any, data: DataConfig) -> dict[str, Any]:
    """Read a row with a prompt and its completion, and return it as a run writes a rollout.

    `score` reads such rows from a file that no run wrote. The row has the columns that the section
    names, or else `prompt` and `answer`. If data.answer_pattern finds nothing in an answer, it is
    taken to be cut out already.
    """
    columns = columns_of(row, {data.prompt_column, "prompt", "messages"})
    prompt_column = data.prompt_column if data.prompt_column in columns else "prompt"
    answer_column = data.answer_column or "answer"
    if answer_column not in columns:
        answer_column = "answer"

    # Text and null stay. Chats are checked, and lose their training marks, as in a Prompt.
    sample = dict(columns)
    for name in (prompt_column, "messages"):
        if not isinstance(columns.get(name), str | None):
            messages = checked(columns[name], name, (str, list))
            sample[name] = [unmarked(message) for message in messages]
    sample["prompt"] = sample.get(prompt_column)

    answer = columns.get(answer_column)
    if answer is not None:
        answer = as_answer(answer, answer_column)
        if data.answer_pattern is not None:
            answer = cut_out(answer, data.answer_pattern) or answer

    used = (prompt_column, answer_column, "messages", "completion")
    return sample | {
        "answer": answer,
        "meta": {name: value for name, value in columns.items() if name not in used},
        "parts": {"env": columns.get("reward")},
        "failed": None,
    }
