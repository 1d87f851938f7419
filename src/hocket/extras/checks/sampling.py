"""Check the rollouts of a step before anything is learnt from them.

Their log-probs are compared with the trainer's, and the text of an answer with its tokens. Over many
steps, statistics show whether tokens are drawn from the policy: for tokens drawn from p, the sum D of
−log p(token) − H(p) has mean 0 and the variance V = Σ Var(log p), whatever came before each token.
A colder draw has D < 0, and −D / V is about the share by which its temperature is lower. Training
measures D and V of what it trains on, without another pass. A random part of the prompts is measured
before the step, and a random part of an evaluation's.
"""

import dataclasses
import itertools
import math
import random
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

import numpy as np

from hocket.client.member import Member
from hocket.common.tasks import run_in_thread, timed
from hocket.data import tokenizer as tokenizers
from hocket.data.text import turn_text
from hocket.errors import differ
from hocket.extras.checks.draws import DRAWN
from hocket.extras.checks.verify import Verification, as_samples
from hocket.observe.metrics import ON_POLICY
from hocket.rewards.base import REWARDS
from hocket.run_part import Joined, RunPart, run_part
from hocket.types import Metrics, Rollout, TokenSequence

MetricsHistory = Sequence[Mapping[str, float | None]]
"""Metrics of the steps so far."""
# An alarm of one of these may mean that a server has wrong weights.
SUSPICIOUS = ON_POLICY | {"train/importance_mean", "train/ess", "staleness/over_bound"}
NUM_PROMPTS = 16  # prompts of the verification of servers, and the least of an evaluation
# Nats by which an evaluation's compared draws surprise in all, or their tokens. n tokens that are
# greedy in place of drawn have z = −√n · d / √(v + d), where d is the mean of H + log p and v that of
# Var(log p). Of two tokens with p and 1 − p it is below -5 for p of .6 to .985 at one of the two.
NUM_NATS = 100.0
NUM_DRAWN = 2048
SUMMED = (*DRAWN, "sampling/equal", "sampling/equal_expected")  # metrics that are sums
RARE = 10.0  # nats by which one token may surprise: p = 5e-5
ENTROPY = 3.0  # nats by which one may surprise less than expected
TINY = 1e-30  # a variance of 0, as a divisor
LONGEST = 1024  # steps that the statistics look back


