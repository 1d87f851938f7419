"""Prove that servers compute with the trainer's weights.

A check has three parts, as none sees every error: the model holds the published tensors, bit for
bit; log-probs of completions that the server samples are the trainer's; and new weights moved them
as they moved the trainer's.
"""

import asyncio
import dataclasses
import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from hocket.client.member import Member
from hocket.client.server import IMAGE_BYTES, prompt_input
from hocket.common.tasks import run_in_thread, timed
from hocket.config import RolloutConfig, SyncConfig
from hocket.errors import ServerError, SyncError
from hocket.protocol import GenerateRequest, SamplingParams
from hocket.rollout.transcript import Transcript
from hocket.run_part import RunPart
from hocket.sync.publish import Publisher
from hocket.types import Metrics, Prompt, TokenSequence, TrainSample

if TYPE_CHECKING:
    from hocket.trainer.trainer import Trainer

MAX_TOKENS = 16
SEED = 20
# By the engine's precision: a mean |Δ log-prob| that rounding may always cause.
LIKELY_GAP = {"float32": 3e-5, "float16": 2.5e-3, "bfloat16": 0.02}
NOISE = 4.0  # by this factor a gap may exceed that of a server's first version
MIN_CHANGE = 2.0  # of the trainer's log-probs / mean |Δ log-prob|: less can't be followed
MIN_TOKENS = 10  # that the change is spread over (Σ|Δ|)² / Σ Δ²
UNDECIDED = ("busy", "slow_disk", "compare_failed")  # codes of comparisons that broke off
MAX_ERROR = 0.2  # of the missing share; above it that says nothing


class Scored(NamedTuple):
    """A sampled token with its log-probs."""

    token: int
    server: float
    trainer: float


ScoredAnswer = list[list[Scored]]  # of each prompt


@dataclasses.dataclass
class Verification(RunPart):
    """Check servers against the trainer. A failure raises SyncError or, with on_mismatch=warn, is
    said."""

    publisher: Publisher
    prompts: Sequence[Prompt]
    trainer: "Trainer"
    rollout: RolloutConfig
    sync: SyncConfig
    alarmed: Callable[[], bool]  # whether the last step was suspicious
    mismatches: float = 0.0  # warnings so far
    _last_due: int = 0  # version up to which all are checked
    _noises: list[float] = dataclasses.field(
        default_factory=list
    )  # mean |Δ log-prob| of first versions
    _before: dict[str | None, tuple[int, ScoredAnswer]] = dataclasses.field(
        default_factory=dict
    )  # by session

    def __post_init__(self) -> None:
        sizes = itertools.accumulate(
            sum(len(image.data) for image in prompt.images) for prompt in self.prompts
        )
        self.prompts = [
            prompt for prompt, size in zip(self.prompts, sizes, strict=True) if size <= IMAGE_BYTES
        ]

    def is_due(self, version: int) -> bool:
        """Return whether to check: every check_every-th, after an alarm, and the next after
        either."""
        every = self.sync.check_every
        if (every and version % every == 0) or self.alarmed():
            self._last_due = version + 1
        return version <= self._last_due

    async def published(self, members: Sequence[Member], came: bool) -> Metrics:
        """Check, where it is due, that servers compute with the current version."""
        if not members or not (came or self.is_due(self.publisher.versions.current)):
            return {}
        metrics: Metrics = {}
        failed = self.mismatches
        with timed(metrics, "sync/proof_s"):
            try:
                await self._compare(members)
            except SyncError as error:
                self.fail(str(error))
                await self.publisher.deliver(members)
            asked = [member for member in members if member.is_loaded]
            sampled = await asyncio.gather(*map(self.sample, asked))
            for member, samples in zip(asked, sampled, strict=True):
                if isinstance(samples, ServerError):
                    self.publisher.pool.mark_lost(member, str(samples))
                else:
                    found = await self._follow(member, samples)
                    metrics |= {
                        name: max(value, metrics.get(name, value)) for name, value in found.items()
                    }
        return metrics | {"sync/mismatches": self.mismatches - failed}

    async def _compare(self, members: Sequence[Member]) -> None:
        version = self.publisher.versions.current
        servers = [member.server for member in members]
        delivery = await self.publisher.transport.deliver(version, servers, compare=True)
        for member in members:
            checksum, answer = delivery.answers[member.server]
            if isinstance(answer, ServerError) and answer.code in UNDECIDED:
                self.warn(f"{member.url} can't say whether it holds version {version}: {answer}")
            else:
                self.publisher.judge(member, checksum, answer, does="does not hold")

    async def sample(self, member: Member) -> list[TrainSample] | ServerError:
        """Have a server complete the prompts, with the same seeds each time."""
        max_tokens = min(MAX_TOKENS, self.rollout.max_tokens)
        sampling = SamplingParams(
            temperature=self.rollout.temperature, max_tokens=max_tokens, seed=SEED
        )
        asked = [prompt_input(prompt.token_ids, prompt.images) for prompt in self.prompts]
        request = GenerateRequest(prompts=asked, sampling=sampling, session=member.session)
        try:
            answer = await member.server.ask(request, timeout_s=self.sync.timeout_s)
        except ServerError as error:
            return error
        completions = [*itertools.chain(*answer.completions)]
        if len(completions) != len(asked):
            message = f"{member.url}/generate gave {len(completions)} of {len(asked)} completions"
            return ServerError(message, code="protocol")
        transcripts = [
            Transcript(prompt.token_ids, images=prompt.images) for prompt in self.prompts
        ]
        for transcript, completion in zip(transcripts, completions, strict=True):
            transcript.add_completion(completion)
        return as_samples(transcript.sequence() for transcript in transcripts)

    async def _follow(self, member: Member, samples: Sequence[TrainSample]) -> Metrics:
        """Compare log-probs, and their change since the last check, with the trainer's."""
        version = self.publisher.versions.current
        async with self.publisher.trainer_turn(False):
            scores = await run_in_thread(self.trainer.logprobs, samples)
        answer = [
            _scored(sample.sequence, own) for sample, own in zip(samples, scores, strict=True)
        ]
        last, before = self._before.get(member.session, (-1, []))
        self._before[member.session] = version, answer
        gap = statistics.fmean(
            abs(scored.server - scored.trainer) for row in answer for scored in row
        )
        bound = self.bound(member.dtype)
        metrics = {"sync/logprob_gap": gap, "sync/max_gap": bound}
        if not gap <= bound:
            self.fail(
                f"{member.url} and the trainer disagree on version {version}: mean |Δ log-prob| {gap:.3g} is more than "
                f"{bound:.3g}, the most that rounding in {member.dtype} explains here (sync.max_logprob_gap). Likely: "
                f"other weights, temperature or log-probs than the trainer's, or another precision, quantization, "
                f"attention or rotary setting in the engine. Compare model.dtype on both sides, and restart the server"
            )
        elif last < 0:
            self._noises.append(gap)  # later, weights ever further behind would raise it
        if last < 0:
            self._last_due = max(self._last_due, version + 1)  # to see whether it is behind
        if last == version - 1:
            missing, error = missing_share(before, answer, max(self._noises, default=0.0))
            metrics["sync/missing_error"] = error
            if error <= MAX_ERROR:
                metrics["sync/missing_share"] = missing
                if missing > max(0.5, 4 * error):
                    self.fail(
                        f"version {version} did not arrive in what {member.url} computes: {missing:.0%} ± {error:.0%} "
                        f"of the change of the trainer's log-probs since version {last} is missing in the server's "
                        f"(100 %: it is one version behind). Restart the server; if it comes again, the trainer "
                        f"publishes other weights than it trains"
                    )
        return metrics

    def bound(self, dtype: str) -> float:
        """Return the mean |Δ log-prob| that this precision allows."""
        likely = LIKELY_GAP.get(dtype, LIKELY_GAP["bfloat16"])
        return min(
            self.publisher.highest_gap(dtype),
            max(likely, NOISE * max(self._noises, default=math.inf)),
        )

    def fail(self, message: str) -> None:
        """Raise SyncError, or warn."""
        if self.sync.on_mismatch == "stop":
            raise SyncError(message)
        self.warn(message)

    def warn(self, message: str) -> None:
        self.publisher.pool.say(f"WARNING: {message}")
        self.mismatches += 1


