"""Publish the trainer's weights to every server, and prove that they arrived.

    write version v+1 → load it on every server → compare checksums → if it is due: compare parameters and log-probs

A `Transport` moves the bytes: files, NCCL, or a wrapper around one of them. A server that dies meanwhile leaves the
pool; `bring_up` loads the current version once it answers again, on all at once that do. A refused version, another
checksum, other parameters or log-probs (proof.py) stop the run.
"""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, NamedTuple, Protocol

from hocket.client.pool import Member, ServerPool
from hocket.client.server import ServerClient
from hocket.common.tasks import timed
from hocket.errors import HocketError, ServerError, SyncError
from hocket.protocol import Health, ReloadResponse, meaning
from hocket.sync.disk import Versions
from hocket.types import Metrics, TrainerTurn

if TYPE_CHECKING:
    from hocket.sync.proof import Proof

Answer = ReloadResponse | HocketError  # a failure is a value: the other servers go on
Answers = dict[ServerClient, tuple[str, Answer]]  # with the checksum of the weights that were sent


class Delivery(NamedTuple):
    """The outcome of sending one version."""

    answers: Answers
    metrics: Metrics  # sync/*


class Transport(Protocol):
    """One way for weights to travel."""

    async def deliver(self, version: int, servers: Sequence[ServerClient], *, compare: bool = False) -> Delivery:
        """Load the trainer's weights, which are `version`, into these servers; can be repeated. Raises SyncError.

        With `compare`, send them once more, for the servers to compare what they compute with.
        """


@dataclasses.dataclass(kw_only=True)
class Publisher:
    """Keep the servers of a pool at the trainer's weights."""

    versions: Versions
    pool: ServerPool
    transport: Transport
    proof: "Proof"  # which versions are checked, and what log-probs must show
    trainer_turn: TrainerTurn  # gives the trainer the GPU, where both sides share one
    lock: asyncio.Lock = dataclasses.field(default_factory=asyncio.Lock)  # held by a training step, or a bring-up

    @asynccontextmanager
    async def training(self, *, publishes: bool) -> AsyncIterator[Metrics]:
        """Hold the trainer and yield the metrics of getting it; the body ends with `publish`, if it `publishes`."""
        async with self.lock, self.trainer_turn(publishes) as metrics:
            yield metrics

    async def publish(self) -> Metrics:
        """Make the trainer's weights the next version on every server that is up; call it within `training`."""
        self.versions.advance()
        metrics = await self.deliver(self.pool.up)
        if self.proof.is_due(self.versions.current):
            metrics |= await self.check(self.pool.up)
        return metrics | {"sync/servers": float(len(self.pool.up))}

    async def deliver(self, members: Sequence[Member], *, compare: bool = False) -> Metrics:
        """Send the current version, or have servers `compare` it with what they hold; mark them ready or lost.

        Raises SyncError if a server refuses it or holds another one.
        """
        version = self.versions.current
        delivery = await self.transport.deliver(version, [member.server for member in members], compare=compare)
        for member in members:
            checksum, answer = delivery.answers[member.server]
            if isinstance(answer, ServerError) and answer.refused and not (answer.foreign and self.pool.find):
                does = "does not hold" if compare else "refused"
                raise SyncError(f"{member.url} {does} weight version {version}: {answer}") from answer
            if compare and isinstance(answer, ServerError) and meaning(answer.code).unharmed:
                self.proof.warn(f"{member.url} can't say whether it holds version {version}: {answer}")
            elif isinstance(answer, HocketError):
                self.pool.mark_lost(member, str(answer))
            elif (answer.version, answer.checksum) != (version, checksum):
                raise SyncError(
                    f"{member.url} holds version {answer.version} with checksum {answer.checksum}, but version "
                    f"{version} with checksum {checksum} was published. Is this its only trainer?"
                )
            elif member.session not in (None, answer.session):
                self.pool.mark_lost(member, "it was started again")
            else:
                member.mark_ready(answer.session)
        return delivery.metrics

    async def check(self, members: Sequence[Member]) -> Metrics:
        """Check that these servers hold the current version, and compute with it as the trainer does."""
        if not members:
            return {}
        metrics: Metrics = {}
        failed = self.proof.mismatches
        with timed(metrics, "sync/proof_s"):
            try:
                await self.deliver(members, compare=True)
            except SyncError as error:
                self.proof.fail(str(error))  # raises or, with sync.on_mismatch=warn, says so
                await self.deliver(members)  # an engine that does not hold it generates nothing until a load mends it
            asked = [member for member in members if member.session is not None]
            sampled = await asyncio.gather(*map(self.proof.sample, asked))
            for member, samples in zip(asked, sampled, strict=True):
                if isinstance(samples, ServerError):
                    self.pool.mark_lost(member, str(samples))
                elif member.session is not None:
                    found = await self.proof.check(member, self.versions.current, samples)
                    metrics |= {name: max(value, metrics.get(name, value)) for name, value in found.items()}
        return metrics | {"sync/mismatches": self.proof.mismatches - failed}

    async def bring_up(self, check_model: Callable[[Health], None], there: Mapping[Member, Health]) -> None:
        """Give new and returned servers the current version. Raises as `deliver`, and ServerError for another model."""
        if self.lock.locked() and self.pool.up:  # without a server that is up nothing goes on
            for member in there:
                member.out = "the trainer is at work"  # the pool asks again soon
            return
        async with self.lock:
            members = [member for member in there if member.session is None]
            if not members:
                return  # brought up while this waited for the lock
            for member in members:
                check_model(there[member])
                self.versions.begin(there[member].version)
            metrics = await self.deliver(members)
            metrics |= await self.check([member for member in members if member.session is not None])
        took_s = metrics["sync/prepare_s"] + metrics["sync/transfer_s"]
        for member in members:
            if member.session is not None:  # else `member.out` says why it is lost
                self.pool.say(
                    f"server {member.url} holds version {self.versions.current}: {member.dtype}, "
                    f"{metrics['sync/mebibytes']:.1f} MiB in {took_s:.2f} s, parameters compared, "
                    f"mean |Δ log-prob| up to {metrics['sync/logprob_gap']:.1e}"
                )
