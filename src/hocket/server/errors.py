"""Refuse requests in the same form on every route: status, code, message and hint."""

import math
from collections.abc import Mapping, Sequence
from typing import TypeVar

import pydantic
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Match

from hocket.errors import HocketError
from hocket.protocol import MAX_COMPLETIONS, ErrorBody, ErrorResponse, SamplingParams

M = TypeVar("M", bound=pydantic.BaseModel)

MAX_NESTED = 1 << 21
"""Most lists and objects in one body: an empty one takes 2 bytes there, and 200 in memory."""
MAX_EXPLAINED = 1000
"""Most errors in one body that are looked at one by one; each takes a kilobyte of memory."""


class ApiError(HocketError):
    """The reason why a request is refused, with the HTTP status and the ErrorBody of its answer.

    Example:

        >>> error = ApiError(404, "no_such_version", "there is no 'v7'", "publish it first")
        >>> error.response().status_code
        404
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        hint: str,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = {"WWW-Authenticate": "Bearer"} if status == 401 else headers
        message = encodable(message[:2000])
        self.body = ErrorBody(code=code, message=message, hint=encodable(hint[:2000]))

    def response(self) -> JSONResponse:
        """Make the answer to the request."""
        content = ErrorResponse(error=self.body).model_dump()
        return JSONResponse(content, status_code=self.status, headers=self.headers)


def invalid(message: str, hint: str, *, code: str = "invalid_request") -> ApiError:
    """Make the error of a well-formed request that can't be fulfilled."""
    return ApiError(422, code, message, hint)


def check_count(completions: int) -> None:
    """Raise ApiError for more completions than a request may have."""
    if completions > MAX_COMPLETIONS:
        message = f"{completions} completions are more than the {MAX_COMPLETIONS} of one request"
        raise invalid(message, "send several")


def check_finite(logprobs: Sequence[float]) -> None:
    """Raise ApiError where a log-prob is not finite."""
    if not math.isfinite(sum(logprobs)):
        message = "the weights give log-probs that are not finite"
        raise ApiError(500, "not_finite", message, "publish good ones")


def parse(message_type: type[M], body: bytes) -> M:
    """Read a message. Raises ApiError for what is not JSON (400) or not this message (422)."""
    if body.count(b"[") + body.count(b"{") > MAX_NESTED:
        message = f"body: more than {MAX_NESTED} lists and objects"
        raise invalid(message, "send fewer, in several requests")
    try:
        return message_type.model_validate_json(body)
    except pydantic.ValidationError as error:
        raise _explained(error) from None


def _explained(error: pydantic.ValidationError) -> ApiError:
    """Explain the most specific of pydantic's errors in one sentence, with the fix."""
    hint = "the fields and their types are listed at /docs"
    if error.error_count() > MAX_EXPLAINED:
        return invalid(f"body: {error.error_count()} fields are wrong or unknown", hint)

    # The most specific error is the first one with the longest path.
    errors = error.errors(include_url=False, include_input=False)
    details = max(errors, key=lambda item: len(item["loc"]))
    message = details["msg"]
    path = details["loc"]
    if details["type"] == "json_invalid":
        return ApiError(400, "malformed_json", message, "send one JSON object, encoded as UTF-8")

    # pydantic lists an error for each kind of prompt, with the path ("prompts", number, kind, ...).
    # Leave out the kinds, such as "str" and "list[int]": they are no fields.
    if path[:1] == ("prompts",) and len(path) > 2:
        fields = [part for part in path[3:] if part != "str" and "[" not in str(part)]
        path = path[:2] + tuple(fields)
        hint = (
            "a message has a role, a content that is text or parts, and maybe name, tool_calls and "
            "tool_call_id"
        )
        if len(path) < 4:  # no field of a message is wrong, but the prompt itself
            path = path[:2]
            message = (
                "a prompt must be text, a list of token ids, or a list of chat messages, or "
                "token_ids and images"
            )
            hint = "token ids are whole numbers from 0, messages are objects"
    if details["type"] == "extra_forbidden":
        message = "unknown field"
        if error.title == "GenerateRequest" and path[0] in SamplingParams.model_fields:
            hint = f'put it under sampling: {{"prompts": [...], "sampling": {{"{path[0]}": ...}}}}'
    return invalid(f"{'.'.join(map(str, path)) or 'body'}: {message}", hint)


async def http_error(request: Request, error: Exception) -> Response:
    """Answer an HTTPException of FastAPI or vLLM in hocket's form."""
    assert isinstance(error, HTTPException)
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "http_error")
    hint = "the routes are listed at /docs"
    response = ApiError(error.status_code, code, str(error.detail), hint).response()
    response.headers.update(error.headers or {})
    if error.status_code == 405:
        response.headers["Allow"] = ", ".join(sorted(_allowed(request)))
    return response


def _allowed(request: Request) -> set[str]:
    """List the methods of all routes at a request's path; each route names only its own."""
    methods = set[str]()
    for route in request.app.routes:
        match, _ = route.matches(request.scope)
        if match is not Match.NONE:
            methods.update(getattr(route, "methods", None) or ())
    return methods


def encodable(text: str) -> str:
    """Replace each half of a surrogate pair, which UTF-8 can't encode, by a question mark."""
    return text.encode(errors="replace").decode()
