"""Sample for other programs, and name the weight versions in their answers.

An answer that is JSON has the field `weight_versions`, and so has each event of a stream that ends
a choice or the answer. The header `x-weight-version` has the same numbers. A stream's header comes
before its tokens: it has the version that the engine held as the stream began.
"""

import asyncio
import contextlib
import functools
import json
import logging
import re
from collections.abc import AsyncGenerator
from contextvars import ContextVar
from typing import Any, TypeVar

from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hocket.errors import cause_of
from hocket.extras.openai_api.limits import Strangers
from hocket.server import vllm_api
from hocket.server.engine import Engine
from hocket.server.errors import ApiError, invalid

logger = logging.getLogger("hocket")
T = TypeVar("T")
ANSWER: ContextVar["ClientAnswer | None"] = ContextVar("answer", default=None)
"""The answer to the request that is being served."""

SEND_TIMEOUT_S = 60.0
"""Seconds for a client to read a part of a stream: until then it holds slots of the engine."""
MAX_ATTEMPTS = 8
"""How often a request is sampled that weight syncs abort."""
MAX_STORED = 1000
"""Responses that a client can ask for again, by their ids."""
FALSE = ("false", "0", "no", "off", "f", "n")
"""The words that vLLM reads as false in a query."""
FIELD = "weight_versions"
HEADER = "x-weight-version"
ENDS = re.compile(
    rb'"finish_reason": ?"|"choices": ?\[\]|event: response\.(completed|incomplete|failed)\n|'
    rb"event: message_(delta|stop)\n"
)
"""A part of each event that ends a choice or the answer. The event of its usage has no choices."""
ANTHROPIC_KINDS = {
    400: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""Kinds of errors of the messages API, by status."""
FLAG = re.compile(rb"(?<![\w-])--([a-z][a-z0-9]*(?:-[a-z0-9]+)*)")
"""A flag of vLLM's command line, which a user of hocket can't give."""


class SampledRoute:
    """An ASGI app around a route of vLLM: it names the weight versions that sampled an answer.

    It also has a request sampled again that a weight sync has aborted, says in each protocol's own
    form why an answer breaks off, and bounds how many requests of strangers are served at once.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        engine: Engine,
        strangers: Strangers,
        remembered: "Recent[set[int]]",
    ) -> None:
        self._app = app
        self._engine = engine
        self._strangers = strangers
        self._remembered = remembered  # the versions of stored responses, by their ids

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = ClientAnswer(send, scope["path"], self._engine)
        if scope["method"] == "GET":
            return await self._read_again(scope, receive, answer)

        sample = vllm_api.SAMPLE.get()
        with contextlib.ExitStack() as stack:
            if sample is None:  # no trainer's agent
                try:
                    stack.enter_context(self._strangers.request())
                except ApiError as error:
                    return await answer.fail(error)
                sample = functools.partial(sample_again, self._strangers)
            note = functools.partial(noted, answer, self._remembered, sample)
            vllm_api.SAMPLE.set(note)
            ANSWER.set(answer)
            try:
                await self._app(scope, receive, answer.send)
            except Exception as failure:
                # Once a route has begun a stream, no handler of errors can answer for it.
                if not answer.has_begun or isinstance(failure, ClientDisconnect):
                    raise
                answer.error = answer.error or _failure(failure)
                await answer.fail(answer.error)

    async def _read_again(self, scope: Scope, receive: Receive, answer: "ClientAnswer") -> None:
        """Answer with a stored response, whose id is the engine's, too."""
        # vLLM would begin the stream, and then fail: it keeps no events of such a response.
        if Request(scope).query_params.get("stream", "false").lower() not in FALSE:
            message = "a response is streamed only while it is sampled"
            raise ApiError(400, "no_stream", message, "leave out stream, and read it whole")
        answer.versions.update(self._remembered.get(scope["path_params"]["response_id"], ()))
        # Other versions than those that sampled it would be wrong: better none.
        answer.names_versions = bool(answer.versions)
        await self._app(scope, receive, answer.send)


def noted(
    answer: "ClientAnswer",
    remembered: "Recent[set[int]]",
    sample: vllm_api.Sample,
    generate: vllm_api.Generate,
    prompt: Any,
    params: Any,
    request_id: str,
) -> AsyncGenerator[Any, None]:
    """Sample, and note the weight versions of the tokens, or the error.

    A request that `sample` refuses is refused here, before a stream begins.
    """
    # vLLM adds the number of the request to the id of a response; other ids are not asked for.
    if request_id.startswith("resp_"):
        remembered[request_id.rpartition("_")[0]] = answer.versions
    try:
        outputs = sample(generate, prompt, params, request_id)
    except ApiError as error:
        answer.error = error
        raise
    is_constrained = getattr(params, "structured_outputs", None) is not None
    return _note_outputs(answer, outputs, is_constrained=is_constrained)


