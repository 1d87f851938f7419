"""Talk to one generation server over HTTP, every wait with a deadline."""

import asyncio
import base64
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Annotated, Any, TypeVar

import httpx
import pydantic

from hocket import protocol
from hocket.common.redaction import redacted
from hocket.common.tasks import run_in_thread
from hocket.errors import ServerError, SyncError, cause_of, program
from hocket.protocol import manifest
from hocket.types import Image, TokenIds

A = TypeVar("A", bound=pydantic.BaseModel)
R = TypeVar("R", bound=protocol.Request[Any])

# Left to right, as pydantic's own choice between the two takes three times as long.
_STREAM: pydantic.TypeAdapter[protocol.StreamLine | protocol.StreamEnd] = pydantic.TypeAdapter(
    Annotated[protocol.StreamLine | protocol.StreamEnd, pydantic.Field(union_mode="left_to_right")]
)
HEALTH_TIMEOUT_S = 10.0
CHUNK_BYTES = 1 << 20  # bytes that are read from the disk at once
# Bytes of all images in a request: it may have 64 MiB, and base64 makes them a third longer.
IMAGE_BYTES = 40 << 20
JSON = {"Content-Type": "application/json"}  # vLLM's routes require this header
_NOT_HOCKET = "if another program is there, correct the URL, else start this version"


class ServerClient(AbstractAsyncContextManager["ServerClient"]):
    """One generation server. Use it by `async with`."""

    def __init__(
        self,
        url: str,  # base URL: "http://127.0.0.1:8000"
        *,
        token: str | None = None,  # bearer token
        trainer: str | None = None,  # id of the trainer, sent with every request
        transport: httpx.AsyncBaseTransport | None = None,  # for tests: calls an app in memory
    ) -> None:
        self.url = url
        self._trainer = trainer
        self._http = httpx.AsyncClient(
            base_url=url,
            headers={"Authorization": f"Bearer {token}"} if token else {},
            limits=httpx.Limits(max_connections=None),  # /health must not wait behind rollouts
            timeout=httpx.Timeout(None, connect=HEALTH_TIMEOUT_S),  # `_deadline` bounds a call
            transport=transport,
            trust_env=False,  # a proxy of the environment can't reach local servers
        )

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections. Calls under way raise ServerError."""
        await self._http.aclose()

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._http.is_closed

    async def health(self, *, timeout_s: float = HEALTH_TIMEOUT_S) -> protocol.Health:
        """Get the server's health. Raises ServerError."""
        return await self._call("GET", "/health", protocol.Health, timeout_s)

    async def ask(self, request: protocol.Request[A], *, timeout_s: float) -> A:
        """Send a request and wait for its answer. Raises ServerError."""
        content = self._signed(request).model_dump_json()
        return await self._call("POST", request.route, request.answer, timeout_s, content)

    async def close_session(self, name: str, *, timeout_s: float) -> protocol.AgentRecord:
        """Close an agent's session and get the record of its calls. Raises ServerError."""
        return await self._call("DELETE", f"/sessions/{name}", protocol.AgentRecord, timeout_s)

    async def generate(
        self, request: protocol.GenerateRequest, *, timeout_s: float
    ) -> AsyncGenerator[protocol.StreamLine, None]:
        """Yield completions as they end. Raises ServerError.

        Use it by `contextlib.aclosing`: the deadline runs until the generator is closed.
        """
        request = request.model_copy(update={"stream": True, "packed": True})
        body = self._signed(request).model_dump_json()
        async with (
            self._deadline(timeout_s, "/generate"),
            self._http.stream("POST", "/generate", content=body) as response,
        ):
            if response.is_error:
                await response.aread()
                _raise_for_error(response)
            # The answer is ASCII, so no character in a text looks like the end of a line.
            async for line in response.aiter_lines():
                item = _STREAM.validate_json(line)
                if isinstance(item, protocol.StreamLine):
                    yield item
                elif item.error is not None:
                    message = f"{self.url}/generate broke off: {_text(item.error)}"
                    raise ServerError(message, code=item.error.code)
                else:
                    return
        # The connection ended without a StreamEnd.
        message = f"{self.url}/generate was cut before its end; see the server's log"
        raise ServerError(message, code="cut")

    async def upload(self, folder: Path, name: str, *, timeout_s: float) -> str:
        """Send a version, and return the name of its DiskSource on the server.

        Raises:
            ServerError: The server refused a file or can't be reached.
            SyncError: A file can't be read here.
        """
        paths = sorted(folder.glob("*.safetensors"))
        paths += folder.glob(manifest.ADAPTER_FILE)
        names = [path.name for path in paths]
        names += [manifest.MANIFEST_FILE, manifest.COMPLETE_FILE]  # COMPLETE is sent last
        async with self._deadline(timeout_s, "/upload"):
            for file in names:
                url = f"/upload/{name}/{file}"
                response = await self._http.put(url, content=_chunks(folder / file))
                uploaded = _parse(protocol.DiskSource, response)
        return uploaded.name

    async def _call(
        self, method: str, route: str, answer: type[A], timeout_s: float, content: str | None = None
    ) -> A:
        async with self._deadline(timeout_s, route):
            response = await self._http.request(method, route, content=content, headers=JSON)
            return _parse(answer, response)

    def _signed(self, request: R) -> R:
        """Put the trainer's id into a request."""
        return request.model_copy(update={"trainer": self._trainer})

    @asynccontextmanager
    async def _deadline(self, seconds: float, route: str) -> AsyncIterator[None]:
        """Bound the time of the body, and raise its failures as ServerErrors."""
        try:
            async with asyncio.timeout(seconds):
                yield
        except TimeoutError as error:
            message = f"{self.url}{route} did not finish in {seconds:g} s"
            raise ServerError(message, code="timeout") from error
        except httpx.TransportError as error:
            message = f"can't reach {self.url}{route}: {cause_of(error)}; start one there: {program()} serve CONFIG"
            raise ServerError(message, code="unreachable") from error
        except (httpx.DecodingError, pydantic.ValidationError) as error:
            cause = " ".join(redacted(str(error))[:200].split())
            message = (
                f"{self.url}{route} answered what no hocket server of this version does: "
                f"{cause}; {_NOT_HOCKET}"
            )
            raise ServerError(message, code="protocol") from error
        except RuntimeError as error:
            # httpx raises it for a client that is closed: the pool has dropped the server.
            if not self.is_closed:
                raise
            message = f"can't reach {self.url}{route}: the server has left"
            raise ServerError(message, code="unreachable") from error


