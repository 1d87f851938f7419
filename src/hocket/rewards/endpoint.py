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
import weakref
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field

from hocket.config.sections import Names
from hocket.errors import RewardError
from hocket.rewards.base import RetryError
from hocket.rewards.http import AGAIN, MAX_SHOWN, RefusedError, Service
from hocket.rewards.runners import clock, clocked, retried

Models = Annotated[Names, Field(min_length=1)]
Count = Annotated[int, Field(ge=1)]
Dollars = Annotated[float, Field(ge=0)]
MINUTE_S, POLL_S = 60.0, 0.05
LOCKED_S = 60.0  # to wait for a process that has locked the cache
TOKENS_PER_BYTE = 0.5  # of a prompt, until the endpoint has counted: English has 0.25
MAX_TOKENS = 10**7  # a call that counts more is not believed
UNDER_WAY = Counter[str | None]()  # calls, by the file where they are counted
ADD = "ON CONFLICT DO UPDATE SET value = value + excluded.value"
HOLD = f"INSERT INTO answers SELECT 'dollars', ?1 WHERE ?1 <= ?2 {ADD} WHERE value + excluded.value <= ?2"
OPEN = (
    "PRAGMA synchronous=OFF",  # an answer that is lost is asked for again
    "BEGIN IMMEDIATE",  # fails where it is locked
    "CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, value)",
    "COMMIT",
)


