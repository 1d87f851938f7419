"""Verify that servers compute with the trainer's weights.

A verification has three parts, as none sees every error: the model holds the published tensors, bit
for bit; log-probs of completions that the server samples are the trainer's; and new weights moved
them as they moved the trainer's.
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

MAX_TOKENS = 16  # of each completion
SEED = 20  # of the completions, the same each time
# By the engine's precision: a mean |Δ log-prob| that rounding may always cause.
LIKELY_GAP = {"float32": 3e-5, "float16": 2.5e-3, "bfloat16": 0.02}
NOISE = 4.0  # a gap may exceed that of a server's first version by this factor
# A change of the trainer's log-probs is too small to be followed below this multiple of the mean
# gap, or where it is spread over fewer tokens than this, counted as (Σ|Δ|)² / Σ Δ².
MIN_CHANGE = 2.0
MIN_TOKENS = 10
UNDECIDED = ("busy", "slow_disk", "compare_failed")  # codes of comparisons that broke off
MAX_ERROR = 0.2  # the highest standard error at which the missing share is reported


class Scored(NamedTuple):
    """A sampled token with its log-probs."""

    token: int
    server: float
    trainer: float


ScoredAnswer = list[list[Scored]]  # the sampled tokens of each prompt


@dataclasses.dataclass
class Verification(RunPart):
    """Verify servers against the trainer. A failure raises SyncError or, with on_mismatch=warn,
    prints a warning."""

    publisher: Publisher
    prompts: Sequence[Prompt]
    trainer: "Trainer"
    rollout: RolloutConfig
    sync: SyncConfig
    alarmed: Callable[[], bool]  # whether the last step was suspicious
    mismatches: float = 0.0  # warnings so far
    _last_due: int = 0  # all versions up to this are checked
    # The mean |Δ log-prob| of each server's first version.
    _noises: list[float] = dataclasses.field(default_factory=list)
    # By session: the version that was checked last, and its completions.
    _before: dict[str | None, tuple[int, ScoredAnswer]] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        # Take the prompts whose images fit into a request together.
        fitting = []
        size = 0
        for prompt in self.prompts:
            size += sum(len(image.data) for image in prompt.images)
            if size <= IMAGE_BYTES:
                fitting.append(prompt)
        self.prompts = fitting

    def is_due(self, version: int) -> bool:
        """Decide whether to check a version: each check_every-th, one after an alarm, and the next
        version after either."""
        every = self.sync.check_every
        if (every and version % every == 0) or self.alarmed():
            self._last_due = version + 1
        return version <= self._last_due

    async def published(self, members: Sequence[Member], came: bool) -> Metrics:
        """Verify, if it is due, that servers compute with the current version; returns sync/*.

        `came`: they are servers that have just joined, which are always verified.
        """
        if not members or not (came or self.is_due(self.publisher.versions.current)):
            return {}
        metrics: Metrics = {}
        mismatches_before = self.mismatches
        with timed(metrics, "sync/proof_s"):
            try:
                await self._compare(members)
            except SyncError as error:
                self.fail(str(error))
                await self.publisher.deliver(members)
            loaded = [member for member in members if member.is_loaded]
            sampled = await asyncio.gather(*map(self.sample, loaded))
            for member, samples in zip(loaded, sampled, strict=True):
                if isinstance(samples, ServerError):
                    self.publisher.pool.mark_lost(member, str(samples))
                    continue
                for name, value in (await self._follow(member, samples)).items():
                    metrics[name] = max(value, metrics.get(name, value))
        return metrics | {"sync/mismatches": self.mismatches - mismatches_before}

    async def _compare(self, members: Sequence[Member]) -> None:
        """Have servers compare the tensors that they hold with the current version's."""
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
        prompts = [prompt_input(prompt.token_ids, prompt.images) for prompt in self.prompts]
        request = GenerateRequest(prompts=prompts, sampling=sampling, session=member.session)
        try:
            answer = await member.server.ask(request, timeout_s=self.sync.timeout_s)
        except ServerError as error:
            return error
        completions = list(itertools.chain.from_iterable(answer.completions))
        if len(completions) != len(prompts):
            message = f"{member.url}/generate gave {len(completions)} of {len(prompts)} completions"
            return ServerError(message, code="protocol")
        sequences = []
        for prompt, completion in zip(self.prompts, completions, strict=True):
            transcript = Transcript(prompt.token_ids, images=prompt.images)
            transcript.add_completion(completion)
            sequences.append(transcript.sequence())
        return as_samples(sequences)

    async def _follow(self, member: Member, samples: Sequence[TrainSample]) -> Metrics:
        """Compare log-probs, and their change since the last check, with the trainer's."""
        version = self.publisher.versions.current
        async with self.publisher.trainer_turn(False):
            scores = await run_in_thread(self.trainer.logprobs, samples)
        answer = [
            _scored(sample.sequence, logprobs)
            for sample, logprobs in zip(samples, scores, strict=True)
        ]
        last, before = self._before.get(member.session, (-1, []))
        self._before[member.session] = version, answer
        tokens = list(itertools.chain.from_iterable(answer))
        gap = statistics.fmean(abs(scored.server - scored.trainer) for scored in tokens)
        bound = self.bound(member.dtype)
        metrics = {"sync/logprob_gap": gap, "sync/max_gap": bound}
        if not gap <= bound:
            self.fail(
                f"{member.url} and the trainer disagree on version {version}: mean |Δ log-prob| "
                f"{gap:.3g} is more than {bound:.3g}, the most that rounding in {member.dtype} "
                "explains here (sync.max_logprob_gap). Likely: other weights, temperature or "
                "log-probs than the trainer's, or another precision, quantization, attention or "
                "rotary setting in the engine. Compare model.dtype on both sides, and restart the "
                "server"
            )
        elif last < 0:
            self._noises.append(gap)  # not later: weights ever further behind would raise it
        if last < 0:
            self._last_due = max(self._last_due, version + 1)  # the next one shows what arrives
        if last == version - 1:
            missing, error = missing_share(before, answer, max(self._noises, default=0.0))
            metrics["sync/missing_error"] = error
            if error <= MAX_ERROR:
                metrics["sync/missing_share"] = missing
                if missing > max(0.5, 4 * error):
                    self.fail(
                        f"version {version} did not arrive in what {member.url} computes: "
                        f"{missing:.0%} ± {error:.0%} of the change of the trainer's log-probs "
                        f"since version {last} is missing in the server's (100 %: it is one "
                        "version behind). Restart the server; if it comes again, the trainer "
                        "publishes other weights than it trains"
                    )
        return metrics

    def bound(self, dtype: str) -> float:
        """Return the highest mean |Δ log-prob| that rounding in this precision explains."""
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
    """Make samples to measure, not to train on."""
    samples = []
    for sequence in sequences:
        zeros = (0.0,) * len(sequence.token_ids)
        samples.append(TrainSample(sequence=sequence, advantages=zeros, is_unbiased=True))
    return samples


def _scored(sequence: TokenSequence, logprobs: Sequence[float]) -> list[Scored]:
    """Pair the sampled tokens with their log-probs by the server and by the trainer."""
    columns = zip(sequence.mask, sequence.token_ids, sequence.logprobs, logprobs, strict=True)
    return [
        Scored(token, server, trainer) for sampled, token, server, trainer in columns if sampled
    ]


def missing_share(before: ScoredAnswer, now: ScoredAnswer, noise: float) -> tuple[float, float]:
    """Estimate the share of the trainer's change that the server's log-probs lack, with its
    standard error.

    With the same seeds, completions of two versions share a prefix; its tokens count. With the
    trainer's change Δ and the gap g = server − trainer, the share is −Σ (g_before + g_now) sign Δ /
    Σ |Δ|: 0 where every update arrived, 1 and more where the server is one version behind. The
    trainer's rounding, in g and in Δ, cancels over both versions. The error is inf where Δ is mostly
    rounding (`noise`: a mean |gap| without other cause), or of few tokens.
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
    # The residual of each token, as the fit without that token has it (jackknife).
    residuals = (
        (gap + share * change) / (1 - change / total)
        for gap, change in zip(gaps, changes, strict=True)
    )
    return share, math.sqrt(math.fsum(residual * residual for residual in residuals)) / total
