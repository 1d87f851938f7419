"""Ask language models that speak OpenAI's chat completions, within limits and for counted costs."""

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
from contextlib import asynccontextmanager, suppress
from functools import cache, cached_property, partial
from typing import Annotated, Any, Self

import pydantic
from pydantic import Field

from hocket.config.deployment import Url
from hocket.config.sections import Names
from hocket.errors import RewardError
from hocket.extras.http_reward.reward import AGAIN, MAX_SHOWN, RefusedError, Service
from hocket.rewards.base import RetryError
from hocket.rewards.runners import clock, clocked, retried
from hocket.types import Image

Count = Annotated[int, Field(ge=1)]
Dollars = Annotated[float, Field(ge=0)]
Tokens = tuple[float, float]  # of a prompt, of an answer
MINUTE_S = 60.0
POLL_S = 0.05
LOCKED_S = 60.0  # to wait for a process that has locked the cache
TOKENS_PER_BYTE = 0.5  # of a prompt, until they are counted: English has 0.25
Counted = Annotated[int, Field(ge=0, le=10**7)]  # more is not believed
OPEN = """
    PRAGMA synchronous=OFF;  -- an answer that is lost is asked for again
    BEGIN IMMEDIATE;  -- fails where it is locked
    CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, value);
    INSERT OR IGNORE INTO answers VALUES ('dollars', 0);
    COMMIT;
"""
SPEND = "UPDATE answers SET value = value + ?1 WHERE key = 'dollars' AND value + ?1 <= ?2 RETURNING 1"


