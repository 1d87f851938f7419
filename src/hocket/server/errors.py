"""Define refusals: a status, a code for machines, a message and a hint, in one form on every route."""

from collections.abc import Mapping, Sequence
from typing import Any

from starlette.responses import JSONResponse

from hocket.errors import HocketError
from hocket.protocol import ErrorBody, ErrorResponse


class ApiError(HocketError):
    """A request that is answered with an HTTP status and an ErrorBody."""

    def __init__(self, status: int, code: str, message: str, hint: str) -> None:
        super().__init__(message)
        self.status = status
        self.body = ErrorBody(code=code, message=_printable(message), hint=_printable(hint))

    def response(self) -> JSONResponse:
        """Return the HTTP answer."""
        headers = {"WWW-Authenticate": "Bearer"} if self.status == 401 else None
        return JSONResponse(ErrorResponse(error=self.body).model_dump(), status_code=self.status, headers=headers)


def invalid(message: str, hint: str, *, code: str = "invalid_request") -> ApiError:
    """Return the error for a request that is well formed but asks for something impossible."""
    return ApiError(422, code, message, hint)


def from_validation(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """Return the error for a body that is not JSON (400) or not the expected message (422), from pydantic's errors."""
    first = errors[0]
    where = first["loc"][1:] if first["loc"][:1] == ("body",) else first["loc"]
    if first["type"] == "json_invalid":
        return ApiError(400, "malformed_json", first["msg"], "send one JSON object, encoded as UTF-8")
    if len(where) >= 3 and where[0] == "prompts":
        # Each of the three kinds of a prompt complains in its own words; one sentence says it better.
        message = f"prompts.{where[1]}: a prompt must be text, a list of token ids, or a list of chat messages"
        return invalid(message, "token ids are whole numbers from 0, messages are objects")
    if not where:
        return invalid(f"body: {first['msg']}", "send one JSON object")
    wrong = "unknown field" if first["type"] == "extra_forbidden" else first["msg"]
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    return invalid(f"{'.'.join(map(str, where))}: {wrong}{more}", "the fields and their types are listed at /docs")


def cause_of(error: Exception) -> str:
    """Return the first line of an error: vLLM appends the traceback of its worker."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _printable(text: str, limit: int = 2000) -> str:
    """Cut a message to a limit and replace characters that UTF-8 can't encode."""
    return text[:limit].encode("utf-8", "replace").decode("utf-8")
