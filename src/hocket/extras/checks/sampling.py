"""Check the rollouts of a step before anything is learnt from them: log-probs, draws, and what an
answer claims.

For tokens drawn from p, the sum D of −log p(token) − H(p) has mean 0 and the variance V = Σ Var(log
p), whatever came before each token. A colder draw has D < 0, and −D / V is about the share by which
its temperature is lower. Training measures both on its way, of what it trains on; of all prompts, a
lot is compared.
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
PROOF_PROMPTS = 16
SUMMED = (*DRAWN, "sampling/equal", "sampling/equal_expected")
RARE = 10.0  # nats by which one token may surprise: p = 5e-5
ENTROPY = 3.0  # nats by which one may surprise less than expected
TINY = 1e-30  # a variance of 0, as a divisor
LONGEST = 1024  # steps


@dataclasses.dataclass
class SamplingCheck(RunPart):
    """Compare rollouts with the trainer; those of stale weights are left out."""

    proof: Verification
    temperature: float  # of training's samples
    eval_temperature: float
    share: float  # of prompts that are compared before the step
    group_size: int
    history: MetricsHistory
    fair: bool = True  # whether a sample is unbiased depends on no answer
    claim: Callable[[TokenSequence], str] = lambda sequence: (
        ""
    )  # what is wrong in what a server says of its tokens
    _max_gap: float = math.inf  # of the rollouts that it took last
    _lot: Metrics = dataclasses.field(
        default_factory=dict
    )  # counts in place of what training finds
    _certain: float = 0.0  # odds of greedy answers, without those that training finds

    async def rolled_out(self, groups: Sequence[Sequence[Rollout]], trains: bool | None) -> Metrics:
        """Return sampling/* of each prompt's rollouts, before a step that `trains` on some.

        None: of an evaluation, whose rollouts are all compared. Raise SyncError, or warn, where
        they fail.
        """
        if trains is None:
            return await self._evaluated(groups)
        return await self._checked(groups, trains)

    def max_gap(self) -> float:
        """Return what rounding explains; inf where a rollout is stale."""
        return self._max_gap

    async def _evaluated(self, groups: Sequence[Sequence[Rollout]]) -> Metrics:
        """Check an evaluation's rollouts whose log-probs are of training's temperature; of greedy
        tokens they are of 1.

        Returns eval/* metrics. Greedy tokens are no draw: they have no eval/z.
        """
        greedy: Metrics = {}
        drawn: Metrics = {}
        if self.temperature == 1:
            greedy = await self._checked([rollouts[:1] for rollouts in groups], None)
        if self.eval_temperature == self.temperature:
            drawn = await self._checked([rollouts[1:] for rollouts in groups], None)
        gaps = [
            part["sampling/logprob_gap"]
            for part in (greedy, drawn)
            if "sampling/logprob_gap" in part
        ]
        metrics = {"eval/logprob_gap": max(gaps)} if gaps else {}
        if "sampling/surprise" in drawn:
            metrics["eval/z"] = drawn["sampling/z"]
        return metrics

    async def _checked(self, groups: Sequence[Sequence[Rollout]], trains: bool | None) -> Metrics:
        metrics: Metrics = {}
        with timed(metrics, "time/check"):
            newest = self.proof.publisher.versions.current
            answers = sampled(groups)
            said = max((one.version_max for one in answers), default=newest)
            if said > newest:
                self.proof.fail(
                    f"a server says that version {said} sampled a rollout, but {newest} is the newest"
                )
            bound = max(
                (self.proof.bound(member.dtype) for member in self.proof.publisher.pool.up),
                default=math.inf,
            )
            fresh = all(one.version_min == newest for one in answers)
            claimed = compared = answers
            if trains is not None:
                lot = random.Random(groups[0][0].id if groups else "")
                claimed = lot.sample(answers, min(len(groups), len(answers)))
                # Rounded at random, to `share` on average, where training compares others; else up.
                less = lot.random() if trains and fresh and self.fair else 0.0
                compared = sampled(lot.sample(groups, math.ceil(self.share * len(groups) - less)))
            if wrong := next(filter(None, map(self.claim, claimed)), ""):
                self.proof.fail(
                    f"a server's answer contradicts its tokens: {wrong}. Nothing was trained on it"
                )
            metrics |= await run_in_thread(equal_pairs, groups)
            self._certain = await run_in_thread(certain_odds, answers)
            self._max_gap = bound if fresh else math.inf
            samples = as_samples(one for one in compared if one.version_min == newest)
            drawn: Metrics = {}
            if samples:
                gap, drawn = await run_in_thread(self.proof.trainer.compare, samples)
                metrics["sampling/logprob_gap"] = gap
                if not gap <= bound:
                    self.proof.fail(differ(gap, bound))
            self._lot = {} if fresh and self.fair else dict.fromkeys(DRAWN, 0.0) | drawn
            if trains is None:
                metrics |= drawn | farthest([metrics | drawn], self.group_size)
        return metrics

    async def published(self, members: Sequence[Member], came: bool) -> Metrics:
        return await self.proof.published(members, came)

    def trained(self, metrics: Metrics) -> Metrics:
        """Return, after a step, how far draws are from what is expected."""
        metrics = metrics | self._lot
        metrics["sampling/greedy"] = metrics.get("sampling/greedy", 0.0) + self._certain
        return metrics | farthest([*self.history[1 - LONGEST :], metrics], self.group_size)


@run_part("checks")
def checks(run: Joined) -> RunPart:
    """Make the proof and, unless sync.check_share is 0, the check of rollouts, which hands over to
    the proof."""
    config = run.config
    proof = Verification(
        publisher=run.publisher,
        prompts=run.prompts[:PROOF_PROMPTS],
        trainer=run.trainer,
        rollout=config.rollout,
        sync=config.sync,
        alarmed=lambda: not SUSPICIOUS.isdisjoint(run.console.alarmed),
    )
    if not config.sync.check_share or config.pipeline.replay is not None:
        return proof
    # An answer's tokens have a say in whether it is trained, or in the rewards of those before it.
    sources = config.sources.values()
    names = itertools.chain.from_iterable(source.rewards.functions for source in sources)
    of_group = any(REWARDS.get(name).of_group for name in names)
    temperature = config.rollout.temperature
    check = SamplingCheck(
        proof,
        temperature=temperature,
        eval_temperature=temperature
        if config.eval.temperature is None
        else config.eval.temperature,
        share=config.sync.check_share,
        group_size=config.rollout.group_size,
        history=run.folder.history,
        fair=not (config.algorithm.mask_truncated or config.algorithm.reward_range or of_group),
    )
    # Turns of other environments end in other ways, too.
    if all(source.env.name == "single_turn" for source in sources):
        ends = tokenizers.end_ids(config.model.path, run.trainer.tokenizer)
        decode = run.trainer.tokenizer.decode
        check.claim = partial(contradiction, decode=decode, ends=ends, stop=config.rollout.stop)
    return check


def sampled(groups: Sequence[Sequence[Rollout]]) -> list[TokenSequence]:
    """Return the sequences with sampled tokens."""
    return [
        one
        for rollouts in groups
        for rollout in rollouts
        for one in rollout.sequences
        if any(one.mask[1:])
    ]


def contradiction(
    sequence: TokenSequence,
    *,
    decode: Callable[..., str],
    ends: Collection[int],
    stop: Sequence[str],
) -> str:
    """Say where an answer of one turn contradicts its tokens; "" if nowhere.

    `ends` are the ids of the tokens that end an answer, `stop` strings that do: the engine's text
    ends before them.
    """
    start = len(sequence.mask) - sequence.mask[::-1].index(False)
    token_ids = list(sequence.token_ids[start:])  # after an environment's, if there are such
    stopped = sequence.finish_reason == "stop"
    ended = stopped and token_ids[-1] in ends
    decoded = turn_text(
        decode, sequence.token_ids[:start], 0, token_ids[:-1] if ended else token_ids
    )
    by_string = stopped and not ended
    # A stop string may have special tokens, which the text does not.
    if by_string and not any(
        string in written for string in stop for written in (decoded, decode(token_ids))
    ):
        return f"it stopped by itself, but its last token, {token_ids[-1]}, ends no answer"
    text = sequence.text
    if any(sequence.mask[:start]):  # an environment closed a thought within the answer
        text = "" if by_string else text[len(text) - min(len(decoded), len(text)) :]
    if not (decoded.startswith(text) if by_string else decoded == text):
        return f"its text is {sequence.text[:80]!r}, its tokens are {decoded[:80]!r}"
    return ""


def equal_pairs(groups: Sequence[Sequence[Rollout]]) -> Metrics:
    """Return how many pairs of a prompt's rollouts have equal tokens, and an unbiased estimate of
    their number.

    Two draws are equal with the probability Σ p², the mean of p over rollouts; less often where an
    environment answers.
    """
    equal, expected = 0, 0.0
    for rollouts in groups:
        tokens = Counter(
            tuple((bytes(array("I", one.token_ids)), one.images) for one in rollout.sequences)
            for rollout in rollouts
        )
        equal += sum(count * (count - 1) // 2 for count in tokens.values())
        sums = [
            math.fsum(value for one in rollout.sequences for value in one.logprobs)
            for rollout in rollouts
        ]
        expected += (len(rollouts) - 1) / 2 * math.fsum(map(math.exp, sums))
    return {"sampling/equal": float(equal), "sampling/equal_expected": expected}


def certain_odds(answers: Sequence[TokenSequence]) -> float:
    """Return the log of how much likelier these answers are if an eighth of them is greedy, or a
    number below it.

    Σ log(7/8 + 1/8 · g); g is 1 / p(answer) where it is greedy, else 0, and its mean is 1. A token
    of more than 1/2 is the likeliest; of other answers the trainer adds what it finds.
    """
    greedy = [-math.fsum(one.logprobs) for one in answers if min(one.logprobs) > math.log(0.5)]
    return len(answers) * math.log(7 / 8) + float(
        np.logaddexp(0.0, np.array(greedy) - math.log(7)).sum()
    )


def farthest(rows: MetricsHistory, group_size: int) -> Metrics:
    """Return how far draws are from what is expected, in standard errors, in that part of the run
    where most.

    Parts are the last 1, 2, 4, ... steps: what begins late is not hidden by what came before. The
    errors are those of Bernstein's inequality, as one rare token, or one completion that all others
    equal, may be most of a sum.
    """
    found = {
        "sampling/z": 0.0,
        "sampling/colder": 0.0,
        "sampling/greedy_odds": 0.0,
        "sampling/equal_z": 0.0,
    }
    values = [[row.get(name) or 0.0 for name in SUMMED] for row in reversed(rows)]
    sums = np.cumsum(values, axis=0)[[2**power - 1 for power in range(len(rows).bit_length())]]
    for surprise, variance, greedy, equal, expected in sums.tolist():
        jump = RARE if surprise > 0 else ENTROPY
        z = surprise / math.sqrt(max(variance + abs(surprise) * jump / 3, TINY))
        if abs(z) > abs(found["sampling/z"]):
            found |= {"sampling/z": z, "sampling/colder": -surprise / variance if variance else 0.0}
        excess = max(0.0, equal - expected)
        equal_z = excess / math.sqrt(max(group_size * (expected / 2 + excess / 3), TINY))
        found["sampling/equal_z"] = max(found["sampling/equal_z"], equal_z)
        found["sampling/greedy_odds"] = max(found["sampling/greedy_odds"], greedy)
    return found
