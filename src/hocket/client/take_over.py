"""Have servers work for one trainer alone (sync.take_over).

The first look claims a server, and heartbeats keep it.
"""

import asyncio
import dataclasses

from hocket.client.member import Member, State
from hocket.client.pool import LOOK_S, ServerPool
from hocket.protocol import Health, HeartbeatRequest

BEAT_S = 5.0  # seconds between heartbeats; a server is free after a minute without one


def claim(pool: ServerPool, trainer: str, *, take_over: bool) -> None:
    """Claim each server that a pool looks at for one trainer.

    Args:
        pool: The pool, before it is opened.
        trainer: The trainer's id.
        take_over: Whether a server that works for another trainer is taken from it, once.
    """
    claims = Claims(pool, trainer, take_over)
    pool.look = claims.look
    pool.repeat(BEAT_S, claims.beat_all)
    pool.release = claims.release


@dataclasses.dataclass
class Claims:
    """The servers that a trainer has claimed."""

    pool: ServerPool
    trainer: str  # the trainer's id
    take_over: bool
    _held: set[Member] = dataclasses.field(default_factory=set)  # servers claimed at some time
    # Servers that took no heartbeat, which is said once.
    _reported: set[Member] = dataclasses.field(default_factory=set)

    async def look(self, member: Member) -> Health:
        """Claim a server. Raises ServerError where another trainer has it.

        A server that was claimed once is not taken over again: then two trainers would take it
        from each other for ever.
        """
        health = await self._beat(member, take_over=self.take_over and member not in self._held)
        self._held.add(member)
        return health

    async def beat_all(self) -> None:
        """Send the servers a heartbeat, so that no other trainer gets them.

        The run goes on where that fails.
        """
        self._held.intersection_update(self.pool.members)  # some may have left the pool
        held = [member for member in self._held if member.state is not State.LEFT_OUT]
        await asyncio.gather(*map(self._keep, held))

    async def _keep(self, member: Member) -> None:
        try:
            member.health = await self._beat(member)
        except Exception as error:  # noqa: BLE001 - requests will show what it means for the run
            if member.is_up and member not in self._reported:
                self._reported.add(member)
                risk = "after a minute without heartbeats another trainer may have it"
                self.pool.say(f"server {member.url} took no heartbeat ({risk}): {error}")

    async def release(self) -> None:
        """End the pool's work, and free its servers for other trainers.

        Servers that are left out, or whose first look was broken off, may be claimed, too. One that
        can't be reached is free after a minute.
        """
        await self.pool.cancel_tasks()  # a heartbeat or a request would claim a server again
        beats = [self._beat(member, leaving=True) for member in self.pool.members]
        await asyncio.gather(*beats, return_exceptions=True)

    async def _beat(
        self, member: Member, *, take_over: bool = False, leaving: bool = False
    ) -> Health:
        request = HeartbeatRequest(trainer=self.trainer, take_over=take_over, leaving=leaving)
        return await member.server.ask(request, timeout_s=LOOK_S)
