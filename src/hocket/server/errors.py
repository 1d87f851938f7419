"""Refusals with a status, a code for machines, a message and a hint; every route answers them in the same form."""

from typing import Any, Self

import pydantic
from starlette.responses import JSONResponse

from hocket.errors import HocketError
from hocket.protocol import ErrorBody, ErrorResponse


class ApiError(HocketError):
    """A request that is answered with an error.

    Args:
        status: HTTP status, 400 or more.
        code: one word for machines.
        message: what is wrong.
        hint: what to do about it.
    """

    def __init__(self, status: int, code: str, message: str, hint: str) -> None:
        super().__init__(message)
        self.status = status
        self.body = ErrorBody(code=code, message=_printable(message), hint=_printable(hint))

    @classmethod
    def of(cls, status: int, body: ErrorBody) -> Self:
        """Returns the error that says this."""
        return cls(status, body.code, body.message, body.hint)

    def response(self) -> JSONResponse:
        """Returns the HTTP answer."""
        headers = {"WWW-Authenticate": "Bearer"} if self.status == 401 else None
        return JSONResponse(ErrorResponse(error=self.body).model_dump(), status_code=self.status, headers=headers)


def invalid(message: str, hint: str, *, code: str = "invalid_request") -> ApiError:
    """Returns the error for a request that is well formed but asks for something impossible."""
    return ApiError(422, code, message, hint)


def from_validation(error: pydantic.ValidationError) -> ApiError:
    """Returns the error for a body that is no JSON (400) or not the message it should be (422)."""
    items = error.errors(include_url=False, include_context=False, include_input=False)
    first = items[0]
    if first["type"] == "json_invalid":
        return ApiError(400, "malformed_json", first["msg"], "send one JSON object, encoded as UTF-8")
    where = _field(first["loc"])
    if len(first["loc"]) >= 3 and first["loc"][0] == "prompts":
        # The three kinds of a prompt each complain in their own words; one sentence says it better.
        message = "a prompt must be text, a list of token ids, or a list of chat messages"
        return invalid(
            f"prompts.{first['loc'][1]}: {message}", "token ids are whole numbers from 0, messages are objects"
        )
    known = "unknown field" if first["type"] == "extra_forbidden" else first["msg"]
    more = f" (and {len(items) - 1} more)" if len(items) > 1 else ""
    return invalid(f"{where}: {known}{more}" if where else known, "the fields and their types are listed at /docs")


def _field(location: tuple[Any, ...]) -> str:
    return ".".join(str(part) for part in location)


def _printable(text: str, limit: int = 2000) -> str:
    """Bounds a message and replaces what no UTF-8 answer can carry."""
    return text[:limit].encode("utf-8", "replace").decode("utf-8")