@dataclasses.dataclass
class SamplingCheck(RunPart):
    """Compare rollouts with the trainer; those of stale weights are left out."""

    verification: Verification
    temperature: float  # of training's samples
    eval_temperature: float
    share: float  # of prompts that are compared before the step
    group_size: int
    history: MetricsHistory
    fair: bool = True  # whether a sample is unbiased depends on no answer
    # Returns the contradiction between an answer's text and its tokens; "": none.
    claim: Callable[[TokenSequence], str] = lambda sequence: ""
    _max_gap: float = math.inf  # the bound of the rollouts that came last
    # Sums over the prompts that were drawn, which replace those that training measures; {}: none.
    _drawn: Metrics = dataclasses.field(default_factory=dict)
    _certain: float = 0.0  # log odds of greedy answers, without those that training measures

    async def rolled_out(self, groups: Sequence[Sequence[Rollout]], trains: bool | None) -> Metrics:
        """Check each prompt's rollouts before a step, and return sampling/*.

        `trains`: the step trains on some of them; None: they are an evaluation's. Raise SyncError, or
        warn, where they fail.
        """
        if trains is None:
            return await self._evaluated(groups)
        return await self._checked(groups, trains)

    def max_gap(self) -> float:
        """Return the highest |Δ log-prob| that rounding explains; inf if a rollout is stale."""
        return self._max_gap

    async def _evaluated(self, groups: Sequence[Sequence[Rollout]]) -> Metrics:
        """Check an evaluation's rollouts, and return eval/*.

        The trainer computes log-probs at training's temperature: only rollouts whose log-probs the
        server reports at the same one are compared. Those of greedy tokens are reported at 1, and
        have no eval/z, as they are no draw. Their texts are all checked, and some are compared.
        """
        rng = random.Random(groups[0][0].id)
        shuffled = rng.sample(groups, len(groups))  # the first of them are compared
        greedy: Metrics = {}
        drawn: Metrics = {}
        if self.temperature == 1:
            greedy = await self._checked([rollouts[:1] for rollouts in shuffled], None)
        if self.eval_temperature == self.temperature:
            answers = [rollouts[1:] for rollouts in shuffled]
            drawn = await self._checked(answers, None, NUM_NATS)
        gaps = [
            part["sampling/logprob_gap"]
            for part in (greedy, drawn)
            if "sampling/logprob_gap" in part
        ]
        metrics = {"eval/logprob_gap": max(gaps)} if gaps else {}
        if "sampling/surprise" in drawn:
            metrics["eval/z"] = drawn["sampling/z"]
        return metrics

    async def _checked(
        self, groups: Sequence[Sequence[Rollout]], trains: bool | None, nats: float = 0.0
    ) -> Metrics:
        """Compare rollouts with the trainer; returns sampling/* and time/check.

        `nats`: by which the compared answers of an evaluation surprise, if those of NUM_PROMPTS do
        by less.
        """
        metrics: Metrics = {}
        with timed(metrics, "time/check"):
            newest = self.verification.publisher.versions.current
            answers = sampled(groups)
            highest = max((answer.version_max for answer in answers), default=newest)
            if highest > newest:
                self.verification.fail(
                    f"a server says that version {highest} sampled a rollout, but {newest} is the "
                    "newest"
                )
            members = self.verification.publisher.pool.up
            bounds = [self.verification.bound(member.dtype) for member in members]
            bound = max(bounds, default=math.inf)
            fresh = all(answer.version_min == newest for answer in answers)
            if trains is not None:
                claimed, compared = self._chosen(groups, answers, trains and fresh)
            else:
                claimed, compared = answers, of_first_prompts(groups, nats)
            contradiction = next(filter(None, map(self.claim, claimed)), "")
            if contradiction:
                self.verification.fail(
                    f"a server's answer contradicts its tokens: {contradiction}. Nothing was "
                    "trained on it"
                )
            metrics |= await run_in_thread(equal_pairs, groups)
            self._certain = await run_in_thread(certain_odds, answers)
            self._max_gap = bound if fresh else math.inf
            samples = as_samples(answer for answer in compared if answer.version_min == newest)
            drawn: Metrics = {}
            if samples:
                gap, drawn = await run_in_thread(self.verification.trainer.compare, samples)
                metrics["sampling/logprob_gap"] = gap
                if not gap <= bound:
                    self.verification.fail(differ(gap, bound))
            self._drawn = {} if fresh and self.fair else dict.fromkeys(DRAWN, 0.0) | drawn
            if trains is None:
                metrics |= drawn | farthest([metrics | drawn], self.group_size)
        return metrics

    def _chosen(
        self,
        groups: Sequence[Sequence[Rollout]],
        answers: Sequence[TokenSequence],
        trains_fresh: bool,
    ) -> tuple[Sequence[TokenSequence], Sequence[TokenSequence]]:
        """Draw the answers whose text is checked, and those whose log-probs are compared.

        `trains_fresh`: the step trains on some of them, and the newest weights sampled all. The
        draw depends on the first prompt alone.
        """
        rng = random.Random(groups[0][0].id if groups else "")
        claimed = rng.sample(answers, min(len(groups), len(answers)))
        # Rounded at random, to `share` on average, where training compares the others; else up.
        less = rng.random() if trains_fresh and self.fair else 0.0
        count = math.ceil(self.share * len(groups) - less)
        return claimed, sampled(rng.sample(groups, count))

    async def published(self, members: Sequence[Member], came: bool) -> Metrics:
        return await self.verification.published(members, came)

    def trained(self, metrics: Metrics) -> Metrics:
        """Add to a step's metrics the deviation of the draws, over this step and those before."""
        metrics = metrics | self._drawn
        metrics["sampling/greedy"] = metrics.get("sampling/greedy", 0.0) + self._certain
        rows = [*self.history[1 - LONGEST :], metrics]
        return metrics | farthest(rows, self.group_size)


