"""Refusals: a status, a code for machines, a message and a hint, in one form on every route."""

from typing import TypeVar

import pydantic
from starlette.responses import JSONResponse

from hocket.errors import HocketError
from hocket.protocol import ErrorBody, ErrorResponse, SamplingParams

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
        self.body = ErrorBody(code=code, message=encodable(message[:2000]), hint=encodable(hint[:2000]))

    def response(self) -> JSONResponse:
        headers = {"WWW-Authenticate": "Bearer"} if self.status == 401 else None
        return JSONResponse(ErrorResponse(error=self.body).model_dump(), status_code=self.status, headers=headers)


def invalid(message: str, hint: str, *, code: str = "invalid_request") -> ApiError:
    """Return the error for a well-formed request that asks for something impossible."""
    return ApiError(422, code, message, hint)


def parse(message: type[M], body: bytes) -> M:
    """Read a message. Raises ApiError for what is not JSON (400) or not this message (422)."""
    if body.count(b"[") + body.count(b"{") > MAX_NESTED:
        raise invalid(f"body: more than {MAX_NESTED} lists and objects", "send fewer, in several requests")
    try:
        return message.model_validate_json(body)
    except pydantic.ValidationError as error:
        raise _explained(error) from None


def _explained(error: pydantic.ValidationError) -> ApiError:
    """Return the first of pydantic's errors in one sentence with the fix."""
    listed = "the fields and their types are listed at /docs"
    if error.error_count() > MAX_EXPLAINED:
        return invalid(f"body: {error.error_count()} fields are wrong or unknown", listed)
    errors = error.errors(include_url=False, include_input=False)
    first = errors[0]
    where = errors[0]["loc"]
    if first["type"] == "json_invalid":
        return ApiError(400, "malformed_json", first["msg"], "send one JSON object, encoded as UTF-8")
    if where[:1] == ("prompts",) and len(where) >= 3:
        # Each of the three kinds of a prompt complains in its own words; one sentence says it better.
        message = f"prompts.{where[1]}: a prompt must be text, a list of token ids, or a list of chat messages"
        return invalid(message, "token ids are whole numbers from 0, messages are objects")
    if not where:
        return invalid(f"body: {first['msg']}", "send one JSON object")
    unknown = first["type"] == "extra_forbidden"
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    message = f"{'.'.join(map(str, where))}: {'unknown field' if unknown else first['msg']}{more}"
    if unknown and error.title == "GenerateRequest" and where[0] in SamplingParams.model_fields:
        return invalid(message, f'put it under sampling: {{"prompts": [...], "sampling": {{"{where[0]}": ...}}}}')
    return invalid(message, listed)


def cause_of(error: Exception) -> str:
    """Return the first line of an error: vLLM appends the traceback of its worker."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def encodable(text: str) -> str:
    """Replace half surrogate pairs, which UTF-8 can't encode, by a question mark."""
    return text.encode(errors="replace").decode()
