"""The parts of the generation server: each adds routes, checks, or abilities of the engine."""

import dataclasses
import re
from argparse import Namespace
from collections.abc import Awaitable, Callable, Collection, Coroutine
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import Response
from fastapi.routing import APIRoute

from hocket.common.registry import Registry
from hocket.common.tasks import run_in_thread
from hocket.protocol import ErrorResponse
from hocket.server.engine import Engine
from hocket.server.errors import parse
from hocket.server.middleware import Guard

STATUSES = (400, 401, 403, 404, 405, 408, 409, 413, 415, 422, 429, 500, 503, 507)
"""The HTTP statuses of refusals, which /docs lists for every route."""
Handler = Callable[[Request], Coroutine[Any, Any, Response]]
CLIENT_PATHS = re.compile(r"(/sessions/[^/]+)?/(v1/.*|(de)?tokenize)")
"""The paths of vLLM's own routes; an agent's session has them below its own path."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """The server that a part is installed in."""

    app: FastAPI  # routes are added to it
    engine: Engine  # the generation engine; `engine.model` is the path of its model
    guard: Guard  # checks the token in front of all routes; parts add their checks of bodies
    arguments: Namespace  # the arguments of vLLM's engine
    image_hosts: Collection[str]  # the hosts from which images are fetched by URL
    max_requests: int  # server.max_requests
    # What parts do once the engine runs, before the server takes requests.
    starting: list[Callable[[], Awaitable[None]]] = dataclasses.field(default_factory=list)

    async def start(self) -> None:
        """Have each part do what needs a running engine."""
        for start in self.starting:
            await start()


PARTS: Registry[Callable[[Server], None]] = Registry(
    "server part",
    metrics="hocket.extras.gauges",
    delta="hocket.extras.delta.load",
    nccl="hocket.server.nccl",
    upload="hocket.extras.upload",
    share_gpu="hocket.server.share_gpu",
    openai="hocket.extras.openai_api.routes",
    images="hocket.server.vision",
    agents="hocket.extras.agents.sessions",
)
server_part = PARTS.register
"""Register a function that installs a part in the server, before it takes requests (decorator).

Args:
    name: its name; no setting names it, as each file under `server.plugins` is installed.

Example: a file under `server.plugins` whose route tells which model is served.

    @server_part("served")
    def install(server: Server) -> None:
        @server.app.get("/served")
        async def served() -> dict[str, str]:
            return {"model": server.engine.model}
"""


class _Route(APIRoute):
    """A route that reads bodies as JSON whatever their Content-Type (`curl -d` sends another).

    Wrong bodies are refused in hocket's form.
    """

    def get_route_handler(self) -> Handler:
        if self.body_field is None:
            return super().get_route_handler()
        message_type: Any = self.body_field.field_info.annotation

        async def handled(request: Request) -> Response:
            body = await run_in_thread(parse, message_type, await request.body())
            answer = await self.endpoint(body)
            return Response(answer.model_dump_json(), media_type="application/json")

        return handled


def router() -> APIRouter:
    """Make a router of hocket's own routes, whose bodies are messages of the protocol."""
    refusals: dict[int | str, dict[str, Any]] = {}
    for status in STATUSES:
        refusals[status] = {"model": ErrorResponse}
    return APIRouter(tags=["hocket"], responses=refusals, route_class=_Route)
