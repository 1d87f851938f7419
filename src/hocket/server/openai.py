"""Guard vLLM's OpenAI-compatible routes: refuse bodies that would hurt, and say where vLLM fails.

vLLM explains each wrong value in ten ways: 1 MiB of them took 6 GB.
"""

import json
import logging
import re
from typing import Annotated, Any

import pydantic
import pydantic_core
from fastapi import Request
from fastapi.responses import Response

from hocket.common.tasks import run_in_thread
from hocket.errors import cause_of
from hocket.protocol import FAIL_FAST, MAX_PROMPTS, MAX_SAMPLES, TokenId
from hocket.server.errors import ApiError, check_count, invalid
from hocket.server.parts import Server, server_part

logger = logging.getLogger("hocket")

MAX_BYTES = 16 << 20
MAX_VALUES = 20_000
"""Values in one body, prompts apart: texts, numbers, lists and objects of its messages and tools."""
PATH = re.compile(r"(/sessions/[^/]+)?/v1/.*")
_TokenIds = Annotated[list[TokenId], FAIL_FAST]
_Prompts = Annotated[list[str | _TokenIds], pydantic.Field(max_length=MAX_PROMPTS, fail_fast=True)]


class _Sampled(pydantic.BaseModel):
    """What decides how much a body of /v1/completions has vLLM do."""

    prompt: str | _TokenIds | _Prompts | None = None
    n: int | None = pydantic.Field(1, le=MAX_SAMPLES)


@server_part("openai")
def install(server: Server) -> None:
    """Have the guard refuse such bodies and, while the engine is not ready, all requests there."""
    for failed in (AssertionError, AttributeError, LookupError):
        server.app.add_exception_handler(failed, _failed)

    async def check(content: bytes) -> None:
        server.engine.require_ready()
        if content:
            await run_in_thread(_check, content)

    server.guard.checks.append((PATH, check))


async def _failed(request: Request, error: Exception) -> Response:
    """Answer where Python failed; in vLLM's routes by a value that vLLM did not expect."""
    logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
    message = f"{type(error).__name__}: {cause_of(error)}"
    if request.url.path.startswith("/v1/"):
        hint = "look at the types of the body's fields"
        return ApiError(400, "refused_by_vllm", message, hint).response()
    return ApiError(500, "internal", message, "the server's log says more").response()


def _check(content: bytes) -> None:
    """Raise ApiError where vLLM should not see a body; whether it makes sense, vLLM checks."""
    if len(content) > MAX_BYTES:
        message = f"the body is larger than {MAX_BYTES >> 20} MiB"
        raise ApiError(413, "body_too_large", message, "send less at a time")
    try:
        body = pydantic_core.from_json(content)  # refuses half a surrogate pair, and deep nesting
        json.dumps(body, allow_nan=False)  # 1e999 is infinite, too
    except ValueError as error:
        hint = "send one JSON object, encoded as UTF-8"
        raise ApiError(400, "malformed_json", f"body: {error}", hint) from error
    if isinstance(body, dict):
        _check_prompts(body)
        _check_values([value for name, value in body.items() if name != "prompt"])


def _check_prompts(body: dict[str, Any]) -> None:
    try:
        sampled = _Sampled.model_validate(body)
    except pydantic.ValidationError as error:
        kinds = f"text, token ids, or up to {MAX_PROMPTS} of them"
        message = f"prompt must be {kinds}, and n at most {MAX_SAMPLES}"
        hint = "token ids are whole numbers from 0; send several requests"
        raise invalid(message, hint) from error
    prompts = sampled.prompt if isinstance(sampled.prompt, list) else []
    texts = [prompt for prompt in prompts if not isinstance(prompt, int)]
    check_count((sampled.n or 1) * len(texts))


def _check_values(values: list[Any]) -> None:
    """Raise ApiError for more than MAX_VALUES values, with all that they contain."""
    waiting = list(values)
    count = 0
    while waiting:
        value = waiting.pop()
        count += 1
        if count > MAX_VALUES:
            raise invalid(f"body: more than {MAX_VALUES} values", "send fewer or longer messages")
        if isinstance(value, dict):
            waiting.extend(value.values())
        elif isinstance(value, list):
            waiting.extend(value)
