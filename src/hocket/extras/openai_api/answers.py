"""Sample for other programs, and name the weight versions in their answers.

An answer that is JSON has the field `weight_versions`, and so has each event of a stream that ends
a choice or the answer. The header `x-weight-version` has the same numbers. A stream's header comes
before its tokens: it has the version that the engine held as the stream began.
"""

import contextlib
import functools
import json
import re
from collections.abc import AsyncGenerator, Collection
from typing import Any, TypeVar

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hocket.extras.openai_api.limits import Strangers
from hocket.server import vllm_api
from hocket.server.engine import Engine
from hocket.server.errors import ApiError

T = TypeVar("T")

MAX_STORED = 1000
"""Responses that a client can ask for again, by their ids."""
FIELD = "weight_versions"
HEADER = "x-weight-version"
ENDS = re.compile(
    rb'"finish_reason": ?"|"usage": ?{|event: response\.(completed|incomplete|failed)\n|'
    rb"event: message_stop\n"
)
"""A part of each event that ends a choice, the answer, or tells the tokens that it took."""
FLAG = re.compile(rb"(?<![\w-])--([a-z][a-z0-9]*(?:-[a-z0-9]+)*)")
"""A flag of vLLM's command line, which a user of hocket can't give."""


class Named:
    """An ASGI app around a route of vLLM: it names the weight versions that sampled an answer.

    It also has a request sampled again that a weight sync has aborted, and bounds how many requests
    of strangers are served at once.
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
        versions = set[int]()
        answer = Answer(send, versions, self._engine)
        # A stored response is read again under its id, which is the engine's, too.
        if scope["method"] == "GET":
            versions.update(self._remembered.get(scope["path_params"].get("response_id"), ()))
            return await self._app(scope, receive, answer.send)
        session_sample = vllm_api.SAMPLE.get()
        if session_sample is not None:  # a trainer's agent
            note = functools.partial(noted, versions, self._remembered, session_sample)
            vllm_api.SAMPLE.set(note)
            return await self._app(scope, receive, answer.send)
        with self._strangers.request():
            sample = functools.partial(sample_again, self._strangers)
            note = functools.partial(noted, versions, self._remembered, sample)
            vllm_api.SAMPLE.set(note)
            await self._app(scope, receive, answer.send)


async def noted(
    versions: set[int],
    remembered: "Recent[set[int]]",
    sample: vllm_api.Sample,
    generate: vllm_api.Generate,
    prompt: Any,
    params: Any,
    request_id: str,
) -> AsyncGenerator[Any, None]:
    """Yield the outputs of `sample`, and note the weight versions of their tokens."""
    # vLLM adds the number of the request to the id of a response; other ids are not asked for.
    remembered[request_id.rpartition("_")[0]] = versions
    async with contextlib.aclosing(sample(generate, prompt, params, request_id)) as outputs:
        async for output in outputs:
            for completion in output.outputs:
                # They come with the last output of a completion.
                versions.update(int(span.version) for span in completion.weight_versions or ())
            yield output


async def sample_again(
    strangers: Strangers,
    generate: vllm_api.Generate,
    prompt: Any,
    params: Any,
    request_id: str,
) -> AsyncGenerator[Any, None]:
    """Yield the outputs of a request; one that a weight sync aborts at its start begins again.

    Raises vLLM's RetryableRequestError (503) where outputs were already yielded: they can't be
    taken back.
    """
    from vllm.exceptions import RetryableRequestError
    from vllm.sampling_params import RequestOutputKind

    is_stream = params.output_kind is not RequestOutputKind.FINAL_ONLY
    async with strangers.slots:
        attempt = 0
        while True:
            has_yielded = False
            is_aborted = False
            try:
                attempt_id = f"{request_id}-again{attempt}" if attempt else request_id
                async with contextlib.aclosing(generate(params, attempt_id)) as outputs:
                    async for output in outputs:
                        if any(done.finish_reason == "abort" for done in output.outputs):
                            is_aborted = True
                            break
                        has_yielded = True
                        yield output
            except ApiError as error:
                # A stream has its status already: vLLM writes its own errors as an event, and a
                # traceback to the log for any other.
                if is_stream and error.status == 503:
                    raise RetryableRequestError(f"{error}; {error.body.hint}") from error
                raise
            if not is_aborted:
                return
            if has_yielded:
                raise RetryableRequestError(
                    "new weights came (sync.in_flight=abort) and ended this stream: send the "
                    "request again, or set sync.in_flight=keep"
                )
            attempt += 1


class Recent(dict[str, T]):
    """A dict that forgets the oldest key when it has more than MAX_STORED."""

    def __setitem__(self, key: str, value: T) -> None:
        super().__setitem__(key, value)
        if len(self) > MAX_STORED:
            del self[next(iter(self))]


class Answer:
    """Send the answer of a route on to the client, with its weight versions in it."""

    def __init__(self, send: Send, versions: Collection[int], engine: Engine) -> None:
        self._send = send
        self._versions = versions
        self._engine = engine
        self._start: Message | None = None  # held until the first versions are known
        self._is_stream = False
        self._rest = b""  # the beginning of a stream's event, or of a body

    async def send(self, message: Message) -> None:
        """Take a message of the route."""
        if message["type"] == "http.response.start":
            self._start = message
            headers = MutableHeaders(raw=message["headers"])
            self._is_stream = headers.get("content-type", "").startswith("text/event-stream")
            return
        body = message.get("body", b"")
        is_last = not message.get("more_body", False)
        if self._is_stream:
            *events, self._rest = (self._rest + body).split(b"\n\n")
            body = b"".join(self._event(event) + b"\n\n" for event in events)
            if is_last:
                body += self._rest
        else:
            self._rest += body
            if not is_last:
                return
            body = self._whole(self._rest)
        await self._begin(len(body) if not self._is_stream else None)
        await self._send({**message, "body": body})

    async def _begin(self, length: int | None) -> None:
        """Send the status and the headers, unless that was done."""
        if self._start is None:
            return
        start = self._start
        self._start = None
        headers = MutableHeaders(raw=start["headers"])
        if start["status"] == 200:
            headers[HEADER] = ", ".join(map(str, self._numbers()))
        if length is not None:
            headers["content-length"] = str(length)
        await self._send(start)

    def _numbers(self) -> list[int]:
        """List the versions so far; before the first token, the one that the engine holds."""
        return sorted(self._versions) or [self._engine.version]

    def _whole(self, body: bytes) -> bytes:
        """Put the versions into an answer that is one JSON object."""
        assert self._start is not None
        if self._start["status"] != 200:
            return in_settings(body)
        if not body.endswith(b"}"):
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


def in_settings(message: bytes) -> bytes:
    """Name the setting in place of each flag of vLLM in an error.

    >>> in_settings(b"set --max-logprobs")
    b'set server.engine.max_logprobs'
    """
    # hocket sets this one wherever there is a parser.
    message = message.replace(b"--enable-auto-tool-choice and ", b"")
    return FLAG.sub(lambda flag: b"server.engine." + flag[1].replace(b"-", b"_"), message)
