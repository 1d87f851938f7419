"""Weight hand-over: every published version is the one that all servers hold, and that is shown, not assumed.

write → verify → notify → acknowledge. How the bytes travel is a `Transport` (disk.py, collective.py); what they have in
common is here: which version is current, what becomes of a server that did not take it, the comparison of checksums,
the fall-back to files, and the canary. Knows nothing of rollouts for training, of rewards or of losses.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from hocket.client import ServerClient
from hocket.config import Config
from hocket.errors import HocketError, ServerError, SyncError
from hocket.members import Member, Members
from hocket.protocol import Health, ReloadResponse
from hocket.sync.canary import logprob_gap
from hocket.sync.delivery import Delivery
from hocket.sync.disk import DiskTransport
from hocket.sync.turns import Turns
from hocket.system import run_in_thread
from hocket.types import Prompt, TrainSample


class Source(Protocol):
    """What publishing needs of the trainer; hocket.trainer.trainer.Trainer is one."""

    def check_same_model(self, health: Health) -> None: ...
    def logprob_gap(self, samples: Sequence[TrainSample]) -> float: ...


class Transport(Protocol):
    """One way for weights to travel."""

    async def deliver(self, version: int, servers: Sequence[ServerClient]) -> Delivery:
        """Brings the trainer's present weights, which are `version`, to these servers; may be repeated.

        Raises:
            SyncError: they could not even be sent.
        """


class WeightSync:
    """Publishes the trainer's weights to a pool, and brings up servers that come late or come back.

    Args:
        config: its sync section is used.
        trainer: whose weights.
        disk: how they travel, or what is fallen back to where `collective` is given, and fails.
        canary: prompts whose completions both sides score.
        turns: where both sides share a GPU; a version is written in the trainer's turn, and then it is the server's.
        say: told what a user must know.

    Attributes:
        version: the current one, 0 before the first.
    """

    def __init__(
        self,
        config: Config,
        trainer: Source,
        pool: Members,
        disk: DiskTransport,
        *,
        collective: Transport | None = None,
        canary: Sequence[Prompt] = (),
        turns: Turns | None = None,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.version = 0
        self._older = 0  # the run had published versions up to this one before it went on
        self._config = config
        self._trainer = trainer
        self._pool = pool
        self._disk = disk
        self._collective = collective
        self._canary = canary
        self._turns = turns
        self._say = say
        self._lock = asyncio.Lock()  # there is one trainer
        self._training = False
        pool.bring_up = self._bring_up

    @contextlib.asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        """Context in which the trainer works, and weights change: no server is brought up meanwhile."""
        async with self._lock:
            self._training = True
            try:
                yield
            finally:
                self._training = False

    async def publish(self) -> dict[str, float]:
        """Makes the trainer's weights the next version, on every server that is there. Returns sync/* metrics.

        Call it within `training`. Servers that are lost on the way are taken out of the pool; they are brought up
        when they come back.

        Raises:
            SyncError: the version was refused, landed as something else, or could not be written.
        """
        self.version = max(self.version, self._older) + 1  # a replay has brought up nobody
        metrics = await self._deliver(self._pool.up)
        every = self._config.sync.canary_every
        gaps = []
        for member in self._pool.up if every and self.version % every == 0 else ():
            try:
                gaps.append(await self._check_canary(member))
            except ServerError as error:
                self._pool.lose(member, str(error))
        if gaps:
            metrics["sync/canary_gap"] = max(gaps)
        return metrics | {"sync/servers": float(len(self._pool.up))}

    def save(self) -> Path:
        """Returns the folder with the current version on disk, where it is also written if it has not been."""
        self.version = self.version or self._older
        return self._disk.write(self.version)

    def state(self) -> dict[str, int]:
        """Returns the current version, ready for JSON."""
        return {"version": self.version}

    def restore(self, state: Mapping[str, int]) -> None:
        """Takes back what was published after `state`: the next version is above it, and above what servers hold."""
        self._older = state["version"]
        self._disk.remove_above(state["version"])

    async def _bring_up(self, member: Member, health: Health) -> None:
        """Gives one server the current version; the first one of all also gets to say which number that is."""
        if self._training and self._pool.up:
            member.out = "the trainer is at work"  # others play meanwhile; it is looked at again soon
            return
        async with self._lock:
            if member.session is not None:
                return  # another one who looked has just done it
            self._trainer.check_same_model(health)
            # Whatever a server has held before, of this run or another: both sides start from the trainer's weights.
            self.version = self.version or max(health.version, self._older) + 1
            metrics = await self._deliver([member])
            if member.session is None:
                return  # and `member.out` says why
            gap = await self._check_canary(member)
        self._say(
            f"server {member.url} holds version {self.version}: {health.dtype}, "
            f"{metrics['sync/mebibytes']:.1f} MiB in {metrics['sync/prepare_s'] + metrics['sync/transfer_s']:.2f} s, "
            f"checksums agree, mean |Δ log-prob| {gap:.1e}"
        )

    async def _deliver(self, members: Sequence[Member]) -> dict[str, float]:
        """Brings the current version to these servers; whoever then holds it is up, whoever was lost is out."""
        before_s = 0.0
        if self._turns is not None:  # the trainer has to write before it makes room
            start = time.perf_counter()
            self._disk.write(self.version)
            await self._turns.server()
            before_s = time.perf_counter() - start
        delivery = await (self._collective or self._disk).deliver(self.version, [member.server for member in members])
        answers = dict(zip(members, delivery.answers, strict=True))
        checksums = dict.fromkeys(members, delivery.checksum)
        metrics = {
            "sync/mebibytes": delivery.num_bytes / 2**20,
            "sync/prepare_s": before_s + delivery.prepare_s,
            "sync/transfer_s": delivery.transfer_s,
        }
        if delivery.changed is not None:
            metrics["sync/changed"] = delivery.changed
        for note in delivery.notes:
            self._say(note)
        failed = [member for member in members if isinstance(answers[member], HocketError)]
        failed = [member for member in failed if not _is_silent(answers[member])]  # who would not answer again
        if self._collective is not None:
            metrics["sync/fallbacks"] = float(len(failed))
        if failed and self._collective is not None:
            start = time.perf_counter()
            self._say(f"version {self.version} goes to {_urls(failed)} by disk instead: {answers[failed[0]]}")
            again = await self._disk.deliver(self.version, [member.server for member in failed])
            answers |= dict(zip(failed, again.answers, strict=True))
            checksums |= dict.fromkeys(failed, again.checksum)
            metrics["sync/transfer_s"] += time.perf_counter() - start
        for member in members:
            self._take(member, answers[member], checksums[member])
        if self._turns is not None and self._pool.up:
            await self._turns.generation()
        return metrics

    def _take(self, member: Member, answer: ReloadResponse | HocketError, checksum: str) -> None:
        if isinstance(answer, ReloadResponse):
            if (answer.version, answer.checksum) != (self.version, checksum):
                raise SyncError(
                    f"{member.url} holds version {answer.version} with checksum {answer.checksum}, but version "
                    f"{self.version} with checksum {checksum} was published. Is this its only trainer?"
                )
            if member.session not in (None, answer.session):
                self._pool.lose(member, "it was started again")  # and is brought up as any other that comes back
            else:
                member.holds(answer.session)
        elif isinstance(answer, ServerError) and answer.status is not None and answer.status < 500:
            raise SyncError(f"weight version {self.version} was refused: {answer}") from answer
        else:
            self._pool.lose(member, str(answer))

    async def _check_canary(self, member: Member) -> float:
        """Returns the mean |Δ log-prob| of a few completions. Raises SyncError where it is out of bounds."""
        config = self._config
        score = self._score if self._turns is None else self._turns.score
        gap = await logprob_gap(member, score, self._canary, config.rollout, config.sync.timeout_s)
        if not gap <= config.sync.max_logprob_gap:
            raise SyncError(
                f"{member.url} and the trainer disagree on version {self.version}: mean |Δ log-prob| {gap:.3g} is more "
                f"than sync.max_logprob_gap={config.sync.max_logprob_gap:g}, although the checksums agree. Likely: "
                f"the engine computes with something else than it was sent (a stale copy of a tied output head, "
                f"another precision or quantization; compare model.dtype on both sides), or another attention or "
                f"rotary setting than the trainer. Restart the server; if the gap stays, try model.dtype=float32"
            )
        return gap

    async def _score(self, samples: Sequence[TrainSample]) -> float:
        return await run_in_thread(self._trainer.logprob_gap, samples)


def _is_silent(answer: ReloadResponse | HocketError) -> bool:
    return isinstance(answer, ServerError) and answer.code in ("unreachable", "timeout")


def _urls(members: Sequence[Member]) -> str:
    return ", ".join(member.url for member in members)
