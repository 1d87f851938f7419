"""hocket's routes, beside vLLM's OpenAI-compatible ones and behind the same middleware."""

import contextlib
import functools
from collections.abc import AsyncIterator, Collection, Sequence

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import Response, StreamingResponse
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from hocket import protocol
from hocket.server.engine import Engine
from hocket.server.errors import ApiError, http_error
from hocket.server.generate import Job
from hocket.server.middleware import Guard, unless_client_leaves
from hocket.server.parts import PARTS, Handler, Server, router


def assemble(
    app: FastAPI,
    engine: Engine,
    *,
    host: str,
    token: str | None,
    image_hosts: Collection[str] = (),
) -> Guard:
    """Add hocket's routes to vLLM's app, and put the guard in front of all routes.

    Returns the guard, which is the ASGI app to serve.
    """
    guard = Guard(app, host=host, token=token)
    app.include_router(_routes(engine))

    # Each part of the server adds its routes, checks and abilities.
    server = Server(app=app, engine=engine, guard=guard, image_hosts=image_hosts)
    for install in PARTS.each():
        install(server)

    # All refusals have one form.
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, http_error)
    # vLLM has built the middleware already, without our handlers. Without it, the first request
    # builds it again.
    app.middleware_stack = None
    return guard


class _UnparsedRoute(APIRoute):
    """A route whose endpoint parses the body itself, in the sampler's own thread (generate.py).

    The endpoint's parameter `body` only describes the body for /docs, and is None.
    """

    def get_route_handler(self) -> Handler:
        return functools.partial(self.endpoint, body=None)


def _routes(engine: Engine) -> APIRouter:
    """Make the routes of the core: health, generation, heartbeats and weight versions."""
    routes = router()

    @routes.get("/health")
    async def health() -> protocol.Health:
        """Report the server's state and weight version. No other route works without the token."""
        return engine.health()

    async def generate(request: Request, body: protocol.GenerateRequest) -> Response:
        """Sample completions of each prompt, with every token's log-prob and weight version."""
        engine.require_ready()
        message, jobs = await engine.read(await request.body())
        if message.stream:
            lines = _answer_lines(engine, jobs, packed=message.packed)
            return StreamingResponse(lines, media_type="application/x-ndjson")
        return await unless_client_leaves(request, _all(engine, message, jobs))

    routes.add_api_route(
        "/generate",
        generate,
        methods=["POST"],
        response_model=protocol.GenerateResponse,
        route_class_override=_UnparsedRoute,
    )
    routes.post("/heartbeat")(engine.heartbeat)
    routes.post("/reload_weights")(engine.reload)
    return routes


async def _all(
    engine: Engine,
    message: protocol.GenerateRequest,
    jobs: Sequence[Job],
) -> Response:
    """Answer with all completions at once, in the order of the prompts."""
    # They finish in any order.
    finished = dict[tuple[int, int], protocol.Completion]()
    async with contextlib.aclosing(engine.sampler.completions(jobs)) as sampled:
        async for job, completion in sampled:
            finished[job.prompt, job.index] = completion
    completions: list[list[protocol.Completion]] = [[] for _ in message.prompts]
    for prompt, index in sorted(finished):
        completions[prompt].append(finished[prompt, index])
    answer = protocol.GenerateResponse(
        version=engine.version,
        model=engine.model,
        completions=completions,
    )
    return Response(answer.model_dump_json(), media_type="application/json")


async def _answer_lines(engine: Engine, jobs: Sequence[Job], *, packed: bool) -> AsyncIterator[str]:
    """Yield a line for each completion as it finishes, then a line that ends the answer.

    The status is sent before anything can fail, so the last line carries the error, if any.
    """
    error: protocol.ErrorBody | None = None
    try:
        async with contextlib.aclosing(engine.sampler.completions(jobs)) as sampled:
            async for job, completion in sampled:
                line = protocol.StreamLine(
                    prompt=job.prompt,
                    index=job.index,
                    completion=completion,
                )
                # With a context, protocol.Column writes numbers per token as base64.
                yield line.model_dump_json(context=packed, ensure_ascii=True) + "\n"
    except ApiError as failure:
        error = failure.body
    end = protocol.StreamEnd(version=engine.version, model=engine.model, error=error)
    yield end.model_dump_json(ensure_ascii=True) + "\n"


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()
