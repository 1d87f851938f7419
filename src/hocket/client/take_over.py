"""Have servers work for one trainer alone: the first look claims a server, heartbeats keep it (sync.take_over)."""

import asyncio
import dataclasses
import functools

from hocket.client.member import Member, State
from hocket.client.pool import LOOK_S, ServerPool
from hocket.protocol import Health, HeartbeatRequest

BEAT_S = 5.0  # between heartbeats; a server is free after a minute without


def claim(pool: ServerPool, trainer: str, *, take_over: bool) -> None:
    """Have a pool claim each server that it looks at for a trainer; `take_over`: from other ones, once each."""
    claims = Claims(pool, trainer, take_over)
    pool.look = claims.look
    pool.repeat(BEAT_S, claims.beat_all)
    pool.release = functools.partial(claims.beat_all, leaving=True)


@dataclasses.dataclass
class Claims:
    pool: ServerPool
    trainer: str  # its id
    take_over: bool
    _held: set[Member] = dataclasses.field(default_factory=set)  # they have worked for this trainer
    _failing: set[Member] = dataclasses.field(default_factory=set)  # of which it was said

    async def look(self, member: Member) -> Health:
        health = await self._beat(member, take_over=self.take_over and member not in self._held)
        self._held.add(member)
        return health

    async def beat_all(self, *, leaving: bool = False) -> None:
        """Send the servers a heartbeat, so that no other trainer gets them; the run goes on where that fails."""
        self._held.intersection_update(self.pool.members)
        held = [member for member in self._held if member.state is not State.LEFT_OUT]
        await asyncio.gather(*(self._keep(member, leaving) for member in held))

    async def _keep(self, member: Member, leaving: bool) -> None:
        try:
            member.health = await self._beat(member, leaving=leaving)
        except Exception as error:  # noqa: BLE001 - requests to the server will say what it means for the run
            if member.is_up and not leaving and member not in self._failing:
                self._failing.add(member)
                lost = "after a minute without heartbeats another trainer may have it"
                self.pool.say(f"server {member.url} took no heartbeat ({lost}): {error}")

    async def _beat(
        self, member: Member, *, take_over: bool = False, leaving: bool = False
    ) -> Health:
        request = HeartbeatRequest(trainer=self.trainer, take_over=take_over, leaving=leaving)
        return await member.server.ask(request, timeout_s=LOOK_S)
