"""Serve the page of runs. It reads their folders and nothing else, so that no trainer ever waits for a browser."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, Response, StreamingResponse

from hocket.common.machine import url_of
from hocket.errors import HocketError
from hocket.observe import browse, prometheus
from hocket.observe.page import data_of, html, policy
from hocket.observe.reader import RunReader
from hocket.observe.rows import DAMAGED
from hocket.server.errors import invalid
from hocket.server.main import bind, http_server
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


def watch(folders: Sequence[Path], host: str, port: int, token: str | None) -> None:
    """Serve until Ctrl-C or SIGTERM."""
    with contextlib.suppress(KeyboardInterrupt), contextlib.closing(bind(host, port, token, section="observe")) as sock:
        runs = [RunReader(folder) for folder in folders]
        _look(runs)  # a long run takes a second
        app = make_app(runs)
        sock.listen()  # who reads the line may ask at once
        print(f"page: {url_of(host, port)}/", flush=True)
        asyncio.run(_serve(app, sock, host, token))


async def _serve(app: FastAPI, sock: socket.socket, host: str, token: str | None) -> None:
    server = http_server(Guard(app, host=host, token=token, free="/"))
    app.state.server = server
    await server.serve(sockets=[sock])


def make_app(runs: Sequence[RunReader]) -> FastAPI:
    app = FastAPI(title="hocket: page", openapi_url=None)
    for kind in (*DAMAGED, HocketError, OSError):
        app.add_exception_handler(kind, _unreadable)

    @app.get("/")
    def page() -> Response:
        return HTMLResponse(html(None, SELF), headers=HEADERS)

    @app.get("/data")
    async def data() -> Response:
        _look(runs)
        return _json({**data_of(runs), "since": [*zip([run.reads for run in runs], _last_steps(runs), strict=True)]})

    @app.get("/events")
    async def events(request: Request, since: str) -> Response:
        reads, steps = zip(*json.loads(since), strict=True)
        stream = _events(runs, reads, [*map(int, steps)], request)
        return StreamingResponse(stream, media_type="text/event-stream", headers=HEADERS)

    @app.get("/curves")
    async def curves(run: int, first: int, last: int) -> Response:
        return _json(runs[run].curves(first, last))

    @app.get("/rollouts")
    def rollouts(run: int, name: str, group: str | None = None) -> Response:
        folder = runs[run].folder
        return _json(browse.in_short(folder, name) if group is None else browse.group(folder, name, group))

    @app.get("/tokens")
    def tokens(run: int, name: str, id: str) -> Response:
        return _json(browse.tokens(runs[run].folder, name, id).get(id, {}))

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(prometheus.text(_look(runs)), media_type=prometheus.CONTENT_TYPE)

    return app


def _look(runs: Sequence[RunReader]) -> Sequence[RunReader]:
    for run in runs:
        run.look()
    return runs


def _json(content: Any) -> Response:
    text = json.dumps(content, allow_nan=False, separators=(",", ":"))
    return Response(text.encode(errors="replace"), media_type="application/json", headers=HEADERS)


async def _unreadable(request: Request, error: Exception) -> Response:
    """Answer what asks for nothing that is there, or for a file that is not as a run writes it."""
    hint = "ask for what the page shows; bring a damaged file back from a copy"
    return invalid(f"{type(error).__name__}: {error}", hint).response()


async def _events(
    runs: Sequence[RunReader], reads: Sequence[int], steps: Sequence[int], request: Request
) -> AsyncIterator[str]:
    """Yield what comes after `steps`, while each run was read anew `reads` times. A slow page gets fewer."""
    before = ""
    while not request.app.state.server.should_exit:
        _look(runs)
        if tuple(run.reads for run in runs) != reads:  # a run was resumed: the page begins anew
            return
        news = json.dumps([run.news(step) for run, step in zip(runs, steps, strict=True)], allow_nan=False)
        yield ":\n\n" if news == before else f"data: {news}\n\n"  # or a comment, which shows that this lives
        steps = _last_steps(runs)
        before = news
        await asyncio.sleep(LOOK_S)


def _last_steps(runs: Sequence[RunReader]) -> tuple[int, ...]:
    return tuple(run.steps[-1] if run.steps else -1 for run in runs)