async def _note_outputs(
    answer: "ClientAnswer", outputs: AsyncGenerator[Any, None], *, is_constrained: bool
) -> AsyncGenerator[Any, None]:
    try:
        async with contextlib.aclosing(outputs):
            async for output in outputs:
                for completion in output.outputs:
                    # vLLM itself answers with an internal error where it can not compile a grammar.
                    if completion.finish_reason == "error" and is_constrained:
                        message = "the engine could not make a grammar of the structured output"
                        raise invalid(message, "send another schema, expression or grammar")
                    # They come with the last output of a completion.
                    spans = completion.weight_versions or ()
                    answer.versions.update(int(span.version) for span in spans)
                yield output
    except ApiError as error:
        answer.error = error
        raise


async def sample_again(
    strangers: Strangers,
    generate: vllm_api.Generate,
    prompt: Any,
    params: Any,
    request_id: str,
) -> AsyncGenerator[Any, None]:
    """Yield the outputs of a request; one that a weight sync aborts at its start begins again.

    Raises ApiError (503) where outputs were already yielded, which can't be taken back, and where
    weights come faster than the request can be sampled.
    """
    hint = "send the request again, or set sync.in_flight=keep"
    async with strangers.slots(params.n):
        for attempt in range(MAX_ATTEMPTS):
            has_yielded = False
            is_aborted = False
            attempt_id = f"{request_id}-again{attempt}" if attempt else request_id
            async with contextlib.aclosing(generate(params, attempt_id)) as outputs:
                async for output in outputs:
                    if any(done.finish_reason == "abort" for done in output.outputs):
                        is_aborted = True
                        break
                    has_yielded = True
                    yield output
            if not is_aborted:
                return
            if has_yielded:
                message = "new weights came (sync.in_flight=abort) and ended this stream"
                raise ApiError(503, "aborted", message, hint)
    message = f"new weights came (sync.in_flight=abort) and ended {MAX_ATTEMPTS} attempts at this"
    raise ApiError(503, "aborted", message, hint)


class Recent(dict[str, T]):
    """A dict that forgets the oldest key when it has more than MAX_STORED."""

    def __setitem__(self, key: str, value: T) -> None:
        super().__setitem__(key, value)
        if len(self) > MAX_STORED:
            del self[next(iter(self))]


class Responses(Recent[Any]):
    """The stored responses. It lacks those whose messages are forgotten.

    vLLM would go on from such a response without them, and say nothing.
    """

    def __init__(self, messages: Recent[Any]) -> None:
        super().__init__()
        self._messages = messages

    def get(self, key: str, default: Any = None) -> Any:
        """Get a response by its id, or the default."""
        return super().get(key, default) if key in self._messages else default


