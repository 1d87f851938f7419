"""Serve the page of runs. It only reads their folders, so that no trainer waits for a browser."""

import asyncio
import contextlib
import itertools
import json
import socket
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, Response, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST

from hocket.common.machine import url_of
from hocket.errors import HocketError
from hocket.extras.page import prometheus
from hocket.extras.page.page import data_of, html, policy
from hocket.extras.page.reader import RunReader
from hocket.observe.rows import DAMAGED
from hocket.server.errors import invalid
from hocket.server.main import http_server
from hocket.server.middleware import Guard

LOOK_S = 0.5  # between looks at the folders, while a page is open
SELF = "'self'"
HEADERS = {
    "Content-Security-Policy": f"{policy(SELF)}; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


def watch(folders: Sequence[Path], sock: socket.socket, token: str | None) -> None:
    """Serve on a socket that listens, until Ctrl-C or SIGTERM."""
    host, port, *_ = sock.getsockname()
    with contextlib.suppress(KeyboardInterrupt):
        runs = [RunReader(folder) for folder in folders]
        _look(runs)  # a long run takes a second
        print(f"page: {url_of(host, port)}/", flush=True)
        app = make_app(runs)
        app.state.server = http_server(Guard(app, host=host, token=token, free=("/",)), host)
        asyncio.run(app.state.server.serve(sockets=[sock]))


def make_app(runs: Sequence[RunReader]) -> FastAPI:
    """Make the page's routes. They answer with an error if a run's file is damaged."""
    app = FastAPI(title="hocket: page", openapi_url=None)
    for kind in (*DAMAGED, HocketError, OSError):
        app.add_exception_handler(kind, _unreadable)

    @app.get("/")
    def page() -> Response:
        return HTMLResponse(html(None, SELF), headers=HEADERS)

    @app.get("/events")
    async def events() -> Response:
        stream = _events(runs)
        first = next(stream)  # before the answer's head, so that its error becomes the answer
        paced = _paced(itertools.chain([first], stream), app.state.server)
        return StreamingResponse(paced, media_type="text/event-stream", headers=HEADERS)

    @app.get("/rollouts")
    def rollouts(run: int, name: str) -> Response:
        return _json(runs[run].rollouts(name))

    @app.get("/tokens")
    def tokens(run: int, name: str, group: str) -> Response:
        return _json(runs[run].rollouts(name, group, tokens=True))

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(prometheus.text(_look(runs)), media_type=CONTENT_TYPE_LATEST)

    return app


def _look(runs: Sequence[RunReader]) -> Sequence[RunReader]:
    for run in runs:
        run.look()
    return runs


def _dump(content: Any) -> str:
    return json.dumps(content, allow_nan=False, separators=(",", ":"))


def _json(content: Any) -> Response:
    return Response(
        _dump(content).encode(errors="replace"), media_type="application/json", headers=HEADERS
    )


async def _unreadable(request: Request, error: Exception) -> Response:
    """Answer a request for what is not there, or for a file that is not as a run writes it."""
    hint = "ask for what the page shows; bring a damaged file back from a copy"
    return invalid(f"{type(error).__name__}: {error}", hint).response()


def _events(runs: Sequence[RunReader]) -> Iterator[str]:
    """Yield all that a page shows; then at each look the news, or all if a run was resumed."""
    reads: list[int] = []
    steps: list[int] = []
    before = ""
    while True:
        _look(runs)
        news: Any
        if reads == [run.reads for run in runs]:
            news = [run.news(step) for run, step in zip(runs, steps, strict=True)]
        else:
            news = data_of(runs)
        reads = [run.reads for run in runs]
        steps = [run.last_step for run in runs]
        text = _dump(news)
        # Without news a comment shows that the connection is alive.
        yield ":\n\n" if text == before else f"data: {text}\n\n"
        before = text


async def _paced(events: Iterable[str], server: uvicorn.Server) -> AsyncIterator[str]:
    for event in events:
        yield event  # returns when it is sent: a slow page gets fewer
        await asyncio.sleep(LOOK_S)
        if server.should_exit:
            return
