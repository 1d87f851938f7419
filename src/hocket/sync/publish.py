"""Publish the trainer's weights to every server, with proof.

    write version v+1 → load it on every server → compare checksums → let the run's parts check them

A server that dies meanwhile is brought up once it answers again. A refused version, another checksum or a check that
fails stops the run.
"""

import asyncio
import dataclasses
import math
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import Protocol

from hocket.client.member import Member, State
from hocket.client.pool import ServerPool
from hocket.errors import ErrorOutcome, HocketError, ServerError, SyncError
from hocket.protocol import Health
from hocket.sync.transports import Answer, Transport
from hocket.sync.versions import Versions
from hocket.types import Metrics, Rollout


class TakesServers(Protocol):
    """A part of a run, such as RunPart, that is given the servers that have loaded a version."""

    async def published(self, members: Sequence[Member], came: bool) -> Metrics: ...


# By the engine's precision: a mean |trainer − engine log-prob| that rounding never causes.
HIGHEST_GAP = {"float32": 1e-4, "float16": 0.02, "bfloat16": 0.1}


@dataclasses.dataclass(kw_only=True)
class Publisher:
    versions: Versions
    pool: ServerPool
    transport: Transport
    # Gives the trainer a shared GPU
    trainer_turn: Callable[[bool], AbstractAsyncContextManager[Metrics]] = lambda publishes: (
        nullcontext({})
    )
    max_logprob_gap: float | None = None  # in place of HIGHEST_GAP
    parts: Sequence[TakesServers] = ()  # of the run
    lock: asyncio.Lock = dataclasses.field(default_factory=asyncio.Lock)  # of a step or a bring-up

    @asynccontextmanager
    async def training(self, *, publishes: bool) -> AsyncIterator[Metrics]:
        """Hold the trainer and yield the metrics of getting it; where it `publishes`, end with `publish`."""
        async with self.lock, self.trainer_turn(publishes) as metrics:
            yield metrics

    def max_gap(self, rollouts: Iterable[Rollout]) -> float:
        """Bound the mean |trainer − engine log-prob| of rollouts; inf if any was sampled by older weights."""
        for rollout in rollouts:
            for sequence in rollout.sequences:
                if any(sequence.mask) and sequence.version_min != self.versions.current:
                    return math.inf
        return max((self.highest_gap(member.dtype) for member in self.pool.up), default=math.inf)

    def highest_gap(self, dtype: str) -> float:
        """Bound it for an engine of this precision."""
        return self.max_logprob_gap or HIGHEST_GAP.get(dtype, HIGHEST_GAP["bfloat16"])

    async def publish(self) -> Metrics:
        """Make the trainer's weights the next version on every server; within `training`."""
        self.versions.current += 1
        metrics = await self._deliver_and_check(self.pool.up, came=False)
        return metrics | {
            "sync/servers": float(len(self.pool.up)),
            "sync/version": float(self.versions.current),
        }

    async def _deliver_and_check(self, members: Sequence[Member], *, came: bool) -> Metrics:
        metrics = await self.deliver(members)
        holding = [member for member in members if member.is_up]
        for part in self.parts:
            metrics |= await part.published(holding, came)
        return metrics

    async def deliver(self, members: Sequence[Member]) -> Metrics:
        """Send servers the current version, and judge their answers."""
        servers = [member.server for member in members]
        delivery = await self.transport.deliver(self.versions.current, servers)
        for member in members:
            self.judge(member, *delivery.answers[member.server], does="refused")
        return delivery.metrics

    def judge(self, member: Member, checksum: str, answer: Answer, *, does: str) -> None:
        """Mark a server ready or lost. Raises SyncError where it refuses or holds something else."""
        version = self.versions.current
        if isinstance(answer, ServerError) and self._stops(answer):
            raise SyncError(f"{member.url} {does} weight version {version}: {answer}") from answer
        if isinstance(answer, HocketError):  # it comes back once a look finds it well
            self.pool.mark_lost(member, str(answer))
        elif (answer.version, answer.checksum) != (version, checksum):
            raise SyncError(
                f"{member.url} holds version {answer.version} with checksum {answer.checksum}, but version "
                f"{version} with checksum {checksum} was published. Is this its only trainer?"
            )
        elif member.session not in (None, answer.session):
            self.pool.mark_lost(member, "it was started again")
        else:
            self.pool.mark_up(member, answer)

    def _stops(self, answer: ServerError) -> bool:
        """Check whether a refusal stops the run: a discovered server may be another run's by now."""
        return answer.outcome is ErrorOutcome.REFUSED and (
            self.pool.is_listed or not answer.foreign
        )

    async def bring_up(
        self, check_model: Callable[[Health], None], there: Mapping[Member, Health]
    ) -> None:
        """Give servers the current version. Raises as `judge` and `check_model`."""
        if self.lock.locked() and self.pool.up:
            for member in there:
                self.pool.mark_waiting(member, "the trainer is at work")
            return
        async with self.lock:
            members = [member for member in there if member.state is State.JOINING]
            if not members:
                return  # they were lost meanwhile
            self.versions.begin(max(health.version for health in there.values()))
            for member in members:
                check_model(there[member])
            metrics = await self._deliver_and_check(members, came=True)
        took = f"{metrics['sync/mebibytes']:.1f} MiB in {metrics['sync/prepare_s'] + metrics['sync/transfer_s']:.2f} s"
        if "sync/logprob_gap" in metrics:
            took += (
                f", parameters compared, mean |Δ log-prob| up to {metrics['sync/logprob_gap']:.1e}"
            )
        for member in members:
            if member.is_up:  # else its reason says why not
                holds = f"holds version {self.versions.current}: {member.dtype}"
                self.pool.say(
                    f"server {member.url} {holds}, {took}; it held version {there[member].version}"
                )
