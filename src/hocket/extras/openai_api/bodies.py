"""Guard vLLM's OpenAI-compatible routes against bodies that take too much memory or time.

vLLM explains each wrong value in ten ways: 1 MiB of wrong values took 6 GB. This part also answers
in hocket's form where vLLM's code fails on a value that it did not expect.
"""

import json
import logging
from typing import Annotated, Any

import pydantic
import pydantic_core
from fastapi import Request
from fastapi.responses import Response

from hocket.errors import cause_of
from hocket.extras.openai_api.models import require_name, served_names
from hocket.protocol import FAIL_FAST, MAX_PROMPTS, MAX_SAMPLES, TokenId
from hocket.server.errors import ApiError, check_count, invalid
from hocket.server.middleware import read_body
from hocket.server.parts import CLIENT_PATHS, Server

logger = logging.getLogger("hocket")

MAX_BYTES = 16 << 20
MAX_STORED_BYTES = 256 << 10  # of a request whose response stays in memory
MAX_VALUES = 20_000
"""Most values in one body: texts, numbers, lists and objects. Prompts have limits of their own."""
_TokenIds = Annotated[list[TokenId], FAIL_FAST]
_Prompts = Annotated[list[str | _TokenIds], pydantic.Field(max_length=MAX_PROMPTS, fail_fast=True)]


class _Sampled(pydantic.BaseModel):
    """The fields of a body of /v1/completions that decide how much vLLM has to do."""

    prompt: str | _TokenIds | _Prompts | None = None
    n: int | None = pydantic.Field(1, le=MAX_SAMPLES)


def install(server: Server) -> None:
    """Have the guard check the bodies, and refuse them all while the engine is not ready."""
    for error_type in (AssertionError, AttributeError, LookupError):
        server.app.add_exception_handler(error_type, _failed)

    async def check(path: str, content: bytes) -> None:
        server.engine.require_ready()
        # An agent may ask for any model; its session answers with the one that is trained.
        names = [] if path.startswith("/sessions/") else served_names(server)
        if content:
            await read_body(_check, content, names, is_stored=path.endswith("/v1/responses"))

    server.guard.checks.append((CLIENT_PATHS, check))


async def _failed(request: Request, error: Exception) -> Response:
    """Answer a request on which Python code failed.

    In vLLM's routes the cause is a value that vLLM did not expect, so the client is to blame.
    """
    logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
    message = f"{type(error).__name__}: {cause_of(error)}"
    if request.url.path.startswith("/v1/"):
        hint = "look at the types of the body's fields"
        return ApiError(400, "refused_by_vllm", message, hint).response()
    return ApiError(500, "internal", message, "the server's log says more").response()


def _check(content: bytes, names: list[str], *, is_stored: bool = False) -> None:
    """Raise ApiError for a body that vLLM should not see. vLLM itself checks the fields' values."""
    if len(content) > MAX_BYTES:
        message = f"the body is larger than {MAX_BYTES >> 20} MiB"
        raise ApiError(413, "body_too_large", message, "send less at a time")
    try:
        # This parser also refuses half a surrogate pair, and deep nesting.
        body = pydantic_core.from_json(content)
        # Refuse numbers that are not finite; 1e999 is infinite, too.
        json.dumps(body, allow_nan=False)
    except ValueError as error:
        hint = "send one JSON object, encoded as UTF-8"
        raise ApiError(400, "malformed_json", f"body: {error}", hint) from error
    if isinstance(body, dict):
        _check_prompts(body)
        name = body.get("model")
        # An empty name stands for the served model, as no name does.
        if name and isinstance(name, str) and names:
            require_name(name, names)
        if is_stored:
            _check_stored(content, body)
        if body.get("background"):
            message = (
                "background: an answer that is fetched later can't be cancelled with its client"
            )
            hint = "leave it out, and wait for the answer or stream it"
            raise ApiError(400, "no_background", message, hint)
        _check_values([value for name, value in body.items() if name != "prompt"])


def _check_stored(content: bytes, body: dict[str, Any]) -> None:
    """Raise ApiError for a request of a response that would take much memory, or another's id."""
    if "request_id" in body:
        message = "request_id: the server gives each response an id of its own"
        raise ApiError(400, "own_id", message, "leave it out")
    if len(content) > MAX_STORED_BYTES and body.get("store") is not False:
        message = f"a request whose response is stored may have {MAX_STORED_BYTES >> 10} KiB"
        raise ApiError(413, "body_too_large", message, 'send "store": false, or less at a time')


def _check_prompts(body: dict[str, Any]) -> None:
    """Raise ApiError for prompts in a wrong form, or too many completions of them."""
    try:
        sampled = _Sampled.model_validate(body)
    except pydantic.ValidationError as error:
        kinds = f"text, token ids, or up to {MAX_PROMPTS} of them"
        message = f"prompt must be {kinds}, and n at most {MAX_SAMPLES}"
        hint = "token ids are whole numbers from 0; send several requests"
        raise invalid(message, hint) from error
    # A list holds several prompts, or the token ids of a single one.
    prompts = sampled.prompt if isinstance(sampled.prompt, list) else []
    texts = [prompt for prompt in prompts if not isinstance(prompt, int)]
    check_count((sampled.n or 1) * len(texts))


def _check_values(values: list[Any]) -> None:
    """Raise ApiError for more than MAX_VALUES values, with those inside of lists and objects."""
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
