"""Ask language models, at any endpoint that speaks OpenAI's chat completions, within limits and for counted costs.

What is asked, and what their answers mean, is judge.py's (docs/rewards.md).
"""

import asyncio
import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import sqlite3
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hocket.errors import RewardError
from hocket.rewards.base import RetryError
from hocket.rewards.http import MAX_SHOWN, key_from, retry_after

MINUTE_S, POLL_S = 60.0, 0.05
TOKENS_PER_BYTE = 0.5  # of a prompt, until the endpoint has counted: English has 0.25
MAX_TOKENS = 10**7  # a call that counts more is not believed


@dataclasses.dataclass(kw_only=True, eq=False)
class Endpoint:
    """The options of every judge, as fields, and the way to ask its models; the key is never in a config."""

    base_url: str  # "https://api.openai.com/v1", "http://127.0.0.1:8000/v1"
    model: str | Sequence[str]  # several: each is asked, a name that stands there twice twice
    key_env: str | None = ""  # environment variable that holds the key; None: none is sent
    request: Mapping[str, Any] | None = None  # more fields; response_format None: it can't follow a JSON schema
    max_tokens: int = 512  # of an answer
    timeout_s: float = 60.0  # of one request
    requests_per_minute: int | None = None  # limits for each model
    tokens_per_minute: int | None = None
    price: tuple[float, float] = (0.0, 0.0)  # dollars per million tokens of prompts, of answers
    budget: float | None = None  # dollars that end the run; counted in the cache, so that a resumed run counts on
    cache: str | None = None  # file with the answers by content; None: in memory

    def __post_init__(self) -> None:
        if self.budget is not None and not (self.cache and max(self.price) > 0):
            price = "price: [dollars per million tokens of prompts, of answers]"
            raise ValueError(f"a budget needs the {price}, and a cache: the file where all judges of the run count")
        if self.cache and not Path(self.cache).parent.is_dir():
            raise ValueError(f"there is no folder for the cache {self.cache}: make it, or name another file")
        if self.key_env == "" and not self.base_url.startswith("https://api.openai.com/"):
            raise ValueError(f"set key_env: the variable that holds the key of {self.base_url}, or null: none is sent")
        self._key = key_from("OPENAI_API_KEY" if self.key_env == "" else self.key_env)
        self._models = [self.model] if isinstance(self.model, str) else list(self.model)
        self._wanted: dict[str, tuple[asyncio.Lock, Counter[str]]] = {}  # by text: who asks, and what that has cost

    async def __aenter__(self) -> "Endpoint":
        import openai

        http = openai.DefaultAsyncHttpxClient(follow_redirects=False, timeout=None)  # the deadline is _ask's
        self._client = openai.AsyncOpenAI(
            base_url=self.base_url, api_key=self._key or "none", max_retries=0, timeout=None, http_client=http
        )
        self._store = sqlite3.connect(self.cache or ":memory:", isolation_level=None)
        create = "CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, value)"
        self._store.executescript(f"PRAGMA synchronous=OFF; {create}")  # a lost answer is asked for again
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._store.close()
        await self._client.close()

    async def verdicts(
        self, contents: Sequence[str], form: Mapping[str, Any], read: Callable[[str], Any]
    ) -> tuple[list[Any], dict[str, float]]:
        """Return what `read` finds in each model's answer to its text, and the calls, tokens and dollars of them.

        `form` is the JSON schema of an answer; if `read` finds nothing in one (ValueError), the model is asked again.
        """
        contents = [one.encode("utf-8", "replace").decode() for one in contents]  # half a surrogate pair can't be sent
        lock, paid = self._wanted.setdefault(contents[0], (asyncio.Lock(), Counter()))
        async with lock:  # who wants the same at the same time finds the answers in the cache
            ask = functools.partial(self._verdict, form, read, paid)
            found = [await ask(index, content) for index, content in enumerate(contents)]
            self._wanted.pop(contents[0], None)
            cost = {name: float(paid[name]) for name in ("calls", "tokens", "dollars")}
            paid.clear()
        return found, cost

    def _stored(self, key: str) -> Any:
        row = self._store.execute("SELECT value FROM answers WHERE key = ?", (key,)).fetchone()
        return None if row is None else row[0]

    async def _verdict(
        self, form: Mapping[str, Any], read: Callable[[str], Any], paid: Counter[str], index: int, content: str
    ) -> Any:
        """Return one model's verdict, from the cache or the endpoint. Raise RewardError where the budget is spent."""
        model = self._models[index]
        schema = {"type": "json_schema", "json_schema": {"name": "verdict", "strict": True, "schema": form}}
        request = {"max_completion_tokens": self.max_tokens, "response_format": schema, **(self.request or {})}
        asked = [self.base_url, model, self._models[:index].count(model), form, request, content]
        key = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()
        if (stored := self._stored(key)) is not None:
            return read(stored)
        spent = self._stored("dollars") or 0.0
        if self.budget is not None and spent >= self.budget:
            raise RewardError(
                f"the judge has cost {spent:.2f} dollars (counted in the cache {self.cache}), its budget is "
                f"{self.budget:g}: raise the judge's budget to go on"
            )
        limits = enumerate((self.requests_per_minute, self.tokens_per_minute))
        requests, tokens = (_window(self.base_url, model, *limit) for limit in limits)
        sizes = len(content.encode()) * TOKENS_PER_BYTE, float(self.max_tokens)
        async with tokens.room(sum(sizes)) as used, requests.room(1):
            paid["calls"] += 1
            text, sizes = await self._ask(model, content, request, sizes)
            used[0] = sum(sizes)
        dollars = sum(price * size for price, size in zip(self.price, sizes, strict=True)) / 1e6
        paid.update({"tokens": sum(sizes), "dollars": dollars})
        self._store.execute(
            "INSERT INTO answers VALUES ('dollars', ?) ON CONFLICT DO UPDATE SET value = value + excluded.value",
            (dollars,),
        )
        try:
            verdict = read(text)
        except ValueError as error:
            raise RetryError(f"{model} wrote {text[:MAX_SHOWN]!r}: {error}") from error
        self._store.execute("INSERT OR REPLACE INTO answers VALUES (?, ?)", (key, text))
        return verdict

    async def _ask(
        self, model: str, content: str, request: Mapping[str, Any], sizes: tuple[float, float]
    ) -> tuple[str, tuple[float, float]]:
        """Return what a model wrote, and the tokens of prompt and answer: as counted there, else the given ones."""
        import openai

        messages: Any = [{"role": "user", "content": content}]
        try:
            async with asyncio.timeout(self.timeout_s):
                response = await self._client.chat.completions.with_raw_response.create(
                    model=model, messages=messages, extra_body=request
                )
        except (TimeoutError, openai.APIConnectionError) as error:
            cause = error.__cause__ if isinstance(error, openai.APIConnectionError) else f"after {self.timeout_s:g} s"
            raise RetryError(f"{self.base_url} does not answer: {cause}") from error
        except (openai.RateLimitError, openai.InternalServerError) as error:
            raise RetryError(str(error), retry_after(error.response.headers)) from error
        try:
            answer = json.loads(response.text)
            text, usage = answer["choices"][0]["message"]["content"], answer.get("usage") or {}
            read, wrote = usage.get("prompt_tokens"), usage.get("completion_tokens")
        except (ValueError, LookupError, TypeError, AttributeError):
            text = read = wrote = None
        counted = all(type(count) is int and 0 <= count <= MAX_TOKENS for count in (read, wrote))
        if text is None and counted:  # as some models end a thought that is too long: paid, but no verdict
            text = ""
        if not isinstance(text, str):
            raise RetryError(f"{self.base_url} answered no chat completion: {response.text[:MAX_SHOWN]!r}")
        return text, (float(read or 0), float(wrote or 0)) if counted else sizes


class Window:
    """Bound the requests, or tokens, that are under way or have ended within a minute; None: no bound."""

    def __init__(self, limit: float | None) -> None:
        self._limit = math.inf if limit is None else limit
        self._ended, self._sum = deque[tuple[float, float]](), 0.0  # (time, amount); of these and what is under way

    @contextlib.asynccontextmanager
    async def room(self, amount: float) -> AsyncIterator[list[float]]:
        """Wait until the amount fits; then it may be replaced by the true one."""
        if amount > self._limit:
            raise ValueError(f"a call may take {amount:g} tokens, but only {self._limit:g} are allowed per minute")
        while True:
            while self._ended and self._ended[0][0] + MINUTE_S <= time.monotonic():
                self._sum -= self._ended.popleft()[1]
            if self._sum + amount <= self._limit:
                break
            await asyncio.sleep(POLL_S)
        self._sum += amount
        used = [amount]
        try:
            yield used
        finally:
            self._sum += used[0] - amount
            self._ended.append((time.monotonic(), used[0]))


@functools.cache
def _window(base_url: str, model: str, kind: int, limit: int | None) -> Window:
    """Return the window that all judges who ask this model share."""
    return Window(limit)