def prompt_input(token_ids: TokenIds, images: Sequence[Image]) -> protocol.PromptInput:
    """Shorten a prompt to the form that servers take.

    Each image's tokens become its one placeholder, and the images are sent beside the token ids.
    """
    short_ids = list(token_ids)
    if not images:
        return short_ids
    for image in reversed(images):  # from the last one, as `start` counts in the long prompt
        short_ids[image.start : image.start + image.length] = [image.placeholder]
    files = [base64.b64encode(image.data).decode() for image in images]
    return protocol.ImagePrompt(token_ids=short_ids, images=files)


def _parse(model: type[A], response: httpx.Response) -> A:
    if response.is_error:
        _raise_for_error(response)
    return model.model_validate_json(response.content)


def _raise_for_error(response: httpx.Response) -> None:
    status = response.status_code
    try:
        error = protocol.ErrorResponse.model_validate_json(response.content).error
        message = _text(error)
        code = error.code
    except pydantic.ValidationError:
        message = f"{redacted(response.text)[:200]!r}; {_NOT_HOCKET}"
        code = "body_too_large" if status == 413 else "protocol"  # 413 comes from a proxy between
    if status == 401:
        message = "it has a token: set the same server.token here, or $HOCKET_TOKEN"
    raise ServerError(
        f"{response.request.url} answered {status}: {message}", code=code, status=status
    )


async def _chunks(path: Path) -> AsyncIterator[bytes]:
    """Yield a file's bytes, read in a thread. Raises SyncError."""
    try:
        with path.open("rb") as file:
            while chunk := await run_in_thread(file.read, CHUNK_BYTES):
                yield chunk
    except OSError as error:
        raise SyncError(f"can't read {path}: {error}") from error


def _text(error: protocol.ErrorBody) -> str:
    return f"{error.message} ({error.hint})" if error.hint else error.message
