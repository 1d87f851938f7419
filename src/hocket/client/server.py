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

# pydantic's own choice takes three times as long.
_STREAM: pydantic.TypeAdapter[protocol.StreamLine | protocol.StreamEnd] = pydantic.TypeAdapter(
    Annotated[protocol.StreamLine | protocol.StreamEnd, pydantic.Field(union_mode="left_to_right")]
)
HEALTH_TIMEOUT_S = 10.0
CHUNK_BYTES = 1 << 20
IMAGE_BYTES = 40 << 20  # of a request: it has 64 MiB, and base64 is a third longer
JSON = {"Content-Type": "application/json"}  # vLLM's routes want it said
_OTHER = "if another program is there, correct the URL, else start this version"


class ServerClient(AbstractAsyncContextManager["ServerClient"]):
    """One generation server. Use it by `async with`."""

    def __init__(
        self,
        url: str,  # "http://127.0.0.1:8000"
        *,
        token: str | None = None,  # bearer token
        trainer: str | None = None,  # its id
        transport: httpx.AsyncBaseTransport | None = None,  # for tests
    ) -> None:
        self.url = url
        self._trainer = trainer
        self._http = httpx.AsyncClient(
            base_url=url,
            headers={"Authorization": f"Bearer {token}"} if token else {},
            limits=httpx.Limits(max_connections=None),  # /health must not wait behind rollouts
            timeout=httpx.Timeout(None, connect=HEALTH_TIMEOUT_S),  # `_deadline` bounds a call
            transport=transport,
            trust_env=False,  # a proxy knows nothing of local servers
        )

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    @property
    def is_closed(self) -> bool:
        return self._http.is_closed

    async def health(self, *, timeout_s: float = HEALTH_TIMEOUT_S) -> protocol.Health:
        return await self._call("GET", "/health", protocol.Health, timeout_s)

    async def ask(self, request: protocol.Request[A], *, timeout_s: float) -> A:
        """Return the answer. Raises ServerError."""
        content = self._signed(request).model_dump_json()
        return await self._call("POST", request.route, request.answer, timeout_s, content)

    async def close_session(self, name: str, *, timeout_s: float) -> protocol.AgentRecord:
        return await self._call("DELETE", f"/sessions/{name}", protocol.AgentRecord, timeout_s)

    async def generate(
        self, request: protocol.GenerateRequest, *, timeout_s: float
    ) -> AsyncGenerator[protocol.StreamLine, None]:
        """Yield completions as they end. Use `aclosing`: the deadline runs until then."""
        body = self._signed(
            request.model_copy(update={"stream": True, "packed": True})
        ).model_dump_json()
        async with (
            self._deadline(timeout_s, "/generate"),
            self._http.stream("POST", "/generate", content=body) as response,
        ):
            if response.is_error:
                await response.aread()
                _raise_for_error(response)
            async for line in response.aiter_lines():  # ASCII: no text looks like the end of a line
                item = _STREAM.validate_json(line)
                if isinstance(item, protocol.StreamLine):
                    yield item
                elif item.error is not None:
                    raise ServerError(
                        f"{self.url}/generate broke off: {_text(item.error)}", code=item.error.code
                    )
                else:
                    return
        raise ServerError(
            f"{self.url}/generate was cut before its end; see the server's log", code="cut"
        )

    async def upload(self, folder: Path, name: str, *, timeout_s: float) -> str:
        """Send a version; return its DiskSource's name. Raises ServerError, or SyncError on reading."""
        parts = [
            path.name
            for path in (*sorted(folder.glob("*.safetensors")), *folder.glob(manifest.ADAPTER_FILE))
        ]
        async with self._deadline(timeout_s, "/upload"):
            for file in (*parts, manifest.MANIFEST_FILE, manifest.COMPLETE_FILE):  # COMPLETE last
                response = await self._http.put(
                    f"/upload/{name}/{file}", content=_chunks(folder / file)
                )
                uploaded = _parse(protocol.DiskSource, response)
        return uploaded.name

    async def _call(
        self, method: str, route: str, answer: type[A], timeout_s: float, content: str | None = None
    ) -> A:
        async with self._deadline(timeout_s, route):
            return _parse(
                answer, await self._http.request(method, route, content=content, headers=JSON)
            )

    def _signed(self, request: R) -> R:
        return request.model_copy(update={"trainer": self._trainer})

    @asynccontextmanager
    async def _deadline(self, seconds: float, route: str) -> AsyncIterator[None]:
        """Raise the body's failures as ServerErrors."""
        try:
            async with asyncio.timeout(seconds):
                yield
        except TimeoutError as error:
            raise ServerError(
                f"{self.url}{route} did not finish in {seconds:g} s", code="timeout"
            ) from error
        except httpx.TransportError as error:
            message = f"can't reach {self.url}{route}: {cause_of(error)}; start one there: {program()} serve CONFIG"
            raise ServerError(message, code="unreachable") from error
        except (httpx.DecodingError, pydantic.ValidationError) as error:
            cause = " ".join(redacted(str(error))[:200].split())
            message = f"{self.url}{route} answered what no hocket server of this version does: {cause}; {_OTHER}"
            raise ServerError(message, code="protocol") from error
        except RuntimeError as error:
            if not self.is_closed:
                raise
            raise ServerError(
                f"can't reach {self.url}{route}: the server has left", code="unreachable"
            ) from error


def prompt_input(token_ids: TokenIds, images: Sequence[Image]) -> protocol.PromptInput:
    """Return a prompt as servers take it: each image's placeholder for its tokens, and the images beside."""
    short = list(token_ids)
    if not images:
        return short
    for image in reversed(images):
        short[image.start : image.start + image.length] = [image.placeholder]
    return protocol.ImagePrompt(
        token_ids=short, images=[base64.b64encode(image.data).decode() for image in images]
    )


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
        message = f"{redacted(response.text)[:200]!r}; {_OTHER}"
        code = "body_too_large" if status == 413 else "protocol"  # 413: of a proxy in between
    if status == 401:
        message = "it has a token: set the same server.token here, or $HOCKET_TOKEN"
    raise ServerError(
        f"{response.request.url} answered {status}: {message}", code=code, status=status
    )


async def _chunks(path: Path) -> AsyncIterator[bytes]:
    try:
        with path.open("rb") as file:
            while chunk := await run_in_thread(file.read, CHUNK_BYTES):
                yield chunk
    except OSError as error:
        raise SyncError(f"can't read {path}: {error}") from error


def _text(error: protocol.ErrorBody) -> str:
    return f"{error.message} ({error.hint})" if error.hint else error.message
