"""Ask language models, at any endpoint that speaks OpenAI's chat completions, within limits and for counted costs."""

import asyncio
import dataclasses
import hashlib
import json
import math
import sqlite3
import time
import weakref
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field

from hocket.config.sections import Names
from hocket.errors import RewardError
from hocket.rewards.base import RetryError
from hocket.rewards.http import AGAIN, MAX_SHOWN, RefusedError, Service
from hocket.rewards.runners import clock, clocked, retried

Count = Annotated[int, Field(ge=1)]
Dollars = Annotated[float, Field(ge=0)]
Tokens = tuple[float, float]  # of a prompt, of an answer
MINUTE_S = 60.0
POLL_S = 0.05
LOCKED_S = 60.0  # to wait for a process that has locked the cache
TOKENS_PER_BYTE = 0.5  # of a prompt, until the endpoint has counted: English has 0.25
MAX_TOKENS = 10**7  # a call that counts more is not believed
UNDER_WAY = Counter[str | None]()  # calls, by the file where they are counted
ADD = "ON CONFLICT DO UPDATE SET value = value + excluded.value"
HOLD = f"INSERT INTO answers SELECT 'dollars', ?1 WHERE ?1 <= ?2 {ADD} WHERE value + excluded.value <= ?2 RETURNING 1"
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
    model: Annotated[Names, Field(min_length=1)]  # each is asked, a name that stands there twice twice
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
        self.check("base_url", self.base_url)
        self._windows = [_windows(self.base_url, model) for model in self.model]
        self._wanted = weakref.WeakValueDictionary[str, asyncio.Lock]()  # by text, as long as somebody wants it
        self._next_to_pay = asyncio.Lock()
        self.call_seconds = clock()  # of its calls, without what they wait for
        self._broken: RewardError | None = None  # after which no statement is tried: nothing would be counted

    async def __aenter__(self) -> Self:
        self._thread = ThreadPoolExecutor(1, "cache")  # waits for other processes, while the event loop goes on
        self._store = sqlite3.connect(self.cache or ":memory:", LOCKED_S, isolation_level=None, check_same_thread=False)
        for statement in OPEN:
            self._execute(statement)
        await self._stored("dollars")  # fails here where the cache can't be used
        for requests, tokens in self._windows:
            requests.limits[self] = self.requests_per_minute or math.inf
            tokens.limits[self] = self.tokens_per_minute or math.inf
        return await super().__aenter__()

    async def __aexit__(self, *exc_info: object) -> None:
        while UNDER_WAY[self.cache]:  # cancelled calls, too, may have cost something
            await asyncio.sleep(POLL_S)
        for both in self._windows:
            for window in both:
                window.limits.pop(self, None)
        self._thread.submit(self._store.close)
        self._thread.shutdown()
        await super().__aexit__()

    async def verdicts(
        self, contents: Sequence[str], form: Mapping[str, Any], read: Callable[[str], Any]
    ) -> tuple[list[Any], dict[str, float]]:
        """Return what `read` finds in each model's answer to its text, and the calls, tokens and dollars of them.

        `form` is the JSON schema of an answer; where `read` finds nothing (ValueError), the model is asked again.
        """
        contents = [one.encode("utf-8", "replace").decode() for one in contents]  # half a surrogate pair can't be sent
        paid = Counter[str]()
        found = list[Any]()
        async with self._wanted.setdefault(contents[0], asyncio.Lock()):  # the next one finds the answers in the cache
            for index, content in enumerate(contents):
                ask = partial(self._verdict, form, read, paid, index, content)
                found.append(await retried(ask, self.retries))
        return found, {name: float(paid[name]) for name in ("calls", "tokens", "dollars")}

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
        stored = await self._stored(key)
        if stored is not None:
            return read(stored)
        body = {"model": model, "messages": [{"role": "user", "content": content}], **request}
        expected = len(content.encode()) * TOKENS_PER_BYTE, float(self.max_tokens)
        requests, tokens = self._windows[index]
        async with tokens.room(sum(expected)), requests.room():
            held = await self._hold(self._dollars((len(question), self.max_tokens)))  # at most a token each
            answer, used = await self._paid(body, expected, held, paid)
        tokens.add(sum(used) - sum(expected))
        text = self._written(answer)
        try:
            verdict = read(text)
        except ValueError as error:
            raise RetryError(f"{model} wrote {text[:MAX_SHOWN]!r}: {error}") from error
        self._execute("INSERT OR REPLACE INTO answers VALUES (?, ?)", key, text)
        return verdict

    async def _paid(
        self, body: Mapping[str, Any], expected: Tokens, held: float, paid: Counter[str]
    ) -> tuple[str, Tokens]:
        """Return what the endpoint answers, and its tokens; count their cost in place of what was held.

        A call that is late, cancelled or not counted may be billed, too: as it was expected.
        """
        paid["calls"] += 1
        UNDER_WAY[self.cache] += 1
        used = expected
        try:
            with clocked(self.call_seconds):
                answer = await self._post(f"{self.base_url}/chat/completions", body, AGAIN | set(range(500, 600)))
            used = _counted(answer) or expected
        except (RefusedError, ValueError):
            used = 0.0, 0.0
            raise
        finally:
            dollars = self._dollars(used)
            paid.update({"tokens": sum(used), "dollars": dollars})
            self._execute(f"INSERT INTO answers VALUES ('dollars', ?) {ADD}", dollars - held)
            UNDER_WAY[self.cache] -= 1
        return answer, used

    def _written(self, answer: str) -> str:
        """Return the text of a chat completion; a model may write none that ends a thought which is too long."""
        try:
            text = json.loads(answer)["choices"][0]["message"]["content"] or ""
            if isinstance(text, str):
                return text
        except (ValueError, LookupError, TypeError):
            pass
        raise RetryError(f"{self.base_url} answered no chat completion: {answer[:MAX_SHOWN]!r}")

    def _dollars(self, tokens: Tokens) -> float:
        return (self.price[0] * tokens[0] + self.price[1] * tokens[1]) / 1e6

    async def _hold(self, dollars: float) -> float:
        """Count what a call may cost before it is made, and return it; wait while calls under way may cost less."""
        if self.budget is None:
            return 0.0
        async with self._next_to_pay:
            while True:
                alone = not UNDER_WAY[self.cache]
                if await asyncio.wrap_future(self._execute(HOLD, dollars, self.budget)):
                    return dollars
                if alone:
                    break
                await asyncio.sleep(POLL_S)
        spent = f"{await self._stored('dollars') or 0:.2f} dollars (counted in the cache {self.cache})"
        advice = f"its budget is {self.budget:g}: raise the judge's budget to go on"
        raise RewardError(f"the judge has cost {spent} and the next call may cost {dollars:.2g}, {advice}")

    async def _stored(self, key: str) -> Any:
        row = await asyncio.wrap_future(self._execute("SELECT value FROM answers WHERE key = ?", key))
        return None if row is None else row[0]

    def _execute(self, statement: str, *values: Any) -> Future[Any]:
        """Have the cache's thread execute a statement, after those before it, and return its first row."""
        return self._thread.submit(self._executed, statement, values)

    def _executed(self, statement: str, values: Sequence[Any]) -> Any:
        if self._broken is not None:
            raise self._broken
        try:
            return self._store.execute(statement, values).fetchone()
        except sqlite3.Error as error:
            self._broken = RewardError(f"the judge's cache {self.cache} can't be used: {error}; free it, then resume")
            raise self._broken from error


