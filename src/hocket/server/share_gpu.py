"""Let the engine leave its GPU for a trainer, and come back (launch.share_gpu)."""

from collections.abc import Awaitable

from hocket import protocol
from hocket.errors import cause_of
from hocket.server.engine import Engine
from hocket.server.errors import ApiError
from hocket.server.parts import Server, router, server_part
from hocket.server.state import RESTART

PARTS = ("weights", "kv_cache")
"""What leaves the GPU, in the order in which it comes back."""


@server_part("share_gpu")
def install(server: Server) -> None:
    sleeper = Sleeper(server.engine)
    if server.engine.share_gpu:
        server.engine.share(sleeper)
    routes = router()
    routes.post("/sleep")(sleeper.sleep)
    server.app.include_router(routes)


class Sleeper:
    """The `SleepState` of an engine; one that shares no GPU refuses to sleep."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._here = len(PARTS)  # how many of PARTS are on the GPU

    async def sleep(self, request: protocol.SleepRequest) -> protocol.Health:
        """Take weights and KV cache off the GPU."""
        engine = self._engine
        async with engine.lock:
            engine.holder.hear(request.trainer)
            engine.require_alive()
            if not engine.share_gpu:
                hint = "start server and trainer with launch.share_gpu=true"
                raise ApiError(
                    409, "no_sleep_mode", "this server was not started to share its GPU", hint
                )
            if not engine.is_asleep:
                await engine.pause(request.in_flight)
            if self._here > 0:
                self._here = 0
                engine.fall_asleep()
                # Nothing runs any more; any other mode than keep would end paused requests.
                await self._move(engine.llm.sleep(level=request.level, mode="keep"))
                if request.level == 2:
                    engine.drop_weights()
        return engine.health()

    async def rise(self) -> bool:
        was_asleep = self._engine.is_asleep
        await self._bring_back(1)
        return was_asleep

    async def wake(self) -> None:
        await self._bring_back(len(PARTS))

    async def _bring_back(self, here: int) -> None:
        """Bring back the first `here` parts; generation goes on with the last of all."""
        away = PARTS[self._here : here]
        if away:
            await self._move(self._engine.llm.wake_up(tags=list(away)))
            self._here = here
        if self._here == len(PARTS):
            self._engine.wake()

    async def _move(self, moving: Awaitable[None]) -> None:
        """Wait for the engine to move; after a failure nothing is known of its memory."""
        try:
            await self._engine.in_time(moving)
        except Exception as error:
            message = f"the engine could not leave the GPU, or come back to it: {cause_of(error)}"
            hint = f"is anything else on this GPU, or server.gpu_memory_utilization too high? {RESTART}"
            raise await self._engine.fail_all(500, "sleep_failed", message, hint) from error
