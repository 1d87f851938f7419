"""How hocket's routes read their bodies and refuse requests."""

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from fastapi.routing import APIRoute

from hocket.common.tasks import run_in_thread
from hocket.protocol import ErrorResponse
from hocket.server.errors import parse

REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorResponse} for status in (400, 401, 404, 408, 409, 413, 422, 500, 503, 507)
}
Handler = Callable[[Request], Coroutine[Any, Any, Response]]


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


def router() -> APIRouter:
    return APIRouter(tags=["hocket"], responses=REFUSALS, route_class=_Route)
