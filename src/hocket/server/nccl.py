"""Take versions that the trainer broadcasts from its memory; nccl_worker.py receives them."""

import asyncio

from hocket import protocol
from hocket.errors import cause_of
from hocket.server import versions, vllm_api
from hocket.server.engine import Engine, Found
from hocket.server.errors import ApiError
from hocket.server.parts import Server, server_part

REACH_S = 5.0  # for a first connection to the trainer
JOIN_SHARE = 0.5  # of the deadline, as others wait for it
JOIN_POLL_S = 0.05


@server_part("nccl")
def install(server: Server) -> None:
    server.engine.sources["nccl"] = Broadcasts(server.engine).find


class Broadcasts:
    """The weight group that the workers are in."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._joined = ""  # its name

    async def find(self, source: protocol.CollectiveSource, version: int) -> Found:
        """Find an announced transfer, which begins once the workers ask for it."""
        expected = await self._engine.expected(source.adapter)
        versions.check_buckets(source.buckets, expected, partial=source.partial)
        if source.group.name != self._joined:
            await self._join(source.group)
        return Found(
            ("hocket_load_group", source.model_dump_json()), "", source.adapter is None, self._leave
        )

    def _leave(self) -> None:
        self._joined = ""

    async def _join(self, group: protocol.GroupAddress) -> None:
        """Connect workers and trainer while the engine goes on."""
        engine = self._engine
        joining = "hocket_join_group", group.model_dump_json(), engine.num_workers + 1
        joined = [False]
        try:
            async with asyncio.timeout(
                REACH_S
            ):  # before the workers leave the group that they have
                _, connection = await asyncio.open_connection(group.host, group.port)
                connection.close()
            self._leave()
            async with asyncio.timeout(JOIN_SHARE * min(group.timeout_s, engine.timeout_s)):
                while not all(joined):
                    await asyncio.sleep(JOIN_POLL_S)
                    joined = await engine.in_time(vllm_api.call_workers(engine.llm, *joining))
        except Exception as error:
            engine.require_alive()
            message = f"the workers can't join the trainer at {group.host}:{group.port}: {cause_of(error)}"
            hint = "can this machine reach that address? sync.backend=disk needs no such connection"
            raise ApiError(409, "no_group", message, hint) from error
        self._joined = group.name
