"""Stand before vLLM's OpenAI-compatible routes: find the session of a request, and refuse bodies that would hurt vLLM.

Its own validation explains every wrong value, each in the words of ten kinds of messages: a body of 1 MiB took 6 GB.
"""

import contextlib
import json
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hocket.common.tasks import run_in_thread
from hocket.protocol import MAX_COMPLETIONS, MAX_PROMPTS, MAX_SAMPLES
from hocket.server.errors import ApiError, invalid
from hocket.server.middleware import replay
from hocket.server.sessions import CURRENT, PATH, OpenSession, OpenSessions

MAX_BYTES = 16 << 20
MAX_VALUES = 20_000
"""Values in one body, prompts apart: texts, numbers, lists and objects of its messages and tools."""
ROUTES = frozenset({("POST", "/v1/chat/completions"), ("POST", "/v1/completions"), ("GET", "/v1/models")})
"""The routes of vLLM that an agent may use."""
TOO_LONG = frozenset({"input_tokens", "input_text"})
"""Parameters that vLLM's routes blame for a prompt that leaves no room for an answer."""


class RouteSessions:
    """Send requests to /sessions/ID/v1/... on to vLLM's own /v1/..., in that session and with the name `model`.

    Bodies that would hurt vLLM get no further, on its own routes too.
    """

    def __init__(self, app: ASGIApp, sessions: OpenSessions, model: str) -> None:
        self.app = app
        self._sessions = sessions
        self._model = model

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        match = PATH.fullmatch(scope["path"]) if scope["type"] == "http" else None
        session = body = None
        if match is not None and scope["method"] == "POST":
            message = await receive()  # it has the whole body
            body = await run_in_thread(_read, message.get("body", b""))
            receive = replay(message, receive)
        if match is not None and match["id"] is not None:
            session = self._sessions.get(match["id"])
            if (scope["method"], match["route"]) not in ROUTES:
                known = ", ".join(sorted(f"{method} {route}" for method, route in ROUTES))
                text = f"a session has no {scope['method']} {match['route']}"
                raise ApiError(404, "not_found", text, f"it has {known}")
            if isinstance(body, dict):
                message["body"] = json.dumps(self._checked(body)).encode()
            scope = {**scope, "path": match["route"], "raw_path": match["route"].encode()}
            send = _watched(send, session)
        # None is set, too: a pipelined request would inherit the context of the one before it on its connection.
        token = CURRENT.set(session)
        try:
            await self.app(scope, receive, send)
        finally:
            CURRENT.reset(token)

    def _checked(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return a body with the right name of the model. Raises ApiError where it can't be recorded."""
        wrong = [name for name in ("n", "best_of") if body.get(name) not in (None, 1)]
        wrong += [name for name in ("use_beam_search", "echo") if body.get(name)]
        wrong += [name for name in ("max_tokens", "max_completion_tokens") if body.get(name) == 0]
        if wrong:
            reason = f"{', '.join(wrong)}: only one sampled completion per call can be trained"
            raise ApiError(400, "not_recorded", reason, "leave it out")
        return body | {"model": self._model}


def _watched(send: Send, session: OpenSession) -> Send:
    """Return a send that marks the session as cut off where vLLM itself refuses a prompt as too long."""
    refused = False

    async def watched(message: Message) -> None:
        nonlocal refused
        if message["type"] == "http.response.start":
            refused = message["status"] == 400
        elif refused:
            with contextlib.suppress(ValueError, KeyError, TypeError):  # an error of another kind
                session.cut_off |= json.loads(message["body"])["error"]["param"] in TOO_LONG
        await send(message)

    return watched


def _read(content: bytes) -> Any:
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
