"""hocket's routes, beside vLLM's OpenAI-compatible ones and behind the same middleware."""

import contextlib
import functools
import logging
from collections.abc import AsyncIterator, Collection, Sequence
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import Response, StreamingResponse
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from hocket import protocol
from hocket.errors import cause_of
from hocket.server import routes
from hocket.server.engine import Engine
from hocket.server.errors import ApiError, http_error
from hocket.server.generate import Job
from hocket.server.middleware import Guard, unless_client_leaves
from hocket.server.parts import PARTS, Server

logger = logging.getLogger("hocket")


def assemble(app: FastAPI, engine: Engine, *, host: str, token: str | None, image_hosts: Collection[str] = ()) -> Guard:
    """Add hocket's routes to an app that has others, and put the guard in front of all."""
    guard = Guard(app, host=host, token=token)
    app.include_router(_router(engine))
    server = Server(app=app, engine=engine, guard=guard, image_hosts=image_hosts)
    for install in PARTS.each():
        install(server)
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, http_error)
    for stumbled in (AssertionError, AttributeError, LookupError):
        app.add_exception_handler(stumbled, _stumbled)
    app.middleware_stack = None  # vLLM has built it already, without our handlers; built again at the first request
    return guard


class _UnparsedRoute(APIRoute):
    """Leave the body to the endpoint, whose parameter `body` only describes it for /docs."""

    def get_route_handler(self) -> routes.Handler:
        return functools.partial(self.endpoint, body=None)


def _router(engine: Engine) -> APIRouter:
    router = routes.router()

    @router.get("/health")
    async def health() -> protocol.Health:
        """Report what the server holds and does; the one route that needs no token."""
        return engine.health()

    async def generate(request: Request, body: protocol.GenerateRequest) -> Response:
        """Sample completions of each prompt, with the log-prob and the weight version of every token."""
        engine.require_ready()
        message, jobs = await engine.read(await request.body())
        if message.stream:
            return StreamingResponse(_stream(engine, jobs, packed=message.packed), media_type="application/x-ndjson")
        return await unless_client_leaves(request, _all(engine, message, jobs))

    how: dict[str, Any] = {"methods": ["POST"], "response_model": protocol.GenerateResponse}
    router.add_api_route("/generate", generate, route_class_override=_UnparsedRoute, **how)

    router.post("/heartbeat")(engine.heartbeat)
    router.post("/reload_weights")(engine.reload)
    return router


async def _all(engine: Engine, message: protocol.GenerateRequest, jobs: Sequence[Job]) -> Response:
    async with contextlib.aclosing(engine.sampler.completions(jobs)) as finished:
        done = {(job.prompt, job.index): completion async for job, completion in finished}
    completions: list[list[protocol.Completion]] = [[] for _ in message.prompts]
    for prompt, index in sorted(done):
        completions[prompt].append(done[prompt, index])
    answer = protocol.GenerateResponse(version=engine.version, model=engine.model, completions=completions)
    return Response(answer.model_dump_json(), media_type="application/json")


async def _stream(engine: Engine, jobs: Sequence[Job], *, packed: bool) -> AsyncIterator[str]:
    error: protocol.ErrorBody | None = None
    try:
        async with contextlib.aclosing(engine.sampler.completions(jobs)) as finished:
            async for job, completion in finished:
                line = protocol.StreamLine(prompt=job.prompt, index=job.index, completion=completion)
                yield line.model_dump_json(context=packed, ensure_ascii=True) + "\n"
    except ApiError as failed:
        error = failed.body
    end = protocol.StreamEnd(version=engine.version, model=engine.model, error=error)
    yield end.model_dump_json(ensure_ascii=True) + "\n"


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _stumbled(request: Request, error: Exception) -> Response:
    """Answer where Python failed; in vLLM's routes by a value that vLLM did not expect."""
    logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
    message = f"{type(error).__name__}: {cause_of(error)}"
    if request.url.path.startswith("/v1/"):
        return ApiError(400, "refused_by_vllm", message, "look at the types of the body's fields").response()
    return ApiError(500, "internal", message, "the server's log says more").response()
