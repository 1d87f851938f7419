"""Request scores from the user's own service (docs/how-to/reward_service.md)."""

import asyncio
import dataclasses
import email.utils
import json
import math
import os
import time
from collections.abc import Container, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self
from urllib.parse import urlsplit

import httpx
from pydantic import Field

from hocket.common.redaction import redacted, secret
from hocket.common.shell import proxy_of
from hocket.config.deployment import WebUrl
from hocket.config.sections import Names
from hocket.rewards.base import RetryError, arguments_as_json, reward
from hocket.rewards.scores import NoScoreError
from hocket.types import Rollout, Score

LOCAL = frozenset({"127.0.0.1", "::1", "localhost"})
AGAIN = frozenset({408, 425, 429, 502, 503, 504})  # statuses of a service that is busy or away
MAX_ANSWER_BYTES = 16 << 20  # 4,096 scores with their notes
MAX_SHOWN = 200  # characters of an answer that an error shows


class RefusedError(RetryError):
    """A request was not served, and so is not billed."""


@dataclasses.dataclass(kw_only=True, eq=False)
class Service:
    """A client of a service. The service gets no more of the environment than the named key."""

    uses_proxies: ClassVar[bool] = True
    again: ClassVar[Container[int]] = AGAIN  # statuses after which a request is sent again
    timeout_s: Annotated[float, Field(gt=0)] = 60.0  # of each request
    key_env: str | None = None  # the environment variable that holds the key; None: none is sent

    def __post_init__(self) -> None:
        self._headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if self.key_env is not None:
            key = os.environ.get(self.key_env)
            if not key:
                raise ValueError(
                    f"the environment variable {self.key_env} is not set: export the service's key "
                    "in it"
                )
            self._headers["Authorization"] = f"Bearer {secret(key, self.key_env)}"

    async def __aenter__(self) -> Self:
        limits = httpx.Limits(max_connections=None)
        self._http = httpx.AsyncClient(
            headers=self._headers, trust_env=self.uses_proxies, timeout=None, limits=limits
        )
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._http.aclose()

    async def _post(self, url: str, body: Mapping[str, Any]) -> str:
        """Post a body as JSON, and return the answer's text.

        Raise RetryError without an answer, or for a status in `again`, and ValueError for another
        status than 200.
        """
        content = json.dumps(body, default=str).encode()
        proxy = proxy_of(url) if self.uses_proxies else ""
        through = advice = ""
        if proxy:
            through = f" through the proxy {proxy}"
            host = urlsplit(url).hostname
            advice = f"; if the proxy does not reach that host, set NO_PROXY={host}"
        try:
            async with (
                asyncio.timeout(self.timeout_s),
                self._http.stream("POST", url, content=content) as response,
            ):
                text = redacted(await _body(response))
        except TimeoutError as error:
            raise RetryError(f"{url} gave no answer within {self.timeout_s:g} s") from error
        except httpx.TransportError as error:
            kind = RefusedError if isinstance(error, httpx.ConnectError) else RetryError
            raise kind(
                f"{url} can't be reached{through}: {type(error).__name__}: {error}{advice}"
            ) from error
        message = f"{url} answered {response.status_code}{through}: {text[:MAX_SHOWN]}{advice}"
        if response.status_code in self.again:
            raise RefusedError(message, retry_after(response.headers))
        if response.has_redirect_location:
            location = response.headers["location"]
            raise ValueError(f"{message} No redirect is followed: name {location} in its place")
        if response.status_code != 200:
            raise ValueError(message)
        return text


async def _body(response: httpx.Response) -> str:
    """Read an answer's text. Raise NoScoreError if it is compressed or too long."""
    if "Content-Encoding" in response.headers:  # a few bytes may become gigabytes
        raise NoScoreError(
            f"{response.url} packed its answer: it must heed the header Accept-Encoding: identity"
        )
    body = bytearray()
    async for part in response.aiter_raw():
        body += part
        if len(body) > MAX_ANSWER_BYTES:
            raise NoScoreError(
                f"{response.url} answered more than {MAX_ANSWER_BYTES >> 20} MiB, the limit"
            )
    return body.decode(errors="replace")


@reward("http", own_deadline=True)
@dataclasses.dataclass(kw_only=True, eq=False)
class HttpReward(Service):
    """Has a service score the completions of a prompt, which it may be sent more than once."""

    uses_proxies = False
    url: WebUrl
    hosts: Names = ()
    format: Literal["hocket", "openrlhf"] = "hocket"

    def __post_init__(self) -> None:
        super().__post_init__()
        host = urlsplit(self.url).hostname
        if host not in LOCAL and host not in self.hosts:
            raise ValueError(
                "url is on another host, which gets no samples unless it is named: set hosts: "
                f"[{host}]"
            )

    async def __call__(self, rollouts: Sequence[Rollout]) -> list[Any]:
        prompt = rollouts[0].prompt
        size = len(rollouts)
        samples = [{"id": rollout.id} | arguments_as_json(rollout) for rollout in rollouts]
        body: dict[str, list[Any]] = {"samples": samples}
        key = "scores"
        if self.format == "openrlhf":
            queries = [prompt.text + rollout.text for rollout in rollouts]
            body = {
                "query": queries,
                "prompts": [prompt.text] * size,
                "labels": [prompt.answer] * size,
            }
            key = "rewards"
        text = await self._post(self.url, body)
        try:
            values = json.loads(text)[key]
            return [_score(value) for value, _ in zip(values, rollouts, strict=True)]
        except (ValueError, LookupError, TypeError) as error:
            wanted = f'{{"{key}": a list of {size}}}'
            raise ValueError(
                f"{self.url} answered 200: {text[:MAX_SHOWN]} It must answer {wanted}"
            ) from error


def _score(value: Any) -> Any:
    """Make a Score of an object with an error, or with total and parts; others stay as they are."""
    if not isinstance(value, dict):
        return value
    if "error" not in value and not {"total", "parts"} <= value.keys():
        return value
    return Score(
        total=value.get("total", math.nan),
        parts=value.get("parts", {}),
        error=value.get("error"),
        note=value.get("note") or "",
    )


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Read the seconds of a Retry-After header, which has a number or a date; None without one."""
    value = headers.get("retry-after", "")
    try:
        if value.isdigit():
            return float(value)
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except ValueError:
        return None
