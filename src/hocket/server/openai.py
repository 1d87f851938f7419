"""Refuse bodies that would hurt vLLM: it explains each wrong value in ten ways, and 1 MiB of them took 6 GB."""

import json
import re
from typing import Annotated, Any

import pydantic
import pydantic_core

from hocket.common.tasks import run_in_thread
from hocket.protocol import FAIL_FAST, MAX_PROMPTS, MAX_SAMPLES, TokenId
from hocket.server.errors import ApiError, check_count, invalid
from hocket.server.parts import Server, server_part

MAX_BYTES = 16 << 20
MAX_VALUES = 20_000
"""Values in one body, prompts apart: texts, numbers, lists and objects of its messages and tools."""
PATH = re.compile(r"(/sessions/[^/]+)?/v1/.*")
_TokenIds = Annotated[list[TokenId], FAIL_FAST]
_Prompts = Annotated[list[str | _TokenIds], pydantic.Field(max_length=MAX_PROMPTS, fail_fast=True)]


class _Asked(pydantic.BaseModel):
    """What decides how much a body of /v1/completions has vLLM do."""

    prompt: str | _TokenIds | _Prompts | None = None
    n: int | None = pydantic.Field(1, le=MAX_SAMPLES)


@server_part("openai")
def install(server: Server) -> None:
    """Have the guard refuse such bodies and, while the engine is not ready, all requests there."""

    async def check(content: bytes) -> None:
        server.engine.require_ready()
        if content:
            await run_in_thread(_check, content)

    server.guard.checks.append((PATH, check))


def _check(content: bytes) -> None:
    """Raise ApiError where vLLM should not see a body; whether it makes sense, vLLM checks."""
    if len(content) > MAX_BYTES:
        raise ApiError(413, "body_too_large", f"the body is larger than {MAX_BYTES >> 20} MiB", "send less at a time")
    try:
        body = pydantic_core.from_json(content)  # not of half a surrogate pair, nor nested deeply
        json.dumps(body, allow_nan=False)  # 1e999 is infinite, too
    except ValueError as error:
        raise ApiError(400, "malformed_json", f"body: {error}", "send one JSON object, encoded as UTF-8") from error
    if isinstance(body, dict):
        _check_prompts(body)
        _check_values([{**body, "prompt": None}])


def _check_prompts(body: dict[str, Any]) -> None:
    try:
        asked = _Asked.model_validate(body)
    except pydantic.ValidationError as error:
        message = f"prompt must be text, token ids, or up to {MAX_PROMPTS} of them, and n at most {MAX_SAMPLES}"
        raise invalid(message, "token ids are whole numbers from 0; send several requests") from error
    prompts = asked.prompt if isinstance(asked.prompt, list) else []
    check_count((asked.n or 1) * sum(not isinstance(one, int) for one in prompts))


def _check_values(values: list[Any]) -> None:
    for value in values:  # it grows meanwhile
        if isinstance(value, dict):
            values += value.values()
        elif isinstance(value, list):
            values += value
        if len(values) > MAX_VALUES:
            raise invalid(f"body: more than {MAX_VALUES} values", "send fewer or longer messages")
