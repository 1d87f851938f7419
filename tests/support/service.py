"""A service on loopback that answers POST requests with JSON: what rewards ask (tests/rewards), and a judge for it."""

import asyncio
import contextlib
import itertools
import json
import random
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Self

Headers = dict[str, str]
Answer = tuple[int, Headers, Any]  # status, headers, body: text, or what becomes JSON; None: none, ever


class Service:
    """Counts the requests that it gets, and those that it has at the same time."""

    def __init__(self, answer: Callable[[Headers, Any], Awaitable[Answer | None]]) -> None:
        self._answer = answer
        self.arrivals: list[float] = []
        self.running, self.most = 0, 0
        self.url = ""
        self._connections = set[asyncio.Task[None]]()

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[Self]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with server:
            yield self
            for connection in self._connections:
                connection.cancel()
            await asyncio.gather(*self._connections, return_exceptions=True)

    def most_within(self, seconds: float) -> int:
        """Returns how many requests came within any span of so many seconds."""
        most = first = 0
        for last, arrival in enumerate(self.arrivals):
            while self.arrivals[first] <= arrival - seconds:
                first += 1
            most = max(most, last - first + 1)
        return most

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ended = asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError
        self._connections.add(asyncio.current_task())
        with contextlib.suppress(*ended), contextlib.closing(writer):
            while True:
                _, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")[:-2]
                headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
                body = json.loads(await reader.readexactly(int(headers["content-length"])))
                self.arrivals.append(time.monotonic())
                self.running += 1
                self.most = max(self.most, self.running)
                try:
                    answer = await self._answer(headers, body)
                    if answer is None:
                        await reader.read()  # until the other side gives up
                        return
                finally:
                    self.running -= 1
                status, extra, content = answer
                data = (content if isinstance(content, str) else json.dumps(content)).encode()
                head = {"content-type": "application/json", "content-length": str(len(data))} | extra
                lines = [f"HTTP/1.1 {status} said", *(f"{name}: {value}" for name, value in head.items())]
                writer.write("\r\n".join([*lines, "", ""]).encode() + data)
                await writer.drain()


class Saying(Service):
    """Gives these answers in turn, the last one for ever; keeps what it was asked."""

    def __init__(self, *answers: Answer | None) -> None:
        super().__init__(self._say)
        self._answers = itertools.chain(answers, itertools.repeat(answers[-1]))
        self.bodies: list[Any] = []
        self.headers: Headers = {}

    async def _say(self, headers: Headers, body: Any) -> Answer | None:
        self.headers = headers
        self.bodies.append(body)
        return next(self._answers)


LIES = (  # what a judge writes
    '{"reason": "cut o',
    '{"reason": "so", "score": "8"}',
    '{"reason": "so", "score": 11}',
    '{"reason": "so", "score": NaN}',
    '{"reason": "so", "score": true}',
    '{"score": 9} is what the answer asks for; {"score": 2}',
    '{"reason": "it says "{"score": 9}" but", "points": 2}',
    "a clear 8 out of 10",
    "",
)
WRONG_RANKINGS = (  # of four
    '{"reason": "cut o", "ranking": [1, 2, 3, 4',
    '{"ranking": [1, 1, 2, 3]}',
    '{"ranking": [1, 2, 3]}',
    '{"ranking": [0, 1, 2, 3]}',
    '{"ranking": [2, 3, 4, 5]}',
    '{"ranking": [1, 2, 3, 4, 4]}',
    '{"ranking": [1.0, 2, 3, 4]}',
    '{"ranking": [true, 2, 3, 4]}',
    '{"ranking": ["1", "2", "3", "4"]}',
    '{"ranking": [[1, 2, 3, 4]]}',
    '{"ranking": "4321"}',
    '{"ranking": {"1": 2}}',
    '{"ranking": null}',
    '{"it": {"ranking": [1, 2, 3, 4]}}',
    'The third answer says {"ranking": [3, 1, 2, 4]}, but {"ranking": [1, 2, 3, 4]}',
    "",
)


def completion(text: Any, prompt_tokens: Any = 100, completion_tokens: Any = 20) -> Answer:
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
    return 200, {}, {"choices": [{"message": {"role": "assistant", "content": text}}], "usage": usage}


def functions(service: Service, name: str = "judge", **options: Any) -> dict[str, Any]:
    options = {"base_url": f"{service.url}/v1", "model": "m", "rubric": "Is it sorted?", "key_env": None} | options
    return {name: options}


def shown(body: Any) -> list[int]:
    """Return the answers, numbers, that a judge is asked about, as they stand there."""
    return [int(text) for text in re.findall(r"<answer[^>]*>\n(\d+)\n</answer", body["messages"][0]["content"])]


def ranked(texts: list[int]) -> str:
    """Return a judge's answer that puts the largest number first."""
    return json.dumps({"reason": "so", "ranking": sorted(range(1, len(texts) + 1), key=lambda i: -texts[i - 1])})


class FakeJudge:
    """Scores a completion, a number, by that number, and ranks several; errs, stalls and lies as often as told."""

    def __init__(
        self, errors: float = 0.0, stalls: float = 0.0, lies: float = 0.0, latency_s: float = 0.02, seed: int = 0
    ) -> None:
        self.random, self.latency_s = random.Random(seed), latency_s
        self.errors, self.stalls, self.lies = errors, errors + stalls, errors + stalls + lies

    async def __call__(self, headers: Headers, body: Any) -> Answer | None:
        chance = self.random.random()
        if chance < self.stalls and chance >= self.errors:
            return None
        await asyncio.sleep(self.latency_s * self.random.uniform(0.5, 1.5))
        if chance < self.errors:
            kinds = [(500, {}, "oops"), (503, {}, {}), (429, {"retry-after": "1"}, {"error": {"message": "slow down"}})]
            return self.random.choice(kinds)
        if chance < self.lies:
            lie = completion(self.random.choice(LIES + WRONG_RANKINGS))
            return self.random.choice([lie, (200, {}, "{"), completion(None)])
        if "ranking" in body["messages"][0]["content"]:
            return completion(ranked(shown(body)))
        return completion(json.dumps({"reason": "it says so", "score": shown(body)[0] % 11}))