class ClientAnswer:
    """Send the answer of a route on to the client, with its weight versions in it."""

    def __init__(self, send: Send, path: str, engine: Engine) -> None:
        self.versions = set[int]()  # those of the tokens sampled so far
        self.names_versions = True
        self.error: ApiError | None = None  # the reason why the engine could not go on
        self._send = send
        self._path = path
        self._engine = engine
        self._start: Message | None = None  # held until the first part of the body
        self._is_stream = False
        self._has_ended = False
        self._rest = b""  # the beginning of a stream's event, or of a body

    async def send(self, message: Message) -> None:
        """Take a message of the route."""
        if self._has_ended:
            return
        if message["type"] == "http.response.start":
            self._start = message
            headers = MutableHeaders(raw=message["headers"])
            self._is_stream = headers.get("content-type", "").startswith("text/event-stream")
            return
        body = self._rest + message.get("body", b"")
        is_last = not message.get("more_body", False)
        if self._is_stream:
            if self.error is not None:
                return await self.fail(self.error)
            *events, self._rest = body.split(b"\n\n")
            body = b"".join(self._event(event) + b"\n\n" for event in events)
            if is_last:
                body += self._rest
            await self._begin()
            await self._send_in_time({**message, "body": body})
        elif not is_last:
            self._rest = body
        elif self.error is not None:
            await self.fail(self.error)
        else:
            body = self._whole(body)
            await self._begin(len(body))
            await self._send({"type": "http.response.body", "body": body})

    async def _send_in_time(self, message: Message) -> None:
        """Send a part of a stream. Raises ClientDisconnect where the client does not read it."""
        try:
            async with asyncio.timeout(SEND_TIMEOUT_S):
                await self._send(message)
        except TimeoutError:
            self._has_ended = True
            raise ClientDisconnect from None

    @property
    def has_begun(self) -> bool:
        """True once the route has begun its answer, whether or not the client has seen any of it."""
        return self._start is not None or self._is_stream

    async def fail(self, error: ApiError) -> None:
        """Answer with the error, or end a stream with it, in place of what vLLM makes of it."""
        self._has_ended = True
        if self._is_stream and self._start is None:
            body = error_event(self._path, error)
            await self._send({"type": "http.response.body", "body": body})
            return
        response = error.response()
        if self._path.endswith("/messages"):
            response = JSONResponse(anthropic_error(error), error.status, error.headers)
        await self._send(
            {"type": "http.response.start", "status": error.status, "headers": response.raw_headers}
        )
        await self._send({"type": "http.response.body", "body": response.body})

    async def _begin(self, length: int | None = None) -> None:
        """Send the status and the headers, unless that was done."""
        if self._start is None:
            return
        start = self._start
        self._start = None
        headers = MutableHeaders(raw=start["headers"])
        if start["status"] == 200 and self.names_versions:
            headers[HEADER] = ", ".join(map(str, self._numbers()))
        if length is not None:
            headers["content-length"] = str(length)
        await self._send(start)

    def _numbers(self) -> list[int]:
        """List the versions so far; before the first token, the one that the engine holds."""
        return sorted(self.versions) or [self._engine.version]

    def _whole(self, body: bytes) -> bytes:
        """Put the versions into an answer that is one JSON object."""
        assert self._start is not None
        if self._start["status"] != 200:
            return in_settings(body)
        if not self.names_versions or not body.endswith(b"}"):
            return body
        return body[:-1] + f', "{FIELD}": {json.dumps(self._numbers())}}}'.encode()

    def _event(self, event: bytes) -> bytes:
        """Put the versions into an event that ends a choice, or the answer."""
        if not ENDS.search(event):
            return event
        head, mark, data = event.partition(b"data: ")
        try:
            fields = json.loads(data)
        except ValueError:
            return event
        # The end of a response has the whole answer in it, as a client reads it.
        place = fields["response"] if isinstance(fields.get("response"), dict) else fields
        place[FIELD] = self._numbers()
        return head + mark + json.dumps(fields, separators=(",", ":")).encode()


def _failure(failure: Exception) -> ApiError:
    """Make the error of a stream in which vLLM raised something."""
    from vllm.exceptions import VLLMClientError

    cause = failure.__cause__ or failure
    if isinstance(cause, VLLMClientError | ValueError | TypeError):
        return ApiError(
            400, "refused_by_vllm", str(cause), "change the request as the message says"
        )
    logger.error("vLLM failed in a stream", exc_info=cause)
    message = f"{type(cause).__name__}: {cause_of(cause)}"
    return ApiError(500, "internal", message, "the server's log says more")


def error_event(path: str, error: ApiError) -> bytes:
    """Make the event that ends a stream of this route with an error."""
    text = f"{error}; {error.body.hint}"
    if path.endswith("/messages"):
        return b"event: error\ndata: " + json.dumps(anthropic_error(error)).encode() + b"\n\n"
    if path.endswith("/responses"):
        response = {"type": "error", "code": error.body.code, "message": text, "param": None}
        return b"event: error\ndata: " + json.dumps(response).encode() + b"\n\n"
    chunk = {"message": text, "type": error.body.code, "param": None, "code": error.status}
    return b"data: " + json.dumps({"error": chunk}).encode() + b"\n\ndata: [DONE]\n\n"


def anthropic_error(error: ApiError) -> dict[str, Any]:
    """Describe an error in the form of the messages API."""
    kind = ANTHROPIC_KINDS.get(error.status, "api_error")
    message = f"{error}; {error.body.hint}"
    return {"type": "error", "error": {"type": kind, "message": message}}


def hide_known(record: logging.LogRecord) -> bool:
    """Hide a traceback of vLLM's routes for an error that the client is told anyway."""
    answer = ANSWER.get()
    return record.exc_info is None or answer is None or answer.error is None


def in_settings(message: bytes) -> bytes:
    """Name the setting in place of each flag of vLLM in an error.

    >>> in_settings(b"set --max-logprobs")
    b'set server.engine.max_logprobs'
    """
    # hocket sets this one wherever there is a parser.
    message = message.replace(b"--enable-auto-tool-choice and ", b"")
    return FLAG.sub(lambda flag: b"server.engine." + flag[1].replace(b"-", b"_"), message)
