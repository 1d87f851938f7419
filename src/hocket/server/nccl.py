"""Prepare weight versions that the trainer broadcasts; nccl_worker.py receives their tensors."""

import asyncio

from hocket import protocol
from hocket.errors import cause_of
from hocket.server import versions, vllm_api
from hocket.server.engine import Engine, IncomingVersion
from hocket.server.errors import ApiError
from hocket.server.parts import Server, server_part

REACH_S = 5.0  # seconds for a first connection to the trainer
JOIN_SHARE = 0.5  # part of a reload's deadline that joining may take: other servers wait for it
JOIN_POLL_S = 0.05  # seconds between two looks at whether the workers have joined


@server_part("nccl")
def install(server: Server) -> None:
    """Let reloads take versions from broadcasts."""
    server.engine.sources["nccl"] = Broadcasts(server.engine).find


class Broadcasts:
    """Versions that come by broadcast, and the weight group that the workers are in."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._joined = ""  # the name of the group; "" before the workers have joined one

    async def find(self, source: protocol.CollectiveSource, version: int) -> IncomingVersion:
        """Check an announced transfer, and have the workers join its group. Raises ApiError.

        The trainer sends the first bucket once the workers announce that they are ready.
        """
        expected = await self._engine.expected(source.adapter)
        versions.check_buckets(source.buckets, expected, partial=source.partial)
        if source.group.name != self._joined:
            await self._join(source.group)
        call = "hocket_load_group", source.model_dump_json()
        is_whole = source.adapter is None
        return IncomingVersion(call, checksum="", is_whole=is_whole, discard=self._leave)

    def _leave(self) -> None:
        self._joined = ""

    async def _join(self, group: protocol.GroupAddress) -> None:
        """Connect workers and trainer while the engine goes on. Raises ApiError."""
        engine = self._engine
        size = engine.num_workers + 1  # the workers and the trainer
        call = "hocket_join_group", group.model_dump_json(), size
        joined = [False]  # whether each worker has joined
        try:
            # See whether the trainer can be reached, before the workers leave their group.
            async with asyncio.timeout(REACH_S):
                _, connection = await asyncio.open_connection(group.host, group.port)
                connection.close()
            self._leave()
            deadline_s = JOIN_SHARE * min(group.timeout_s, engine.timeout_s)
            async with asyncio.timeout(deadline_s):
                while not all(joined):
                    await asyncio.sleep(JOIN_POLL_S)
                    joined = await engine.in_time(vllm_api.call_workers(engine.llm, *call))
        except Exception as error:
            engine.require_alive()
            place = f"{group.host}:{group.port}"
            message = f"the workers can't join the trainer at {place}: {cause_of(error)}"
            hint = "can this machine reach that address? sync.backend=disk needs no such connection"
            raise ApiError(409, "no_group", message, hint) from error
        self._joined = group.name
