"""Read the bodies of vLLM's OpenAI-compatible routes before vLLM does, and refuse those that would hurt it.

Its own validation explains every wrong value, each in the words of ten kinds of messages: a body of 1 MiB took 6 GB.
"""

import json
from typing import Any

from hocket.protocol import MAX_COMPLETIONS, MAX_PROMPTS, MAX_SAMPLES
from hocket.server.errors import ApiError, invalid

MAX_BYTES = 16 << 20
MAX_VALUES = 20_000
"""Values in one body, prompts apart: texts, numbers, lists and objects of its messages and tools."""


def read(content: bytes) -> Any:
    """Return what a body says. Raises ApiError where vLLM should not see it; whether it makes sense, vLLM checks."""
    if len(content) > MAX_BYTES:
        raise ApiError(413, "body_too_large", f"the body is larger than {MAX_BYTES >> 20} MiB", "send less at a time")
    try:
        body = json.loads(content)
        json.dumps(body, ensure_ascii=False, allow_nan=False).encode()  # fails for half a surrogate pair and for NaN
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ApiError(400, "malformed_json", f"body: {reason}", "send one JSON object, encoded as UTF-8") from error
    if isinstance(body, dict):
        _check_values([value for name, value in body.items() if name != "prompt"])
        _check_size(body.get("prompt"), body.get("n"))
    return body


def _check_values(todo: list[Any]) -> None:
    count = 0
    while todo:
        value = todo.pop()
        count += 1
        todo += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        if count + len(todo) > MAX_VALUES:
            raise invalid(f"body: more than {MAX_VALUES} values", "send fewer or longer messages")


def _check_size(prompt: Any, n: Any) -> None:
    prompts = 1
    if isinstance(prompt, list) and not _are_tokens(prompt):
        prompts = len(prompt)
        if prompts > MAX_PROMPTS or not all(isinstance(one, str) or _are_tokens(one) for one in prompt):
            message = f"prompt: must be text, a list of token ids, or up to {MAX_PROMPTS} of them"
            raise invalid(message, "token ids are whole numbers from 0")
    if isinstance(n, int) and (n > MAX_SAMPLES or n * prompts > MAX_COMPLETIONS):
        message = f"n: {n} is more than {MAX_SAMPLES}, or all prompts together have more than {MAX_COMPLETIONS}"
        raise invalid(message, "send several requests")


def _are_tokens(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)
