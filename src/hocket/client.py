"""The trainer's side of HTTP: one generation server, asked with few large requests, every wait with a deadline.

httpx slows down with hundreds of requests in flight, so one request carries many prompts and its completions stream
back as NDJSON, each as soon as it is finished.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

import httpx
import pydantic

from hocket.errors import ServerError
from hocket.protocol import (
    DiskSource,
    ErrorBody,
    ErrorResponse,
    GenerateRequest,
    GenerateResponse,
    Health,
    ReloadRequest,
    ReloadResponse,
    Sampling,
    StreamEnd,
    StreamLine,
)
from hocket.types import Completion, SamplingParams

M = TypeVar("M", bound=pydantic.BaseModel)

_STREAM: pydantic.TypeAdapter[StreamLine | StreamEnd] = pydantic.TypeAdapter(StreamLine | StreamEnd)
HEALTH_TIMEOUT_S = 10.0
POLL_S = 0.25


class ServerClient:
    """One generation server. Use it inside one event loop, and as `async with`.

    Args:
        url: base URL, "http://127.0.0.1:8000".
        token: bearer token, where the server wants one.
        transport: replaces the network in tests.
    """

    def __init__(
        self, url: str, *, token: str | None = None, transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        self.url = url
        self._http = httpx.AsyncClient(
            base_url=url,
            headers={"Authorization": f"Bearer {token}"} if token else {},
            # A connection idle for longer than the server keeps it would fail at its next use.
            limits=httpx.Limits(max_connections=16, keepalive_expiry=2.0),
            timeout=httpx.Timeout(None, connect=HEALTH_TIMEOUT_S),  # each call has one deadline around all of it
            transport=transport,
            trust_env=False,  # a company proxy knows nothing of servers on this machine or network
        )

    async def __aenter__(self) -> "ServerClient":
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._http.aclose()

    async def health(self) -> Health:
        """Returns what the server says of itself. Raises ServerError where nothing answers."""
        async with self._deadline(HEALTH_TIMEOUT_S, "/health"):
            return self._parse(Health, await self._http.get("/health"))

    async def wait_ready(self, timeout_s: float, on_wait: Callable[[str, float], None] | None = None) -> Health:
        """Waits until the server is ready.

        Args:
            timeout_s: deadline in seconds.
            on_wait: told what is being waited for and for how long already, about once per poll.

        Raises:
            ServerError: the server failed, refused the token, or was not ready in time.
        """
        start = time.monotonic()
        while True:
            try:
                health = await self.health()
                if health.status == "ready":
                    return health
                if health.status == "failed":
                    raise ServerError(f"the server at {self.url} failed: {health.error}", code="failed")
                state, cause = f"it is {health.status}", ""
            except ServerError as error:
                if error.code not in ("unreachable", "timeout"):
                    raise
                state, cause = "nothing answers there yet", f" ({error})"
            waited = time.monotonic() - start
            if waited > timeout_s:
                raise ServerError(
                    f"gave up after {waited:.0f} s of waiting for the server at {self.url}: {state}{cause}. "
                    f"Start it with `python run.py serve CONFIG`, or set server.url and server.start_timeout_s",
                    code="timeout",
                )
            if on_wait is not None:
                on_wait(f"waiting for the server at {self.url}: {state}", waited)
            await asyncio.sleep(POLL_S)

    async def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams, *, n: int = 1, timeout_s: float
    ) -> AsyncIterator[tuple[int, int, Completion]]:
        """Yields (prompt index, sample index, completion) as the server finishes them, in any order.

        Args:
            prompts: token ids of each prompt.
            n: completions per prompt.
            timeout_s: deadline for the whole answer.

        Raises:
            ServerError: refused, unreachable, cut off, or not finished in time.
        """
        body = GenerateRequest(prompts=[list(ids) for ids in prompts], sampling=_message(sampling), n=n, stream=True)
        received = 0
        async with (
            self._deadline(timeout_s, "/generate"),
            self._http.stream("POST", "/generate", json=body.model_dump(mode="json")) as response,
        ):
            if response.is_error:
                await response.aread()
                self._raise_for_error(response)
            async for line in response.aiter_lines():
                item = _STREAM.validate_json(line)
                if isinstance(item, StreamEnd):
                    if item.error is not None:
                        raise ServerError(f"{self.url}/generate broke off: {_said(item.error)}", code=item.error.code)
                    if received != len(prompts) * n:
                        raise ServerError(
                            f"{self.url}/generate ended with {received} of {len(prompts) * n} completions", code="cut"
                        )
                    return
                received += 1
                done = item.completion
                yield (
                    item.prompt,
                    item.index,
                    Completion(
                        token_ids=tuple(done.token_ids),
                        logprobs=tuple(done.logprobs),
                        finish_reason=done.finish_reason,
                        versions=tuple(done.versions),
                        text=done.text,
                    ),
                )
        raise ServerError(
            f"{self.url}/generate was cut after {received} of {len(prompts) * n} completions; see the server's log",
            code="cut",
        )

    async def ask(self, request: GenerateRequest, *, timeout_s: float) -> GenerateResponse:
        """Returns the whole answer to one request at once."""
        async with self._deadline(timeout_s, "/generate"):
            return self._parse(
                GenerateResponse, await self._http.post("/generate", json=request.model_dump(mode="json"))
            )

    async def reload_weights(self, version: int, name: str, *, timeout_s: float) -> ReloadResponse:
        """Has the server load the published folder `name` as `version` and returns what it then holds."""
        body = ReloadRequest(version=version, source=DiskSource(name=name))
        async with self._deadline(timeout_s, "/reload_weights"):
            response = await self._http.post("/reload_weights", json=body.model_dump(mode="json"))
            return self._parse(ReloadResponse, response)

    @asynccontextmanager
    async def _deadline(self, seconds: float, route: str) -> AsyncIterator[None]:
        """Turns transport failures and a passed deadline into a ServerError that names server, route and cause."""
        try:
            async with asyncio.timeout(seconds):
                yield
        except TimeoutError as error:
            raise ServerError(f"{self.url}{route} did not finish in {seconds:g} s", code="timeout") from error
        except httpx.TransportError as error:
            cause = str(error) or type(error).__name__
            raise ServerError(f"can't reach {self.url}{route}: {cause}", code="unreachable") from error

    def _parse(self, model: type[M], response: httpx.Response) -> M:
        if response.is_error:
            self._raise_for_error(response)
        try:
            return model.model_validate_json(response.content)
        except pydantic.ValidationError as error:
            raise ServerError(
                f"{response.request.url} answered something else than {model.__name__}: is it a hocket server of this "
                f"version? It said {response.text[:200]!r}",
                code="protocol",
                status=response.status_code,
            ) from error

    def _raise_for_error(self, response: httpx.Response) -> None:
        try:
            said = ErrorResponse.model_validate_json(response.content).error
        except pydantic.ValidationError:
            raise ServerError(
                f"{response.request.url} answered {response.status_code}: {response.text[:200]!r}",
                code="protocol",
                status=response.status_code,
            ) from None
        raise ServerError(
            f"{response.request.url} answered {response.status_code}: {_said(said)}",
            code=said.code,
            status=response.status_code,
        )


def _message(sampling: SamplingParams) -> Sampling:
    return Sampling(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=sampling.max_tokens,
        stop=list(sampling.stop),
        stop_token_ids=list(sampling.stop_token_ids),
        seed=sampling.seed,
    )


def _said(error: ErrorBody) -> str:
    return f"{error.message} ({error.hint})" if error.hint else error.message
