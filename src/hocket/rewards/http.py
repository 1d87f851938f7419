"""Ask the user's own service for scores (docs/rewards.md)."""

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

from pydantic import Field

from hocket.config.sections import Names
from hocket.rewards.base import RetryError, reward, sampled_ids
from hocket.types import Rollout, Score

LOCAL = frozenset({"127.0.0.1", "::1", "localhost"})
AGAIN = frozenset({408, 425, 429, 502, 503, 504})  # statuses of a service that is busy or away; 500 is its own fault
MAX_SHOWN = 200  # characters of an answer in an error


class RefusedError(RetryError):
    """Says that a request was not served, and so is not billed."""


@dataclasses.dataclass(kw_only=True, eq=False)
class Service:
    """The options of a service that gets POST requests, and of the environment no more than the key that is named."""

    uses_proxies: ClassVar[bool] = True  # of the environment
    timeout_s: Annotated[float, Field(gt=0)] = 60.0  # of one request
    key_env: str | None = None  # environment variable that holds a key, sent as a bearer token; none stands in a config

    def check(self, option: str, url: str) -> str:
        """Return the host of a URL. Raise ValueError without a host, or without the key."""
        host = urlsplit(url).hostname
        if not url.startswith(("http://", "https://")) or not host:
            raise ValueError(f"{option} must begin with http:// or https:// and a host, got {url!r}")
        if self.key_env is not None and not os.environ.get(self.key_env):
            raise ValueError(f"the environment variable {self.key_env} is not set: export the service's key in it")
        return host

    async def __aenter__(self) -> Self:
        import httpx

        headers = {"Content-Type": "application/json"}
        if self.key_env is not None:
            headers["Authorization"] = f"Bearer {os.environ[self.key_env]}"
        limits = httpx.Limits(max_connections=None)
        self._http = httpx.AsyncClient(headers=headers, trust_env=self.uses_proxies, timeout=None, limits=limits)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._http.aclose()

    async def _post(self, url: str, body: Mapping[str, Any], again: Container[int] = AGAIN) -> str:
        """Return what it answers; raise RetryError where there is no answer, or one with a status in `again`."""
        import httpx

        try:
            async with asyncio.timeout(self.timeout_s):
                response = await self._http.post(url, content=json.dumps(body, default=str).encode())
        except TimeoutError as error:
            raise RetryError(f"{url} gave no answer within {self.timeout_s:g} s") from error
        except httpx.TransportError as error:
            kind = RefusedError if isinstance(error, httpx.ConnectError) else RetryError
            raise kind(f"{url} can't be reached: {type(error).__name__}: {error}") from error
        said = f"{url} answered {response.status_code}: {response.text[:MAX_SHOWN]}"
        if response.status_code in again:
            raise RefusedError(said, retry_after(response.headers))
        if response.has_redirect_location:
            raise ValueError(f"{said} No redirect is followed: name {response.headers['location']} in its place")
        if response.status_code != 200:
            raise ValueError(said)
        return response.text


@reward("http", imports=("httpx",), own_deadline=True)
@dataclasses.dataclass(kw_only=True, eq=False)
class HttpReward(Service):
    """Return the scores that a service of yours gives the completions of a prompt; it may be asked twice for them.

    It answers {"samples": [{"id", "prompt", "completion", ...}, ...]} by {"scores": [...]}: numbers, objects of parts
    that add up, {"total", "parts", "note"}, or {"error": "why"}. In OpenRLHF's format (of a remote_rm_url) it
    answers {"query", "prompts", "labels"}, a list each, by {"rewards": [...]}.
    """

    uses_proxies = False
    url: str  # no redirect is followed
    hosts: Names = ()  # besides this machine that may get samples
    format: Literal["hocket", "openrlhf"] = "hocket"

    def __post_init__(self) -> None:
        host = self.check("url", self.url)
        if host not in {*LOCAL, *self.hosts}:
            raise ValueError(f"url is on another host, which gets no samples unless it is named: set hosts: [{host}]")

    async def __call__(self, rollouts: Sequence[Rollout]) -> list[Any]:
        key = "scores"
        body = _samples(rollouts)
        if self.format == "openrlhf":
            key = "rewards"
            body = _openrlhf(rollouts)
        text = await self._post(self.url, body)
        try:
            scores = json.loads(text)[key]
        except (ValueError, LookupError, TypeError):
            scores = None
        if not isinstance(scores, list) or len(scores) != len(rollouts):
            wanted = f'{{"{key}": a list of {len(rollouts)}}}'
            raise ValueError(f"{self.url} answered 200: {text[:MAX_SHOWN]} It must answer {wanted}")
        return [_score(one) for one in scores]


def _score(one: Any) -> Any:
    """Return the score for an object with an error, or with total and parts; others as they are."""
    if isinstance(one, dict) and ("error" in one or {"total", "parts"} <= one.keys()):
        total = one.get("total", math.nan)
        return Score(total=total, parts=one.get("parts", {}), error=one.get("error"), note=one.get("note") or "")
    return one


def _samples(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    prompt = rollouts[0].prompt
    shared = {"prompt": prompt.text, "messages": prompt.messages, "answer": prompt.answer, "meta": prompt.meta}
    samples = [
        {
            "id": one.id,
            "opening": one.sequences[-1].opening,
            "completion": one.text,
            "finish_reason": one.finish_reason,
            "token_ids": sampled_ids(one),
            **shared,
        }
        for one in rollouts
    ]
    return {"samples": samples}


def _openrlhf(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    prompt = rollouts[0].prompt
    queries = [prompt.text + one.text for one in rollouts]
    return {"query": queries, "prompts": [prompt.text] * len(rollouts), "labels": [prompt.answer] * len(rollouts)}


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Return the seconds of a Retry-After header, a number or a date; None without a readable one."""
    value = headers.get("retry-after", "")
    try:
        if value.isdigit():
            return float(value)
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except ValueError:
        return None
