"""Bring up a server: give it the current weights, and check by log-probs that it computes with them."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from hocket.config import RolloutConfig, SyncConfig
from hocket.errors import ServerError, SyncError
from hocket.pool import Member
from hocket.protocol import GenerateRequest, Health, SamplingParams
from hocket.sync.publish import Publisher, TrainerTurn
from hocket.system import run_in_thread
from hocket.types import Prompt, TokenSequence, TrainSample

if TYPE_CHECKING:
    from hocket.trainer.trainer import Trainer

MAX_TOKENS = 16
SEED = 20


async def bring_up(
    publisher: Publisher,
    check_model: Callable[[Health], None],
    say: Callable[[str], None],
    member: Member,
    health: Health,
) -> None:
    """Give a new or returned server the current version. Raise ServerError for another model, SyncError if refused."""
    if publisher.is_training and publisher.pool.up:
        member.out = "the trainer is at work"  # the pool asks again soon
        return
    async with publisher.lock:
        if member.session is not None:
            return  # brought up while this waited for the lock
        check_model(health)
        publisher.versions.begin(health.version)
        metrics = await publisher.deliver([member])
        if member.session is None:
            return  # lost: `member.out` has the reason
        gap = await publisher.check(member, publisher.versions.current)
    say(
        f"server {member.url} holds version {publisher.versions.current}: {health.dtype}, "
        f"{metrics['sync/mebibytes']:.1f} MiB in {metrics['sync/prepare_s'] + metrics['sync/transfer_s']:.2f} s, "
        f"checksums agree, mean |Δ log-prob| {gap:.1e}"
    )


@dataclasses.dataclass(frozen=True)
class Canary:
    """Compare the engine's log-probs of its own completions with the trainer's: the end-to-end proof of a hand-over.

    It proves what comes out: a stale copy of a tied head, a wrong precision, a cached prefix of old weights show here.
    """

    prompts: Sequence[Prompt]
    trainer: "Trainer"
    rollout: RolloutConfig
    sync: SyncConfig
    trainer_turn: TrainerTurn

    async def check(self, member: Member, version: int) -> float:
        """Return the mean |Δ log-prob| of completions that the server samples; SyncError above sync.max_logprob_gap."""
        samples = await self._completions(member)
        async with self.trainer_turn(False):
            gap = await run_in_thread(self.trainer.logprob_gap, samples)
        if not gap <= self.sync.max_logprob_gap:
            raise SyncError(
                f"{member.url} and the trainer disagree on version {version}: mean |Δ log-prob| {gap:.3g} is more than "
                f"sync.max_logprob_gap={self.sync.max_logprob_gap:g}, although the checksums agree. Likely: a stale "
                f"copy of a tied output head, or another precision, quantization, attention or rotary setting in the "
                f"engine. Compare model.dtype on both sides and restart the server; else try model.dtype=float32"
            )
        return gap

    async def _completions(self, member: Member) -> list[TrainSample]:
        max_tokens = min(MAX_TOKENS, self.rollout.max_tokens)
        sampling = SamplingParams(temperature=self.rollout.temperature, max_tokens=max_tokens, seed=SEED)
        contexts = [prompt.token_ids for prompt in self.prompts]
        request = GenerateRequest(prompts=list(map(list, contexts)), sampling=sampling, session=member.session)
        samples = []
        async for line in member.server.generate(request, timeout_s=self.sync.timeout_s):
            context, sampled = contexts[line.prompt], line.completion.token_ids
            sequence = TokenSequence(
                token_ids=context + sampled,
                mask=(False,) * len(context) + (True,) * len(sampled),
                logprobs=(0.0,) * len(context) + line.completion.logprobs,
            )
            samples.append(TrainSample(sequence=sequence, advantages=(0.0,) * len(sequence.token_ids)))
        if len(samples) != len(contexts):
            message = f"{member.url}/generate ended after {len(samples)} of {len(contexts)} completions"
            raise ServerError(message, code="protocol")
        return samples
