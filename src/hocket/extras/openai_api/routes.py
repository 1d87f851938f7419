"""Add vLLM's client routes to the server, with its state and its way to answer errors."""

import functools
import logging
from argparse import Namespace
from typing import Any

from fastapi import FastAPI
from starlette.routing import Mount

from hocket.extras.openai_api import bodies
from hocket.extras.openai_api.answers import Recent, Responses, SampledRoute, hide_known
from hocket.extras.openai_api.limits import Strangers
from hocket.extras.openai_api.models import add_model_route, served_names
from hocket.extras.openai_api.schema import describe
from hocket.server import vllm_api
from hocket.server.parts import Server, server_part
from hocket.server.vllm_arguments import app_arguments

NAMED = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/messages"})
NAMED |= {"/v1/responses", "/v1/responses/{response_id}"}
"""The routes of vLLM whose answers are sampled, and name their weight versions."""
ROUTES = NAMED | {
    "/v1/messages/count_tokens",
    "/v1/models",
    "/tokenize",
    "/detokenize",
    "/load",
    "/version",
    "/metrics",
}
"""The routes of vLLM that are served. Others are dangerous: one aborts anybody's requests."""
# The server imports vLLM's app while the engine's process loads the model.
vllm_api.IMPORTED_EARLY.extend(
    f"vllm.entrypoints.launchers.{part}" for part in ("app", "cli_args", "api_server.app_state")
)


@server_part("openai")
def install(server: Server) -> None:
    """Have the guard check the bodies, and add the routes once the engine runs."""
    bodies.install(server)
    server.starting.append(functools.partial(_start, server))


async def _start(server: Server) -> None:
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state

    for handler in logging.getLogger("vllm").handlers:
        handler.addFilter(hide_known)
    llm = server.engine.llm
    arguments = app_arguments(server.arguments)
    tasks = await llm.get_supported_tasks()
    add_routes(server, vllm_app(arguments, tasks, llm.model_config))
    state = server.app.state
    await init_app_state(llm, state, arguments, tasks)
    # vLLM would keep all responses for ever.
    responses = state.openai_serving_responses
    if responses is not None:
        responses.enable_store = True
        responses.msg_store = Recent()
        responses.response_store = Responses(responses.msg_store)
    # vLLM's handler of a dead engine would end this HTTP server. hocket's own watch ends it.
    state.server = None


def vllm_app(arguments: Namespace, tasks: tuple[str, ...], model_config: Any) -> FastAPI:
    """Make vLLM's own app, before there is an engine to answer its requests."""
    from vllm.entrypoints.launchers.app import build_app

    app: FastAPI = build_app(arguments, tasks, model_config)
    return app


def add_routes(server: Server, theirs: FastAPI) -> None:
    """Move the ROUTES of vLLM's app to hocket's, with its middleware and its error handlers."""
    app = server.app
    strangers = Strangers(server)
    remembered = Recent[set[int]]()
    for route in theirs.router.routes:
        path = getattr(route, "path", None)
        # vLLM has /metrics twice, and a mount takes any method.
        if path not in ROUTES or isinstance(route, Mount):
            continue
        if path in NAMED:
            sampled: Any = route
            sampled.app = SampledRoute(
                sampled.app,
                engine=server.engine,
                strangers=strangers,
                remembered=remembered,
            )
        app.router.routes.append(route)
    add_model_route(server, served_names(server))
    describe(app, ROUTES | {"/v1/models/{name}"})

    # A handler of hocket's goes before vLLM's for the same error, but FastAPI's own does not.
    defaults = FastAPI().exception_handlers
    for error, handler in theirs.exception_handlers.items():
        if app.exception_handlers.get(error) is defaults.get(error):
            app.exception_handlers[error] = handler
    app.user_middleware.extend(theirs.user_middleware)
