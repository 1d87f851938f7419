"""Define hocket's routes, beside vLLM's OpenAI-compatible ones and behind the same middleware."""

import contextlib
import functools
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import Response, StreamingResponse
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from hocket.common.tasks import run_in_thread
from hocket.protocol import (
    AgentRecord,
    Completion,
    DiskSource,
    ErrorBody,
    ErrorResponse,
    GenerateRequest,
    GenerateResponse,
    Health,
    HeartbeatRequest,
    SessionRequest,
    SessionResponse,
    StreamEnd,
    StreamLine,
)
from hocket.server import vllm_api
from hocket.server.engine import Engine
from hocket.server.errors import ApiError, cause_of, parse
from hocket.server.generate import Job
from hocket.server.middleware import Guard, unless_client_leaves
from hocket.server.openai import RouteSessions
from hocket.server.sessions import OpenSessions

logger = logging.getLogger("hocket")

REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorResponse} for status in (400, 401, 404, 408, 409, 413, 422, 500, 503, 507)
}
Handler = Callable[[Request], Coroutine[Any, Any, Response]]


def assemble(app: FastAPI, engine: Engine, *, host: str, token: str | None) -> ASGIApp:
    """Add hocket's routes to an app, in front of its own, and put the guard in front of all of them."""
    known = len(app.router.routes)
    sessions = OpenSessions()
    app.include_router(_router(engine, sessions))
    app.router.routes[:] = app.router.routes[known:] + app.router.routes[:known]
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
    for stumbled in (AssertionError, AttributeError, LookupError):
        app.add_exception_handler(stumbled, _stumbled)
    app.middleware_stack = None  # vLLM has built it already, without our handlers; built again at the first request
    door = RouteSessions(app, sessions, engine.model)
    return Guard(door, host=host, token=token, admits=sessions.admits, require_ready=engine.require_ready)


class _Route(APIRoute):
    """Read bodies as JSON whatever Content-Type says (`curl -d`), in a thread; refuse wrong ones in hocket's form."""

    def get_route_handler(self) -> Handler:
        if self.body_field is None:
            return super().get_route_handler()
        message: Any = self.body_field.field_info.annotation

        async def handled(request: Request) -> Response:
            answer = await self.endpoint(await run_in_thread(parse, message, await request.body()))
            return Response(answer.model_dump_json(), media_type="application/json")

        return handled


class _UnparsedRoute(APIRoute):
    """Leave the body to the endpoint, whose parameter `body` only describes it for /docs."""

    def get_route_handler(self) -> Handler:
        return functools.partial(self.endpoint, body=None)


def _router(engine: Engine, sessions: OpenSessions) -> APIRouter:
    router = APIRouter(tags=["hocket"], responses=REFUSALS, route_class=_Route)

    @router.get("/health")
    async def health() -> Health:
        """Report what the server holds and does; the one route that needs no token."""
        return engine.health()

    async def generate(request: Request, body: GenerateRequest) -> Response:
        """Sample completions of each prompt, with the log-prob and the weight version of every token."""
        message, jobs = await engine.read(await request.body())
        if message.stream:
            return StreamingResponse(_stream(engine, jobs, packed=message.packed), media_type="application/x-ndjson")
        return await unless_client_leaves(request, _all(engine, message, jobs))

    how: dict[str, Any] = {"methods": ["POST"], "response_model": GenerateResponse}
    router.add_api_route("/generate", generate, route_class_override=_UnparsedRoute, **how)

    @router.post("/heartbeat")
    async def heartbeat(request: HeartbeatRequest) -> Health:
        """Take the server for a trainer, keep it, or leave it; another one's requests are refused meanwhile."""
        return engine.heartbeat(request)

    router.post("/reload_weights")(engine.reload)
    router.post("/sleep")(engine.sleep)
    router.post("/wake_up")(engine.wake_up)

    @router.put("/upload/{name}/{file}")
    async def upload(name: str, file: str, request: Request) -> DiskSource:
        """Receive one file of a weight version, for servers that do not see the trainer's disk; COMPLETE comes last."""
        return await engine.upload(name, file, request.stream())

    @router.post("/sessions")
    async def open_session(request: SessionRequest) -> SessionResponse:
        """Open a session: /sessions/ID/v1 is an OpenAI-compatible base URL whose calls are recorded."""
        engine.check(request)
        session = sessions.open(request)
        return SessionResponse(id=session.id, key=session.key, model=engine.model)

    @router.get("/sessions/{session_id}")
    async def read_session(session_id: str) -> AgentRecord:
        """Return what has been sampled in a session."""
        return sessions.get(session_id).record()

    @router.delete("/sessions/{session_id}")
    async def close_session(session_id: str) -> AgentRecord:
        """Close a session, abort its running calls, and return what had been sampled by then."""
        session = sessions.close(session_id)
        record = session.record()
        await vllm_api.abort(engine.llm, session.running)
        engine.require_ready(admits={"asleep"})  # its agent may have taken the failure for an answer
        return record

    return router


async def _all(engine: Engine, message: GenerateRequest, jobs: Sequence[Job]) -> Response:
    async with contextlib.aclosing(engine.sampler.completions(jobs)) as finished:
        done = {(job.prompt, job.index): completion async for job, completion in finished}
    completions: list[list[Completion]] = [[] for _ in message.prompts]
    for prompt, index in sorted(done):
        completions[prompt].append(done[prompt, index])
    answer = GenerateResponse(version=engine.version, model=engine.model, completions=completions)
    return Response(answer.model_dump_json(), media_type="application/json")


async def _stream(engine: Engine, jobs: Sequence[Job], *, packed: bool) -> AsyncIterator[str]:
    error: ErrorBody | None = None
    try:
        async with contextlib.aclosing(engine.sampler.completions(jobs)) as finished:
            async for job, completion in finished:
                line = StreamLine(prompt=job.prompt, index=job.index, completion=completion)
                yield line.model_dump_json(context=packed, ensure_ascii=True) + "\n"
    except ApiError as failed:
        error = failed.body
    yield StreamEnd(version=engine.version, model=engine.model, error=error).model_dump_json(ensure_ascii=True) + "\n"


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "http_error")
    response = ApiError(error.status_code, code, str(error.detail), "the routes are listed at /docs").response()
    response.headers.update(error.headers or {})
    return response


async def _stumbled(request: Request, error: Exception) -> Response:
    """Answer where Python itself failed; in vLLM's routes by a value of a type that vLLM did not expect."""
    logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
    message = f"{type(error).__name__}: {cause_of(error)}"
    if request.url.path.startswith("/v1/"):
        return ApiError(400, "refused_by_vllm", message, "look at the types of the body's fields").response()
    return ApiError(500, "internal", message, "the server's log says more").response()