def as_samples(sequences: Iterable[TokenSequence]) -> list[TrainSample]:
    """Return samples to measure, not to train on."""
    return [
        TrainSample(sequence=one, advantages=(0.0,) * len(one.token_ids), is_unbiased=True)
        for one in sequences
    ]


def _scored(sequence: TokenSequence, trainer: Sequence[float]) -> list[Scored]:
    columns = zip(sequence.mask, sequence.token_ids, sequence.logprobs, trainer, strict=True)
    return [Scored(token, server, own) for sampled, token, server, own in columns if sampled]


def missing_share(before: ScoredAnswer, now: ScoredAnswer, noise: float) -> tuple[float, float]:
    """Return which share of the trainer's change the server's log-probs lack, and its standard
    error.

    With the same seeds, completions of two versions begin with the same tokens; those count. With
    the trainer's change Δ and the gap g = server − trainer, the share is −Σ (g_before + g_now) sign
    Δ / Σ |Δ|: 0 where every update arrived, 1 and more one version behind. The trainer's rounding,
    in g and in Δ, cancels over both versions. The error is inf where Δ is mostly rounding (`noise`:
    a mean |gap| without other cause), or of few tokens.
    """
    gaps = []
    changes = []
    for old_row, new_row in zip(before, now, strict=True):
        rows = zip(old_row, new_row, strict=False)
        for old, new in itertools.takewhile(lambda both: both[0].token == both[1].token, rows):
            change = new.trainer - old.trainer
            gap = old.server - old.trainer + new.server - new.trainer
            changes.append(abs(change))
            gaps.append(gap * ((change > 0) - (change < 0)))
    total = math.fsum(changes)
    square = math.fsum(change * change for change in changes)
    if total * total < MIN_TOKENS * square or total <= MIN_CHANGE * noise * len(changes):
        return 0.0, math.inf
    share = -math.fsum(gaps) / total
    left = (
        (gap + share * change) / (1 - change / total)
        for gap, change in zip(gaps, changes, strict=True)
    )
    return share, math.sqrt(math.fsum(one * one for one in left)) / total
