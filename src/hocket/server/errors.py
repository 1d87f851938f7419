"""Refuse requests in one form on every route: status, code, message and hint."""

import math
from collections.abc import Sequence
from typing import TypeVar

import pydantic
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from hocket.errors import HocketError
from hocket.protocol import MAX_COMPLETIONS, ErrorBody, ErrorResponse, SamplingParams

M = TypeVar("M", bound=pydantic.BaseModel)

MAX_NESTED = 1 << 21
"""Lists and objects in one body: an empty one takes two bytes there, and two hundred in memory."""
MAX_EXPLAINED = 1000
"""Errors in one body up to which they are looked at; each takes a kilobyte."""


class ApiError(HocketError):
    """A request that is answered with an HTTP status and an ErrorBody."""

    def __init__(self, status: int, code: str, message: str, hint: str) -> None:
        super().__init__(message)
        self.status = status
        self.body = ErrorBody(
            code=code, message=encodable(message[:2000]), hint=encodable(hint[:2000])
        )

    def response(self) -> JSONResponse:
        headers = {"WWW-Authenticate": "Bearer"} if self.status == 401 else None
        return JSONResponse(
            ErrorResponse(error=self.body).model_dump(), status_code=self.status, headers=headers
        )


def invalid(message: str, hint: str, *, code: str = "invalid_request") -> ApiError:
    """Return the error of a well-formed request for something impossible."""
    return ApiError(422, code, message, hint)


def check_count(completions: int) -> None:
    if completions > MAX_COMPLETIONS:
        message = f"{completions} completions are more than the {MAX_COMPLETIONS} of one request"
        raise invalid(message, "send several")


def check_finite(logprobs: Sequence[float]) -> None:
    if not math.isfinite(sum(logprobs)):
        raise ApiError(
            500, "not_finite", "the weights give log-probs that are not finite", "publish good ones"
        )


def parse(message: type[M], body: bytes) -> M:
    """Read a message. Raises ApiError for what is not JSON (400) or not this message (422)."""
    if body.count(b"[") + body.count(b"{") > MAX_NESTED:
        raise invalid(
            f"body: more than {MAX_NESTED} lists and objects", "send fewer, in several requests"
        )
    try:
        return message.model_validate_json(body)
    except pydantic.ValidationError as error:
        raise _explained(error) from None


def _explained(error: pydantic.ValidationError) -> ApiError:
    """Return the most specific of pydantic's errors in one sentence with the fix."""
    hint = "the fields and their types are listed at /docs"
    if error.error_count() > MAX_EXPLAINED:
        return invalid(f"body: {error.error_count()} fields are wrong or unknown", hint)
    errors = error.errors(include_url=False, include_input=False)
    wrong = max(errors, key=lambda one: len(one["loc"]))
    if wrong["type"] == "json_invalid":
        return ApiError(
            400, "malformed_json", wrong["msg"], "send one JSON object, encoded as UTF-8"
        )
    message = wrong["msg"]
    where = wrong["loc"]
    if (
        where[:1] == ("prompts",) and len(where) > 2
    ):  # each of the four kinds complains; ("prompts", 0, kind, ...)
        where = (
            *where[:2],
            *(part for part in where[3:] if part != "str" and "[" not in str(part)),
        )
        hint = "a message has a role, a content that is text or parts, and maybe name, tool_calls and tool_call_id"
        if len(where) < 4:  # it is no field of a message
            where = where[:2]
            message = "a prompt must be text, a list of token ids, or a list of chat messages, or token_ids and images"
            hint = "token ids are whole numbers from 0, messages are objects"
    if wrong["type"] == "extra_forbidden":
        message = "unknown field"
        if error.title == "GenerateRequest" and where[0] in SamplingParams.model_fields:
            hint = f'put it under sampling: {{"prompts": [...], "sampling": {{"{where[0]}": ...}}}}'
    return invalid(f"{'.'.join(map(str, where)) or 'body'}: {message}", hint)


async def http_error(request: Request, error: Exception) -> Response:
    """Answer an HTTPException."""
    assert isinstance(error, HTTPException)
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "http_error")
    response = ApiError(
        error.status_code, code, str(error.detail), "the routes are listed at /docs"
    ).response()
    response.headers.update(error.headers or {})
    return response


def encodable(text: str) -> str:
    """Replace half surrogate pairs, which UTF-8 can't encode, by a question mark."""
    return text.encode(errors="replace").decode()
