"""Publish the trainer's weights to every server, and verify that each holds them.

    write version v+1 → load it on every server → compare checksums → let the run's parts check

A server that dies meanwhile is brought up once it answers again. A refused version, another
checksum or a check that fails stops the run.
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
from hocket.protocol import Health, ReloadResponse
from hocket.sync.transports import Answer, Transport
from hocket.sync.versions import Versions
from hocket.types import Metrics, Rollout

# Engine's precision -> a mean |trainer − engine log-prob| that rounding alone never causes.
HIGHEST_GAP = {"float32": 1e-4, "float16": 0.02, "bfloat16": 0.1}


class ChecksServers(Protocol):
    """A part of a run, such as RunPart, that checks the servers that have loaded a version."""

    async def published(self, members: Sequence[Member], came: bool) -> Metrics: ...


def own_gpu(publishes: bool) -> AbstractAsyncContextManager[Metrics]:
    """Make the turn of a trainer that shares no GPU: there is nothing to do, or to measure."""
    return nullcontext({})


@dataclasses.dataclass(kw_only=True)
class Publisher:
    """Keeps the servers' weights those of the trainer.

    Example: one update of a run, as loop.py does it.

        async with publisher.training(publishes=True):
            trainer.step(samples, number=1)
            metrics = await publisher.publish()
    """

    versions: Versions
    pool: ServerPool
    transport: Transport
    # Gives the trainer a GPU that it shares with a server, for the body of a with statement. The
    # argument says whether the body ends with `publish`.
    trainer_turn: Callable[[bool], AbstractAsyncContextManager[Metrics]] = own_gpu
    max_logprob_gap: float | None = None  # replaces HIGHEST_GAP
    parts: Sequence[ChecksServers] = ()  # the parts of the run
    # Held by a step while it trains, or by a bring-up.
    lock: asyncio.Lock = dataclasses.field(default_factory=asyncio.Lock)

    @asynccontextmanager
    async def training(self, *, publishes: bool) -> AsyncIterator[Metrics]:
        """Hold the trainer, so that no server is brought up; a body that `publishes` ends with that.

        Yields the metrics of getting the GPU, where trainer and server share one.
        """
        async with self.lock, self.trainer_turn(publishes) as metrics:
            yield metrics

    def max_gap(self, rollouts: Iterable[Rollout]) -> float:
        """Bound the mean |trainer − engine log-prob| of rollouts.

        It is infinite if older weights sampled any trained token.
        """
        for rollout in rollouts:
            for sequence in rollout.sequences:
                if any(sequence.mask) and sequence.version_min != self.versions.current:
                    return math.inf
        return max((self.highest_gap(member.dtype) for member in self.pool.up), default=math.inf)

    def highest_gap(self, dtype: str) -> float:
        """Bound the mean |trainer − engine log-prob| for an engine of this precision."""
        return self.max_logprob_gap or HIGHEST_GAP.get(dtype, HIGHEST_GAP["bfloat16"])

    async def publish(self) -> Metrics:
        """Make the trainer's weights the next version on every server; within `training`."""
        self.versions.current += 1
        metrics = await self._deliver_and_check(self.pool.up, joining=False)
        return metrics | {
            "sync/servers": float(len(self.pool.up)),
            "sync/version": float(self.versions.current),
        }

    async def _deliver_and_check(self, members: Sequence[Member], *, joining: bool) -> Metrics:
        """Send servers the current version, then let the parts check those that hold it.

        `joining`: the servers are being brought up; else they are at work.
        """
        metrics = await self.deliver(members, joining=joining)
        loaded = [member for member in members if member.is_loaded]
        for part in self.parts:
            metrics |= await part.published(loaded, joining)
        return metrics

    async def deliver(self, members: Sequence[Member], *, joining: bool = False) -> Metrics:
        """Send servers the current version, and judge their answers."""
        servers = [member.server for member in members]
        delivery = await self.transport.deliver(self.versions.current, servers)
        for member in members:
            checksum, answer = delivery.answers[member.server]
            self.judge(member, checksum, answer, does="refused", joining=joining)
        return delivery.metrics

    def judge(
        self, member: Member, checksum: str, answer: Answer, *, does: str, joining: bool = False
    ) -> None:
        """Mark a server loaded or lost by its answer to a version with this checksum.

        `does` is the verb of the message: "refused". `joining`: the server is being brought up. Raises
        SyncError where the server refuses the version, or holds something else.
        """
        version = self.versions.current
        if isinstance(answer, ServerError) and self._stops(answer):
            raise SyncError(f"{member.url} {does} weight version {version}: {answer}") from answer
        sent = version, checksum
        if isinstance(answer, ReloadResponse) and (answer.version, answer.checksum) != sent:
            raise SyncError(
                f"{member.url} holds version {answer.version} with checksum {answer.checksum}, but "
                f"version {version} with checksum {checksum} was published. Is this its only "
                "trainer?"
            )

        # A server at work that was lost meanwhile may be joining again. Its bring-up, with all
        # checks, decides then: not the answer to an earlier request.
        if not joining and not member.is_loaded:
            return
        if isinstance(answer, HocketError):  # it comes back once a look finds it well
            self.pool.mark_lost(member, str(answer))
        elif member.session not in (None, answer.session):
            self.pool.mark_lost(member, "it was started again")
        else:
            self.pool.mark_loaded(member, answer)

    def _stops(self, answer: ServerError) -> bool:
        """Check whether a refusal stops the run; a discovered server may be another run's."""
        if answer.outcome is not ErrorOutcome.REFUSED:
            return False
        return self.pool.is_listed or not answer.foreign

    async def bring_up(
        self, check_model: Callable[[Health], None], healths: Mapping[Member, Health]
    ) -> None:
        """Give servers that join the current version. Raises as `judge` and `check_model`."""
        # The others go on meanwhile. Without any, this waits for the trainer.
        if self.lock.locked() and self.pool.up:
            for member in healths:
                self.pool.mark_waiting(member, "the trainer is at work")
            return
        async with self.lock:
            members = [member for member in healths if member.state is State.JOINING]
            if not members:
                return  # they were lost meanwhile
            self.versions.start_above(max(health.version for health in healths.values()))
            for member in members:
                check_model(healths[member])
            metrics = await self._deliver_and_check(members, joining=True)

        seconds = metrics["sync/prepare_s"] + metrics["sync/transfer_s"]
        took = f"{metrics['sync/mebibytes']:.1f} MiB in {seconds:.2f} s"
        if "sync/logprob_gap" in metrics:
            gap = metrics["sync/logprob_gap"]
            took += f", parameters compared, mean |Δ log-prob| up to {gap:.1e}"
        for member in members:
            if member.is_loaded:  # else its reason says why not
                holds = f"holds version {self.versions.current}: {member.dtype}"
                self.pool.say(
                    f"server {member.url} {holds}, {took}; it held version {healths[member].version}"
                )
