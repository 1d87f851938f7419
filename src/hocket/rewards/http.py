"""Ask the user's own service for scores (docs/rewards.md)."""

import asyncio
import dataclasses
import email.utils
import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from hocket.rewards.base import RetryError, reward, sampled_ids
from hocket.types import Rollout, Score

if TYPE_CHECKING:
    import httpx

LOCAL = frozenset({"127.0.0.1", "::1", "localhost"})
AGAIN = frozenset({408, 425, 429, 502, 503, 504})  # statuses of a service that is busy or away; 500 is its own fault
SCORE = {"total", "parts", "error", "note"}  # keys of an answer that is more than numbers
MAX_SHOWN = 200  # characters of an answer in an error


@reward("http", imports=("httpx",), own_deadline=True)
@dataclasses.dataclass(eq=False)
class HttpReward:
    """Return the scores that a service of yours gives the completions of a prompt; it may be asked twice for them.

    It gets POST {"samples": [{"id", "prompt", "messages", "answer", "meta", "opening", "completion", "finish_reason",
    "token_ids"}, ...]} and answers {"scores": [...]}: for each sample a number, an object of parts that add up,
    {"total", "parts", "note"}, or {"error": "why"}. In OpenRLHF's format (of a remote_rm_url) it gets {"query",
    "prompts", "labels"}, lists of prompt + completion (without a chat template), prompt and answer, and answers
    {"rewards": [...]}.
    """

    url: str  # no redirect is followed, and no proxy of the environment is used
    hosts: Sequence[str] = ()  # besides this machine that may get samples
    timeout_s: float = 60.0  # of one request
    key_env: str | None = None  # environment variable that holds a key, sent as a bearer token
    format: Literal["hocket", "openrlhf"] = "hocket"

    def __post_init__(self) -> None:
        host = urlsplit(self.url).hostname
        if not self.url.startswith(("http://", "https://")) or not host:
            raise ValueError(f"url must begin with http:// or https:// and a host, got {self.url!r}")
        if host not in {*LOCAL, *self.hosts}:
            raise ValueError(f"url is on another host, which gets no samples unless it is named: set hosts: [{host}]")
        if self.format not in ("hocket", "openrlhf"):
            raise ValueError(f"format must be hocket or openrlhf, got {self.format!r}")
        self._openrlhf, self._headers = self.format == "openrlhf", {"Content-Type": "application/json"}
        if key := key_from(self.key_env):
            self._headers["Authorization"] = f"Bearer {key}"

    async def __aenter__(self) -> "HttpReward":
        import httpx

        self._http = httpx.AsyncClient(headers=self._headers, timeout=None, trust_env=False)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._http.aclose()

    async def __call__(self, rollouts: Sequence[Rollout]) -> list[Any]:
        import httpx

        body = json.dumps(_openrlhf(rollouts) if self._openrlhf else _samples(rollouts), default=str)
        try:
            async with asyncio.timeout(self.timeout_s):
                response = await self._http.post(self.url, content=body.encode())
        except TimeoutError as error:
            raise RetryError(f"{self.url} gave no answer within {self.timeout_s:g} s") from error
        except httpx.TransportError as error:
            raise RetryError(f"{self.url} can't be reached: {type(error).__name__}: {error}") from error
        return self._scores(response, len(rollouts))

    def _scores(self, response: "httpx.Response", count: int) -> list[Any]:
        said = f"{self.url} answered {response.status_code}: {response.text[:MAX_SHOWN]}"
        if response.status_code in AGAIN:
            raise RetryError(said, retry_after(response.headers))
        if response.has_redirect_location:
            raise ValueError(f"{said} No redirect is followed: set url to {response.headers['location']}")
        if response.status_code != 200:
            raise ValueError(said)
        key = "rewards" if self._openrlhf else "scores"
        try:
            scores = json.loads(response.text)[key]
        except (ValueError, LookupError, TypeError):
            scores = None
        if not isinstance(scores, list) or len(scores) != count:
            raise ValueError(f'{said} It must answer {{"{key}": a list of {count}}}')
        return [_score(one) for one in scores]


def _score(one: Any) -> Any:
    """Return the score that an object with an error, or with total and parts, stands for; others as they are."""
    if isinstance(one, dict) and ("error" in one or {"total", "parts"} <= one.keys()):
        return Score(**{"total": math.nan, **{key: one[key] for key in one.keys() & SCORE}})
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


def key_from(variable: str | None) -> str | None:
    """Return the key in an environment variable, since none may stand in a config; ValueError if it is not set."""
    if variable is not None and not os.environ.get(variable):
        raise ValueError(f"the environment variable {variable} is not set: export the service's key in it")
    return os.environ[variable] if variable else None


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Return the seconds of a Retry-After header, a number or a date; None without one that can be read."""
    value = headers.get("retry-after", "")
    try:
        if value.isdigit():
            return float(value)
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except ValueError:
        return None
