"""The parts of the generation server: each adds its routes and checks, and what the engine then can do."""

import dataclasses
from collections.abc import Callable, Collection

from fastapi import FastAPI

from hocket.common.registry import Registry
from hocket.server.engine import Engine
from hocket.server.middleware import Guard


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """What a part of the server is installed in."""

    app: FastAPI  # vLLM's, with its OpenAI-compatible routes
    engine: Engine
    guard: Guard  # in front of all routes: the token, and the checks that parts add
    image_hosts: Collection[str] = ()  # from which URLs of images are fetched


PARTS: Registry[Callable[[Server], None]] = Registry(
    "server part",
    metrics="hocket.extras.gauges",
    delta="hocket.extras.delta.load",
    nccl="hocket.server.nccl",
    upload="hocket.extras.upload",
    share_gpu="hocket.server.share_gpu",
    openai="hocket.server.openai",
    images="hocket.server.vision",
    agents="hocket.extras.agents.sessions",
)
server_part = PARTS.register
"""Decorator of a function that installs a part in the server, before it takes requests.

Example: a file under `server.plugins` that says what is served.

    @server_part("served")
    def install(server: Server) -> None:
        @server.app.get("/served")
        async def served() -> dict[str, str]:
            return {"model": server.engine.model}
"""
