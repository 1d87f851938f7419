"""Let the engine leave its GPU for a trainer, and come back (launch.share_gpu)."""

from collections.abc import Awaitable

from hocket import protocol
from hocket.errors import cause_of
from hocket.server.engine import Engine
from hocket.server.errors import ApiError
from hocket.server.parts import Server, router, server_part
from hocket.server.state import RESTART

TAGS = ("weights", "kv_cache")
"""vLLM's names of what leaves the GPU, in the order in which it comes back."""


@server_part("share_gpu")
def install(server: Server) -> None:
    """Add the route /sleep, and have reloads wake an engine that shares its GPU."""
    sleeper = Sleeper(server.engine)
    if server.engine.share_gpu:
        server.engine.share(sleeper)
    routes = router()
    routes.post("/sleep")(sleeper.sleep)
    server.app.include_router(routes)


class Sleeper:
    """Takes an engine off its GPU, and back (the `GpuSharing` of an engine that shares its GPU)."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._num_on_gpu = len(TAGS)  # the first so many of TAGS are on the GPU

    async def sleep(self, request: protocol.SleepRequest) -> protocol.Health:
        """Take weights and KV cache off the GPU.

        At level 1 the weights wait in the CPU's memory; at level 2 they are thrown away. Raises
        ApiError where this engine does not share its GPU, or is lost.
        """
        engine = self._engine
        async with engine.lock:
            engine.holder.claim(request.trainer)
            engine.require_alive()
            if not engine.share_gpu:
                message = "this server was not started to share its GPU"
                hint = "start server and trainer with launch.share_gpu=true"
                raise ApiError(409, "no_sleep_mode", message, hint)
            if not engine.is_asleep:
                await engine.pause(request.in_flight)
            if self._num_on_gpu > 0:
                self._num_on_gpu = 0
                engine.note_asleep()
                # Generation is paused. Any mode but keep would end the paused requests.
                await self._move(engine.llm.sleep(level=request.level, mode="keep"))
                if request.level == 2:
                    engine.note_weights_dropped()
        return engine.health()

    async def bring_back_weights(self) -> bool:
        """Bring the weights back, for a version to be loaded. Returns True if it was asleep."""
        was_asleep = self._engine.is_asleep
        await self._bring_back(1)
        return was_asleep

    async def bring_back_all(self) -> None:
        """Bring back the KV cache, too, and generate again."""
        await self._bring_back(len(TAGS))

    async def _bring_back(self, num_tags: int) -> None:
        """Bring back what the first `num_tags` of TAGS name; after all of them, generate again."""
        missing = TAGS[self._num_on_gpu : num_tags]
        if missing:
            await self._move(self._engine.llm.wake_up(tags=list(missing)))
            self._num_on_gpu = num_tags
        if self._num_on_gpu == len(TAGS):
            self._engine.note_awake()

    async def _move(self, moving: Awaitable[None]) -> None:
        """Wait until memory has moved. Raises ApiError.

        After a failure the state of the engine's memory is unknown, so all requests fail.
        """
        try:
            await self._engine.in_time(moving)
        except Exception as error:
            message = f"the engine could not leave the GPU, or come back to it: {cause_of(error)}"
            cause = "is anything else on this GPU, or server.gpu_memory_utilization too high?"
            hint = f"{cause} {RESTART}"
            raise await self._engine.fail_all(500, "sleep_failed", message, hint) from error
