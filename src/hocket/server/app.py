"""The routes: ours beside vLLM's OpenAI-compatible ones, on one port, behind the same door."""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, Protocol, TypeVar

import pydantic
from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import Response, StreamingResponse
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp

from hocket.config import Config
from hocket.protocol import (
    AgentRecord,
    ErrorBody,
    ErrorResponse,
    GenerateRequest,
    GenerateResponse,
    GroupRequest,
    GroupResponse,
    Health,
    ReloadRequest,
    ReloadResponse,
    SessionRequest,
    SessionResponse,
    SleepRequest,
    SleepResponse,
    StreamEnd,
    UploadResponse,
    WakeRequest,
)
from hocket.server.errors import ApiError, from_validation
from hocket.server.middleware import LimitBody, RefuseWebPages, RefuseWhenFailed, RequireToken
from hocket.server.requests import Job
from hocket.server.sessions import SessionDoor, Sessions

M = TypeVar("M", bound=pydantic.BaseModel)

CLIENT_CLOSED_REQUEST = 499
"""Status that nobody receives: the client has gone."""


class Generator(Protocol):
    """What the routes need of an engine; `hocket.server.engine.Engine` is one."""

    @property
    def version(self) -> int: ...
    @property
    def model(self) -> str: ...
    def failure(self) -> ErrorBody | None: ...
    def health(self) -> Health: ...
    async def read(self, body: bytes) -> tuple[GenerateRequest, list[Job]]: ...
    def check(self, request: SessionRequest) -> None: ...
    async def abort(self, request_ids: Sequence[str]) -> None: ...
    def completions(self, jobs: Sequence[Job]) -> AsyncGenerator[tuple[Job, dict[str, Any]], None]: ...
    async def join_group(self, request: GroupRequest) -> GroupResponse: ...
    async def reload(self, request: ReloadRequest) -> ReloadResponse: ...
    async def sleep(self, request: SleepRequest) -> SleepResponse: ...
    async def wake_up(self, request: WakeRequest) -> SleepResponse: ...
    async def upload(self, name: str, file: str, chunks: AsyncIterator[bytes]) -> UploadResponse: ...


def assemble(app: FastAPI, engine: Generator, config: Config) -> ASGIApp:
    """Adds our routes to an app, in front of its own, and puts the middleware before all of them."""
    known = len(app.router.routes)
    sessions = Sessions()
    app.include_router(_router(engine))
    app.include_router(_session_router(engine, sessions))
    ours = app.router.routes[known:]
    app.router.routes[:] = ours + app.router.routes[:known]
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.middleware_stack = None  # vLLM has built it already, without our handlers; built again at the first request
    _document_bodies(app)
    door: ASGIApp = SessionDoor(app, sessions, config.model.path)
    door = RefuseWhenFailed(door, engine.failure)
    door = LimitBody(door, config.server.max_body_mib << 20)
    if config.token is None:
        return RefuseWebPages(door, config.server.host)
    return RequireToken(door, config.token, sessions.admits)


def _router(engine: Generator) -> APIRouter:
    router = APIRouter(tags=["hocket"])
    refusals = _refusals()

    @router.get("/health", responses=refusals)
    async def health() -> Health:
        """Tells what the server holds and does; the one route that needs no token."""
        return engine.health()

    @router.post(
        "/generate", response_model=GenerateResponse, responses=refusals, openapi_extra=_body("GenerateRequest")
    )
    async def generate(request: Request) -> Response:
        """Samples n completions of each prompt, with the log-prob and the weight version of every token."""
        message, jobs = await engine.read(await request.body())
        if message.stream:
            return StreamingResponse(_stream(engine, jobs), media_type="application/x-ndjson")
        return await _unless_client_leaves(request, lambda: _all(engine, message, jobs))

    @router.post(
        "/reload_weights", response_model=ReloadResponse, responses=refusals, openapi_extra=_body("ReloadRequest")
    )
    async def reload_weights(request: Request) -> ReloadResponse:
        """Takes over a new weight version without a restart."""
        message = _parse(ReloadRequest, await request.body())
        # Loading goes on when the client leaves: a repeated call then finds the version and is answered at once.
        return await engine.reload(message)

    @router.post(
        "/init_weight_group", response_model=GroupResponse, responses=refusals, openapi_extra=_body("GroupRequest")
    )
    async def init_weight_group(request: Request) -> GroupResponse:
        """Connects the engine's workers with a trainer that will send weights straight from its memory."""
        return await engine.join_group(_parse(GroupRequest, await request.body()))

    @router.post("/sleep", response_model=SleepResponse, responses=refusals, openapi_extra=_body("SleepRequest"))
    async def sleep(request: Request) -> SleepResponse:
        """Takes weights and KV cache off the GPU, for a trainer to use it."""
        return await engine.sleep(_parse(SleepRequest, await request.body()))

    @router.post("/wake_up", response_model=SleepResponse, responses=refusals, openapi_extra=_body("WakeRequest"))
    async def wake_up(request: Request) -> SleepResponse:
        """Brings weights, KV cache or both back to the GPU."""
        return await engine.wake_up(_parse(WakeRequest, await request.body()))

    @router.put("/upload/{name}/{file}", responses=refusals)
    async def upload(name: str, file: str, request: Request) -> UploadResponse:
        """Takes one file of a weight version, for servers that do not see the trainer's disk; COMPLETE comes last."""
        try:
            return await engine.upload(name, file, request.stream())
        except ClientDisconnect as error:
            raise HTTPException(CLIENT_CLOSED_REQUEST) from error

    return router


