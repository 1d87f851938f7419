"""hocket's routes, and the parts of the server, behind one guard."""

import contextlib
import functools
from argparse import Namespace
from collections.abc import AsyncIterator, Collection, Sequence

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import Response, StreamingResponse
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from hocket import protocol
from hocket.common.environment import version_of
from hocket.server.engine import Engine
from hocket.server.errors import ApiError, http_error
from hocket.server.generate import Job
from hocket.server.middleware import Guard, unless_client_leaves
from hocket.server.parts import PARTS, Handler, Server, router


def assemble(
    engine: Engine,
    *,
    host: str,
    token: str | None,
    arguments: Namespace | None = None,
    image_hosts: Collection[str] = (),
    max_requests: int = 1024,
) -> Server:
    """Build the app: hocket's routes, then those of the server's parts, behind the guard.

    `arguments` are the engine's. Returns the server, whose guard is the ASGI app to serve.
    """
    app = FastAPI(title="hocket", version=version_of("hocket") or "0", redoc_url=None)
    app.include_router(_routes(engine))
    server = Server(
        app=app,
        engine=engine,
        guard=Guard(app, host=host, token=token),
        arguments=arguments or Namespace(),
        image_hosts=image_hosts,
        max_requests=max_requests,
    )

    # Each part of the server adds its routes, checks and abilities.
    for install in PARTS.each():
        install(server)

    # All refusals have one form.
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, http_error)
    return server


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
        """Report the server's state and weight version, with 200 whatever they are."""
        return engine.health()

    @routes.get("/ready", response_model=protocol.Health)
    async def ready() -> Response:
        """Answer with 200 while the server can generate, and with 503 else: for load balancers."""
        state = engine.health()
        can_generate = state.status in ("ready", "updating")
        return _health(state, 200 if can_generate else 503)

    @routes.get("/live", response_model=protocol.Health)
    async def live() -> Response:
        """Answer with 503 once only a restart helps, and with 200 else: for supervisors."""
        state = engine.health()
        is_lost = state.error is not None and state.error.code not in protocol.CURABLE
        return _health(state, 503 if is_lost else 200)

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


def _health(state: protocol.Health, status: int) -> Response:
    return Response(state.model_dump_json(), status_code=status, media_type="application/json")


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