def _counted(answer: str) -> Tokens | None:
    """Return the tokens that an endpoint has counted, if that can be believed."""
    try:
        usage = json.loads(answer)["usage"]
        counts = usage["prompt_tokens"], usage["completion_tokens"]
    except (ValueError, LookupError, TypeError):
        return None
    return counts if all(type(count) is int and 0 <= count <= MAX_TOKENS for count in counts) else None


class Window:
    """Bounds the requests, or tokens, that are under way or have ended within a minute, by the smallest limit."""

    def __init__(self) -> None:
        self.limits = dict[Endpoint, float]()  # of the judges that are set up
        self._ended = deque[tuple[float, float]]()  # (time, amount)
        self._sum = 0.0  # of these, and of what is under way

    @asynccontextmanager
    async def room(self, amount: float = 1.0) -> AsyncIterator[None]:
        limit = min(self.limits.values())
        if amount > limit:
            raise ValueError(f"a call may take {amount:g} tokens, but only {limit:g} are allowed per minute")
        while self._sum + amount > min(self.limits.values()):
            await asyncio.sleep(POLL_S)
            while self._ended and self._ended[0][0] + MINUTE_S <= time.monotonic():
                self._sum -= self._ended.popleft()[1]
        self._sum += amount
        try:
            yield
        finally:
            self._sum -= amount
            self.add(amount)

    def add(self, amount: float) -> None:
        """Count what has ended now; below zero to correct what was counted."""
        self._sum += amount
        self._ended.append((time.monotonic(), amount))


@cache
def _windows(base_url: str, model: str) -> tuple[Window, Window]:
    """Return the windows of requests and of tokens that all judges of this process share who ask this model there."""
    return Window(), Window()