def _session_router(engine: Generator, sessions: Sessions) -> APIRouter:
    router = APIRouter(tags=["hocket"])
    refusals = _refusals()

    @router.post("/sessions", response_model=SessionResponse, responses=refusals, openapi_extra=_body("SessionRequest"))
    async def open_session(request: Request) -> SessionResponse:
        """Opens a session: /sessions/ID/v1 is an OpenAI-compatible base URL whose calls are recorded."""
        message = _parse(SessionRequest, await request.body())
        engine.check(message)
        session = sessions.open(message)
        return SessionResponse(id=session.id, key=session.key, model=engine.model)

    @router.get("/sessions/{session_id}", responses=refusals)
    async def read_session(session_id: str) -> AgentRecord:
        """Tells what has been sampled in a session."""
        return sessions.get(session_id).record()

    @router.delete("/sessions/{session_id}", responses=refusals)
    async def close_session(session_id: str) -> AgentRecord:
        """Forgets a session, ends what still runs in it, and tells what had been sampled by then."""
        session = sessions.close(session_id)
        record = session.record()
        await engine.abort(session.running)
        if (failed := engine.health().error) is not None:  # what its agent has made of that is nothing to learn from
            raise ApiError.of(503, failed)
        return record

    return router


def _refusals() -> dict[int | str, dict[str, Any]]:
    return {status: {"model": ErrorResponse} for status in (400, 401, 404, 408, 409, 413, 422, 500, 503, 507)}


def _parse(model: type[M], body: bytes) -> M:
    try:
        return model.model_validate_json(body)
    except pydantic.ValidationError as error:
        raise from_validation(error) from None


async def _all(engine: Generator, message: GenerateRequest, jobs: Sequence[Job]) -> Response:
    done: dict[tuple[int, int], Any] = {}
    async with contextlib.aclosing(engine.completions(jobs)) as finished:
        async for job, completion in finished:
            done[job.prompt, job.index] = completion
    completions: list[list[Any]] = [[] for _ in message.prompts]
    for prompt, index in sorted(done):
        completions[prompt].append(done[prompt, index])
    return _json({"version": engine.version, "model": engine.model, "completions": completions})


async def _stream(engine: Generator, jobs: Sequence[Job]) -> AsyncIterator[bytes]:
    error: ErrorBody | None = None
    try:
        async with contextlib.aclosing(engine.completions(jobs)) as finished:
            async for job, completion in finished:
                yield _line({"prompt": job.prompt, "index": job.index, "completion": completion})
    except ApiError as failed:
        error = failed.body
    yield _line(StreamEnd(version=engine.version, model=engine.model, error=error).model_dump())


async def _unless_client_leaves(request: Request, answer: Callable[[], Awaitable[Response]]) -> Response:
    """Returns the answer, or cancels the work on it as soon as the client has gone."""
    working = asyncio.ensure_future(answer())
    leaving = asyncio.create_task(_left(request))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else Response(status_code=CLIENT_CLOSED_REQUEST)
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _json(value: Any) -> Response:
    return Response(json.dumps(value, allow_nan=False, separators=(",", ":")), media_type="application/json")


def _line(value: Any) -> bytes:
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode() + b"\n"


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    codes = {404: "not_found", 405: "method_not_allowed"}
    code = codes.get(error.status_code, "http_error")
    response = ApiError(error.status_code, code, str(error.detail), "the routes are listed at /docs").response()
    response.headers.update(error.headers or {})
    return response


def _body(model: str) -> dict[str, Any]:
    schema = {"$ref": f"#/components/schemas/{model}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _document_bodies(app: FastAPI) -> None:
    """Adds the messages that routes read themselves to the app's OpenAPI description."""
    _, described = models_json_schema(
        [
            (message, "validation")
            for message in (GenerateRequest, SessionRequest, ReloadRequest, GroupRequest, SleepRequest, WakeRequest)
        ],
        ref_template="#/components/schemas/{model}",
    )
    build = app.openapi

    def openapi() -> dict[str, Any]:
        schema = build()
        schema.setdefault("components", {}).setdefault("schemas", {}).update(described["$defs"])
        return schema

    app.openapi = openapi  # type: ignore[method-assign]