@dataclasses.dataclass(kw_only=True, eq=False)
class Endpoint(Service):
    """The options of every judge (docs/rewards.md), and the way to ask its models."""

    again = AGAIN | {*range(500, 600)}
    base_url: Url
    model: Annotated[Names, Field(min_length=1)]
    key_env: str | None = dataclasses.field()  # to be said; null: none is sent
    request: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    max_tokens: Count = 512
    requests_per_minute: Count | None = None
    tokens_per_minute: Count | None = None
    price: tuple[Dollars, Dollars] = (0.0, 0.0)  # per million tokens of prompts, of answers
    budget: Dollars | None = None
    cache: str | None = None
    retries: int

    def __post_init__(self) -> None:
        if self.tokens_per_minute is not None and self.tokens_per_minute <= self.max_tokens:
            raise ValueError(f"no call fits tokens_per_minute: set it above max_tokens, which is {self.max_tokens}")
        if self.budget is not None and not (self.cache and max(self.price) > 0):
            price = "price: [dollars per million tokens of prompts, of answers]"
            raise ValueError(f"a budget needs the {price}, and a cache: the file where all judges of the run count")
        super().__post_init__()
        self._wanted = weakref.WeakValueDictionary[str, asyncio.Lock]()  # by text, as long as somebody wants it
        self._under_way = 0  # calls
        self.call_seconds = clock()
        self._thread = ThreadPoolExecutor(1, "cache")  # waits for other processes, while the event loop goes on
        self._broken: RewardError | None = None  # after which nothing would be counted: no statement is tried

    async def __aenter__(self) -> Self:
        await self._stored("dollars")  # fails here where the cache can't be used
        return await super().__aenter__()

    async def __aexit__(self, *exc_info: object) -> None:
        while self._under_way:  # cancelled calls, too, may have cost something
            await asyncio.sleep(POLL_S)
        self._thread.submit(self._store.close)
        self._thread.shutdown()
        await super().__aexit__()

    async def verdicts(
        self, contents: Sequence[str], form: Mapping[str, Any], read: Callable[[str], Any], images: Sequence[Image] = ()
    ) -> tuple[list[Any], Counter[str]]:
        """Return what `read` finds in each model's answer to text and images, and their calls, tokens and dollars.

        `form`: JSON schema of an answer. A model is asked again where `read` raises ValueError.
        """
        contents = [one.encode("utf-8", "replace").decode() for one in contents]  # no half surrogate pair
        paid = Counter[str]()
        found = list[Any]()
        async with self._wanted.setdefault(contents[0], asyncio.Lock()):  # the next one finds the answers in the cache
            for index, content in enumerate(contents):
                ask = partial(self._verdict, form, read, paid, images, index, content)
                found.append(await retried(ask, self.retries))
        return found, paid

    async def _verdict(
        self,
        form: Mapping[str, Any],
        read: Callable[[str], Any],
        paid: Counter[str],
        images: Sequence[Image],
        index: int,
        content: str,
    ) -> Any:
        """Return one model's verdict. Raise RewardError where the budget is spent."""
        model = self.model[index]
        schema = {"type": "json_schema", "json_schema": {"name": "verdict", "strict": True, "schema": form}}
        request = {"max_completion_tokens": self.max_tokens, "response_format": schema, **self.request}
        asked = [self.base_url, model, self.model[:index].count(model), form, request, content]
        asked += (image.name for image in images)
        question = json.dumps(asked, sort_keys=True)
        key = hashlib.sha256(question.encode()).hexdigest()
        with suppress(ValueError):  # there is none, or it is damaged
            return read(str(await self._stored(key)))
        said: Any = content
        if images:
            from hocket.common.vision import part_of

            said = [{"type": "text", "text": content}, *(part_of(image.data) for image in images)]
        body = {"model": model, "messages": [{"role": "user", "content": said}], **request}
        expected = len(content.encode()) * TOKENS_PER_BYTE, float(self.max_tokens)
        requests = _window(self.base_url, model, "requests", self.requests_per_minute)
        tokens = _window(self.base_url, model, "tokens", self.tokens_per_minute)
        async with tokens.room(sum(expected)), requests.room():
            held = await self._hold(self._dollars((len(question), self.max_tokens)))  # at most a token each
            answer, used = await self._paid(body, expected, held, paid)
        tokens.add(sum(used) - sum(expected))
        try:
            text = str(json.loads(answer)["choices"][0]["message"]["content"] or "")  # none: the thought was too long
        except (ValueError, LookupError, TypeError) as error:
            raise RetryError(f"{self.base_url} answered no chat completion: {answer[:MAX_SHOWN]!r}") from error
        try:
            verdict = read(text)
        except ValueError as error:
            raise RetryError(f"{model} wrote {text[:MAX_SHOWN]!r}: {error}") from error
        self._execute("INSERT OR REPLACE INTO answers VALUES (?, ?)", key, text)
        return verdict

    async def _paid(
        self, body: Mapping[str, Any], expected: Tokens, held: float, paid: Counter[str]
    ) -> tuple[str, Tokens]:
        """Return the answer and its tokens; count their cost in place of what was held.

        A call that is late or cancelled may be billed, too: as it was expected.
        """
        paid["calls"] += 1
        self._under_way += 1
        used = expected
        try:
            with clocked(self.call_seconds):
                answer = await self._post(f"{self.base_url}/chat/completions", body)
            used = _counted(answer, expected)
        except (RefusedError, ValueError):
            used = 0.0, 0.0
            raise
        finally:
            dollars = self._dollars(used)
            paid.update({"tokens": sum(used), "dollars": dollars})
            self._execute(SPEND, dollars - held, math.inf)
            self._under_way -= 1
        return answer, used

    def _dollars(self, tokens: Tokens) -> float:
        return (self.price[0] * tokens[0] + self.price[1] * tokens[1]) / 1e6

    async def _hold(self, dollars: float) -> float:
        """Count what a call may cost before it is made, and return it. Raise RewardError where that is too much."""
        if self.budget is None:
            return 0.0
        if await asyncio.wrap_future(self._execute(SPEND, dollars, self.budget)) is None:
            spent = f"{await self._stored('dollars'):.2f} dollars (counted in the cache {self.cache})"
            advice = f"its budget is {self.budget:g}: raise the judge's budget to go on"
            raise RewardError(f"the judge has cost {spent} and the next call may cost {dollars:.2g}, {advice}")
        return dollars

    async def _stored(self, key: str) -> Any:
        (value,) = await asyncio.wrap_future(self._execute("SELECT max(value) FROM answers WHERE key = ?", key))
        return value

    def _execute(self, statement: str, *values: Any) -> Future[Any]:
        """Have the cache's thread execute a statement, in turn, and return its first row."""
        return self._thread.submit(self._executed, statement, values)

    def _executed(self, statement: str, values: Sequence[Any]) -> Any:
        if self._broken is not None:
            raise self._broken
        try:
            return self._store.execute(statement, values).fetchone()
        except sqlite3.Error as error:
            cure = "it must be a file that no other process holds, in a folder that is there: mend that, then resume"
            self._broken = RewardError(f"the judge's cache {self.cache} can't be used: {error}; {cure}")
            raise self._broken from error

    @cached_property
    def _store(self) -> sqlite3.Connection:
        store = sqlite3.connect(self.cache or ":memory:", LOCKED_S, isolation_level=None)
        store.text_factory = partial(str, encoding="utf-8", errors="replace")
        store.executescript(OPEN)
        return store


class Usage(pydantic.BaseModel, strict=True):
    prompt_tokens: Counted
    completion_tokens: Counted


def _counted(answer: str, expected: Tokens) -> Tokens:
    try:
        usage = Usage.model_validate(json.loads(answer)["usage"])
    except (ValueError, LookupError, TypeError):
        return expected
    return usage.prompt_tokens, usage.completion_tokens


class Window:
    """Bounds the requests, or tokens, under way or ended within a minute."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._ended = deque[tuple[float, float]]()  # (time, amount)
        self._sum = 0.0  # of these and what is under way

    @asynccontextmanager
    async def room(self, amount: float = 1.0) -> AsyncIterator[None]:
        if amount > self._limit:
            raise ValueError(f"a call may take {amount:g} tokens, but only {self._limit:g} are allowed per minute")
        while self._sum + amount > self._limit:
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
def _window(base_url: str, model: str, what: str, limit: int | None) -> Window:
    """Return the window that all judges share who ask this model within this limit."""
    return Window(limit or math.inf)