@run_part("checks")
def checks(run: Joined) -> RunPart:
    """Make the verification of servers and, unless sync.check_share is 0, the check of rollouts."""
    config = run.config
    verification = Verification(
        publisher=run.publisher,
        prompts=run.prompts[:NUM_PROMPTS],
        trainer=run.trainer,
        rollout=config.rollout,
        sync=config.sync,
        alarmed=lambda: not SUSPICIOUS.isdisjoint(run.console.alarmed),
    )
    if not config.sync.check_share or config.pipeline.replay is not None:
        return verification
    # Where an answer's tokens decide whether it is trained, or enter the rewards of the others of
    # its group, the samples that are trained are biased.
    sources = config.sources.values()
    names = itertools.chain.from_iterable(source.rewards.functions for source in sources)
    of_group = any(REWARDS.get(name).of_group for name in names)
    temperature = config.rollout.temperature
    eval_temperature = config.eval.temperature
    check = SamplingCheck(
        verification,
        temperature=temperature,
        eval_temperature=temperature if eval_temperature is None else eval_temperature,
        share=config.sync.check_share,
        group_size=config.rollout.group_size,
        history=run.folder.history,
        fair=not (config.algorithm.mask_truncated or config.algorithm.reward_range or of_group),
    )
    # In other environments turns end in other ways, too.
    if all(source.env.name == "single_turn" for source in sources):
        ends = tokenizers.end_ids(config.model.path, run.trainer.tokenizer)
        decode = run.trainer.tokenizer.decode
        check.claim = partial(contradiction, decode=decode, ends=ends, stop=config.rollout.stop)
    return check


def sampled(groups: Sequence[Sequence[Rollout]]) -> list[TokenSequence]:
    """Return the sequences with sampled tokens."""
    sequences: list[TokenSequence] = []
    for rollout in itertools.chain.from_iterable(groups):
        sequences += [sequence for sequence in rollout.sequences if any(sequence.mask[1:])]
    return sequences


def of_first_prompts(groups: Sequence[Sequence[Rollout]], nats: float) -> list[TokenSequence]:
    """Take the sequences of the first NUM_PROMPTS prompts, and of more until they surprise by `nats`
    or have NUM_DRAWN sampled tokens.
    """
    sequences: list[TokenSequence] = []
    surprise = 0.0
    num_tokens = 0
    for number, rollouts in enumerate(groups):
        is_enough = surprise >= nats or num_tokens >= NUM_DRAWN
        if number >= NUM_PROMPTS and is_enough:
            break
        sequences += sampled([rollouts])
        surprise -= math.fsum(map(_logprob_of, rollouts))
        num_tokens += sum(rollout.num_sampled for rollout in rollouts)
    return sequences


def contradiction(
    sequence: TokenSequence,
    *,
    decode: Callable[..., str],
    ends: Collection[int],
    stop: Sequence[str],
) -> str:
    """Describe where the text of an answer of a single turn contradicts its tokens; "" if nowhere.

    `ends` are the ids of the tokens that end an answer, and `stop` the strings that do: the
    engine's text ends before them.
    """
    start = len(sequence.mask) - sequence.mask[::-1].index(False)
    token_ids = list(sequence.token_ids[start:])  # behind an environment's, if there are some
    stopped = sequence.finish_reason == "stop"
    ended = stopped and token_ids[-1] in ends
    shown_ids = token_ids[:-1] if ended else token_ids
    decoded = turn_text(decode, sequence.token_ids[:start], 0, shown_ids)
    by_string = stopped and not ended
    if by_string:
        # A stop string may have special tokens, which only the second text shows.
        with_special = decode(token_ids)
        if not any(string in decoded or string in with_special for string in stop):
            return f"it stopped by itself, but its last token, {token_ids[-1]}, ends no answer"
    text = sequence.text
    if any(sequence.mask[:start]):  # an environment closed a thought within the answer
        text = "" if by_string else text[len(text) - min(len(decoded), len(text)) :]
    if not (decoded.startswith(text) if by_string else decoded == text):
        return f"its text is {sequence.text[:80]!r}, its tokens are {decoded[:80]!r}"
    return ""