@dataclasses.dataclass(kw_only=True, eq=False)
class Endpoint(Service):
    """The options of every judge, as fields, and the way to ask its models; the key is never in a config."""

    base_url: str  # "https://api.openai.com/v1", "http://127.0.0.1:8000/v1"
    model: Models  # several: each is asked, a name that stands there twice twice
    key_env: str | None = ""  # environment variable that holds the key, all that is sent of it; None: none is
    request: Mapping[str, Any] | None = None  # more fields; response_format None: it can't follow a JSON schema
    max_tokens: Count = 512  # of an answer
    requests_per_minute: Count | None = None  # for each model of this endpoint; of several rewards' limits the smallest
    tokens_per_minute: Count | None = None
    price: tuple[Dollars, Dollars] = (0.0, 0.0)  # per million tokens of prompts, of answers
    budget: Dollars | None = None  # that end the run; counted in the cache, so that a resumed run counts on
    cache: str | None = None  # file with the answers by content; None: in memory
    retries: int  # of a call

    def __post_init__(self) -> None:
        if "" in self.model:
            raise ValueError("a model must have a name")
        if self.tokens_per_minute is not None and self.tokens_per_minute <= self.max_tokens:
            raise ValueError(f"no call fits tokens_per_minute: set it above max_tokens, which is {self.max_tokens}")
        if self.budget is not None and not (self.cache and max(self.price) > 0):
            price = "price: [dollars per million tokens of prompts, of answers]"
            raise ValueError(f"a budget needs the {price}, and a cache: the file where all judges of the run count")
        if self.cache and (Path(self.cache).is_dir() or not Path(self.cache).parent.is_dir()):
            raise ValueError(f"the cache {self.cache} must be a file, in a folder that is there: name another one")
        if self.key_env == "":
            if not self.base_url.startswith("https://api.openai.com/"):
                advice = f"the variable that holds the key of {self.base_url}, or null: none is sent"
                raise ValueError(f"set key_env: {advice}")
            self.key_env = "OPENAI_API_KEY"
        self.base_url = self.base_url.rstrip("/")
        self._name("base_url", self.base_url)
        self._url += "/chat/completions"
        self._wanted = weakref.WeakValueDictionary[str, asyncio.Lock]()  # by text, as long as somebody wants it
        self._next_to_pay = asyncio.Lock()
        self.seconds = clock()  # of its calls, without what they wait for
        self._broken: sqlite3.Error | None = None  # after which no statement is tried: nothing would be counted

    async def __aenter__(self) -> Self:
        self._thread = ThreadPoolExecutor(1, "cache")  # waits for other processes, while the event loop goes on
        self._store = sqlite3.connect(self.cache or ":memory:", LOCKED_S, isolation_level=None, check_same_thread=False)
        for statement in OPEN:
            self._execute(statement)
        await self._stored("dollars")  # fails here where the cache can't be used
        limits = self.requests_per_minute or math.inf, self.tokens_per_minute or math.inf
        windows = (_windows(self.base_url, model) for model in self.model)
        self._limits = [pair for both in windows for pair in zip(both, limits, strict=True)]
        for window, limit in self._limits:
            window.limits.append(limit)
        return await super().__aenter__()

    async def __aexit__(self, *exc_info: object) -> None:
        while UNDER_WAY[self.cache]:  # cancelled calls, too, may have cost something
            await asyncio.sleep(POLL_S)
        for window, limit in self._limits:
            window.limits.remove(limit)
        self._thread.submit(self._store.close)
        self._thread.shutdown()
        await super().__aexit__()

    async def verdicts(
        self, contents: Sequence[str], form: Mapping[str, Any], read: Callable[[str], Any]
    ) -> tuple[list[Any], dict[str, float]]:
        """Return what `read` finds in each model's answer to its text, and the calls, tokens and dollars of them.

        `form` is the JSON schema of an answer; if `read` finds nothing in one (ValueError), the model is asked again.
        """
        contents = [one.encode("utf-8", "replace").decode() for one in contents]  # half a surrogate pair can't be sent
        paid = Counter[str]()
        found = list[Any]()
        async with self._wanted.setdefault(contents[0], asyncio.Lock()):  # the next one finds the answers in the cache
            for index, content in enumerate(contents):
                ask = functools.partial(self._verdict, form, read, paid, index, content)
                found.append(await retried(ask, self.retries))
        return found, {name: float(paid[name]) for name in ("calls", "tokens", "dollars")}

    def _execute(self, statement: str, *values: Any) -> Future[Any]:
        """Have the cache's thread execute a statement, after those before it, and return its first row."""
        return self._thread.submit(self._executed, statement, values)

    def _executed(self, statement: str, values: Sequence[Any]) -> Any:
        if self._broken is None:
            try:
                return self._store.execute(statement, values).fetchone()
            except sqlite3.Error as error:
                self._broken = error
        raise RewardError(f"the judge's cache {self.cache} can't be used: {self._broken}; free it, then resume")

    async def _stored(self, key: str) -> Any:
        row = await asyncio.wrap_future(self._execute("SELECT value FROM answers WHERE key = ?", key))
        return None if row is None else row[0]

    async def _verdict(
        self, form: Mapping[str, Any], read: Callable[[str], Any], paid: Counter[str], index: int, content: str
    ) -> Any:
        """Return one model's verdict, from the cache or the endpoint. Raise RewardError where the budget is spent."""
        model = self.model[index]
        schema = {"type": "json_schema", "json_schema": {"name": "verdict", "strict": True, "schema": form}}
        request = {"max_completion_tokens": self.max_tokens, "response_format": schema, **(self.request or {})}
        asked = [self.base_url, model, self.model[:index].count(model), form, request, content]
        question = json.dumps(asked, sort_keys=True)
        key = hashlib.sha256(question.encode()).hexdigest()
        if (stored := await self._stored(key)) is not None:
            return read(stored)
        requests, tokens = _windows(self.base_url, model)
        sizes = [len(content.encode()) * TOKENS_PER_BYTE, float(self.max_tokens)]
        async with tokens.room(sum(sizes)) as used, requests.room(1):
            held = await self._hold(self._dollars([len(question), self.max_tokens]))  # at most a token each
            paid["calls"] += 1
            UNDER_WAY[self.cache] += 1
            try:
                with clocked(self.seconds):
                    text = await self._ask(model, content, request, sizes)
                used[0] = sum(sizes)
            finally:  # a call that is late, cancelled or not understood may be billed, too
                dollars = self._dollars(sizes)
                paid.update({"tokens": sum(sizes), "dollars": dollars})
                self._execute(f"INSERT INTO answers VALUES ('dollars', ?) {ADD}", dollars - held)
                UNDER_WAY[self.cache] -= 1
        try:
            verdict = read(text)
        except ValueError as error:
            raise RetryError(f"{model} wrote {text[:MAX_SHOWN]!r}: {error}") from error
        self._execute("INSERT OR REPLACE INTO answers VALUES (?, ?)", key, text)
        return verdict

    def _dollars(self, sizes: Sequence[float]) -> float:
        return sum(price * size for price, size in zip(self.price, sizes, strict=True)) / 1e6

    async def _hold(self, dollars: float) -> float:
        """Count what a call may cost before it is made, and return it; wait while calls under way may cost less.

        Raise RewardError where the budget has not so much left.
        """
        if self.budget is None:
            return 0.0
        async with self._next_to_pay:
            while True:
                alone = not UNDER_WAY[self.cache]
                self._execute(HOLD, dollars, self.budget)
                (held,) = await asyncio.wrap_future(self._execute("SELECT changes()"))
                if held:
                    return dollars
                if alone:
                    break
                await asyncio.sleep(POLL_S)
        spent = f"{await self._stored('dollars') or 0:.2f} dollars (counted in the cache {self.cache})"
        advice = f"its budget is {self.budget:g}: raise the judge's budget to go on"
        raise RewardError(f"the judge has cost {spent} and the next call may cost {dollars:.2g}, {advice}")

    async def _ask(self, model: str, content: str, request: Mapping[str, Any], sizes: list[float]) -> str:
        """Return what a model wrote; set `sizes`, its prompt's and answer's tokens, to the counts of the endpoint.

        They stay where it may bill a call that it has not counted, and are 0 where it has refused or not got it.
        """
        try:
            body = {"model": model, "messages": [{"role": "user", "content": content}], **request}
            text = await self._post(body, AGAIN | set(range(500, 600)))
        except (RefusedError, ValueError):
            sizes[:] = 0.0, 0.0
            raise
        try:
            answer = json.loads(text)
            usage = answer.get("usage") or {}
            counts: list[Any] = [usage.get("prompt_tokens"), usage.get("completion_tokens")]
            if counted := all(type(count) is int and 0 <= count <= MAX_TOKENS for count in counts):
                sizes[:] = counts
            written = answer["choices"][0]["message"]["content"]
        except (ValueError, LookupError, TypeError, AttributeError):
            written, counted = None, False
        if written is None and counted:  # as some models end a thought that is too long: paid, but no verdict
            written = ""
        if not isinstance(written, str):
            raise RetryError(f"{self.base_url} answered no chat completion: {text[:MAX_SHOWN]!r}")
        return written


class Window:
    """Bounds the requests, or tokens, that are under way or have ended within a minute, by the smallest limit."""

    def __init__(self) -> None:
        self.limits = list[float]()  # of the judges that are set up
        self._ended, self._sum = deque[tuple[float, float]](), 0.0  # (time, amount); of these and what is under way

    @contextlib.asynccontextmanager
    async def room(self, amount: float) -> AsyncIterator[list[float]]:
        """Wait until the amount fits; then it may be replaced by the true one."""
        while True:
            limit = min(self.limits)
            if amount > limit:
                raise ValueError(f"a call may take {amount:g} tokens, but only {limit:g} are allowed per minute")
            while self._ended and self._ended[0][0] + MINUTE_S <= time.monotonic():
                self._sum -= self._ended.popleft()[1]
            if self._sum + amount <= limit:
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
def _windows(base_url: str, model: str) -> tuple[Window, Window]:
    """Return the windows of requests and of tokens that all judges of this process share who ask this model there."""
    return Window(), Window()
