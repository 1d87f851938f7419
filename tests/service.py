"""A service on loopback that answers POST requests with JSON: what rewards ask (tests/rewards)."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

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
    async def open(self) -> AsyncIterator["Service"]:
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
