"""A server without an engine, which answers at once: what a benchmark then counts is the client's side alone."""

import asyncio
import contextlib
import json
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection
from typing import Any

from shared import beside

Answer = Callable[[Any], Iterable[bytes]]  # the lines for a request's JSON; None: it has no body


@contextlib.contextmanager
def answering(answer: Answer) -> Iterator[int]:
    """Answers requests in a second process during the body, on the port that it yields."""
    with beside(_serve, answer) as server:
        yield server.recv()


def _serve(pipe: Connection, lines_of: Answer) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head.partition("content-length: ")[2].split("\r\n")[0] or 0)
        request = json.loads(await reader.readexactly(length)) if length else None
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/x-ndjson\r\nconnection: close\r\n\r\n")
        for line in lines_of(request):
            writer.write(line)
            await writer.drain()
        writer.close()

    async def run() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        pipe.send(server.sockets[0].getsockname()[1])
        await asyncio.to_thread(pipe.poll, None)  # until the other side has closed it

    asyncio.run(run())
