"""Ask the user's own service for scores (docs/rewards.md)."""

import asyncio
import dataclasses
import email.utils
import json
import math
import os
import time
from collections.abc import Container, Mapping, Sequence
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field

from hocket.config.sections import Names
from hocket.rewards.base import RetryError, reward, sampled_ids
from hocket.types import Rollout, Score

LOCAL = frozenset({"127.0.0.1", "::1", "localhost"})
AGAIN = frozenset({408, 425, 429, 502, 503, 504})  # statuses of a service that is busy or away; 500 is its own fault
SCORE = {"total", "parts", "error", "note"}  # keys of an answer that is more than numbers
MAX_SHOWN = 200  # characters of an answer in an error


class RefusedError(RetryError):
    """Says that a request was not served, and so is not billed."""


@dataclasses.dataclass(kw_only=True, eq=False)
class Service:
    """A service that gets POST requests, of no more of the environment than the key that is named; and its options."""

    timeout_s: Annotated[float, Field(gt=0)] = 60.0  # of one request
    key_env: str | None = None  # environment variable that holds a key, sent as a bearer token; none stands in a config

    def _name(self, option: str, url: str, **client: Any) -> str:
        """Return the host of a URL; set what a client needs. Raise ValueError without a host or the key."""
        host = urlsplit(url).hostname
        if not url.startswith(("http://", "https://")) or not host:
            raise ValueError(f"{option} must begin with http:// or https:// and a host, got {url!r}")
        if self.key_env is not None and not os.environ.get(self.key_env):
            raise ValueError(f"the environment variable {self.key_env} is not set: export the service's key in it")
        key = {"Authorization": f"Bearer {os.environ[self.key_env]}"} if self.key_env else {}
        self._url, self._client = url, {"headers": {"Content-Type": "application/json"} | key, **client}
        return host

    async def __aenter__(self) -> Self:
        import httpx

        self._http = httpx.AsyncClient(**self._client, timeout=None, limits=httpx.Limits(max_connections=None))
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._http.aclose()

    async def _post(self, body: Mapping[str, Any], again: Container[int]) -> str:
        """Return what it answers; raise RetryError where there is no answer, or one with a status in `again`."""
        import httpx

        try:
            async with asyncio.timeout(self.timeout_s):
                response = await self._http.post(self._url, content=json.dumps(body, default=str).encode())
        except TimeoutError as error:
            raise RetryError(f"{self._url} gave no answer within {self.timeout_s:g} s") from error
        except httpx.TransportError as error:
            kind = RefusedError if isinstance(error, httpx.ConnectError) else RetryError
            raise kind(f"{self._url} can't be reached: {type(error).__name__}: {error}") from error
        said = f"{self._url} answered {response.status_code}: {response.text[:MAX_SHOWN]}"
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

    It gets POST {"samples": [{"id", "prompt", "messages", "answer", "meta", "opening", "completion", "finish_reason",
    "token_ids"}, ...]} and answers {"scores": [...]}: for each sample a number, an object of parts that add up,
    {"total", "parts", "note"}, or {"error": "why"}. In OpenRLHF's format (of a remote_rm_url) it gets {"query",
    "prompts", "labels"}, lists of prompt + completion (without a chat template), prompt and answer, and answers
    {"rewards": [...]}.
    """

    url: str  # no redirect is followed, and no proxy of the environment is used
    hosts: Names = ()  # besides this machine that may get samples
    format: Literal["hocket", "openrlhf"] = "hocket"

    def __post_init__(self) -> None:
        host = self._name("url", self.url, trust_env=False)
        if host not in {*LOCAL, *self.hosts}:
            raise ValueError(f"url is on another host, which gets no samples unless it is named: set hosts: [{host}]")

    async def __call__(self, rollouts: Sequence[Rollout]) -> list[Any]:
        make, key = (_openrlhf, "rewards") if self.format == "openrlhf" else (_samples, "scores")
        text, count = await self._post(make(rollouts), AGAIN), len(rollouts)
        try:
            scores = json.loads(text)[key]
        except (ValueError, LookupError, TypeError):
            scores = None
        if not isinstance(scores, list) or len(scores) != count:
            raise ValueError(
                f'{self.url} answered 200: {text[:MAX_SHOWN]} It must answer {{"{key}": a list of {count}}}'
            )
        return [_score(one) for one in scores]


def _score(one: Any) -> Any:
    """Return the score that an object with an error, or with total and parts, stands for; others as they are."""
    if isinstance(one, dict) and ("error" in one or {"total", "parts"} <= one.keys()):
        said = {key: one[key] for key in one.keys() & SCORE}
        return Score(**{"total": math.nan} | said | {"note": one.get("note") or ""})
    return one


def _samples(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    prompt = rollouts[0].prompt
    shared = {"prompt": prompt.text, "messages": prompt.messages, "answer": prompt.answer, "meta": prompt.meta}
    keys = ("id", "opening", "completion", "finish_reason", "token_ids")
    own = [(one.id, one.sequences[-1].opening, one.text, one.finish_reason, sampled_ids(one)) for one in rollouts]
    return {"samples": [dict(zip(keys, values, strict=True)) | shared for values in own]}


def _openrlhf(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    prompt, count = rollouts[0].prompt, len(rollouts)
    queries = [prompt.text + one.text for one in rollouts]
    return {"query": queries, "prompts": [prompt.text] * count, "labels": [prompt.answer] * count}


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Return the seconds of a Retry-After header, a number or a date; None without one that can be read."""
    value = headers.get("retry-after", "")
    try:
        if value.isdigit():
            return float(value)
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except ValueError:
        return None