def equal_pairs(groups: Sequence[Sequence[Rollout]]) -> Metrics:
    """Count the pairs of a prompt's rollouts with equal tokens, and estimate their number without
    bias.

    Two draws are equal with the probability Σ p², which is the mean of p over rollouts; less often
    where an environment answers.
    """
    equal = 0
    expected = 0.0
    for rollouts in groups:
        counts = Counter(map(_tokens_of, rollouts))
        equal += sum(count * (count - 1) // 2 for count in counts.values())
        probabilities = [math.exp(_logprob_of(rollout)) for rollout in rollouts]
        expected += (len(rollouts) - 1) / 2 * math.fsum(probabilities)
    return {"sampling/equal": float(equal), "sampling/equal_expected": expected}


def _tokens_of(rollout: Rollout) -> tuple[object, ...]:
    """Return the tokens and images of a rollout, as a key."""
    return tuple(
        (bytes(array("I", sequence.token_ids)), sequence.images) for sequence in rollout.sequences
    )


def _logprob_of(rollout: Rollout) -> float:
    """Sum the log-probs of a rollout's tokens."""
    sequences = rollout.sequences
    return math.fsum(itertools.chain.from_iterable(sequence.logprobs for sequence in sequences))


def certain_odds(answers: Sequence[TokenSequence]) -> float:
    """Compute a lower bound of the log odds that an eighth of these answers is greedy.

    The odds are Σ log(7/8 + 1/8 · g), where g is 1 / p(answer) of a greedy answer, else 0; its mean
    is 1. Here only answers count as greedy whose tokens all have p > 1/2, and so are the likeliest.
    The trainer adds the other greedy ones (draws.py).
    """
    greedy = [
        -math.fsum(answer.logprobs) for answer in answers if min(answer.logprobs) > math.log(0.5)
    ]
    gains = np.logaddexp(0.0, np.array(greedy) - math.log(7))
    return len(answers) * math.log(7 / 8) + float(gains.sum())


def farthest(rows: MetricsHistory, group_size: int) -> Metrics:
    """Compute the largest deviation of the draws, in standard errors, over several last parts of a
    run.

    The parts are the last 1, 2, 4, ... steps: what begins late is not hidden by what came before.
    The errors are those of Bernstein's inequality, as a single rare token, or a single completion
    that all others equal, may be most of a sum.
    """
    most = {
        "sampling/z": 0.0,
        "sampling/colder": 0.0,
        "sampling/greedy_odds": 0.0,
        "sampling/equal_z": 0.0,
    }
    values = np.array([_summed(row) for row in reversed(rows)])
    last_rows = [2**power - 1 for power in range(len(rows).bit_length())]
    sums = np.cumsum(values, axis=0)[last_rows]
    for surprise, variance, greedy, equal, expected in sums.tolist():
        jump = RARE if surprise > 0 else ENTROPY
        z = surprise / math.sqrt(max(variance + abs(surprise) * jump / 3, TINY))
        if abs(z) > abs(most["sampling/z"]):
            most["sampling/z"] = z
            most["sampling/colder"] = -surprise / variance if variance else 0.0
        excess = max(0.0, equal - expected)
        equal_z = excess / math.sqrt(max(group_size * (expected / 2 + excess / 3), TINY))
        most["sampling/equal_z"] = max(most["sampling/equal_z"], equal_z)
        most["sampling/greedy_odds"] = max(most["sampling/greedy_odds"], greedy)
    return most


def _summed(row: Mapping[str, float | None]) -> list[float]:
    """Return the sums among a step's metrics; 0 where it has none."""
    return [row.get(name) or 0.0 for name in SUMMED]
