"""Check the rollouts of a step before anything is learnt from them: log-probs, draws, and what an answer claims.

Of tokens drawn from p, the sum D of −log p(token) − H(p) has mean 0 and the variance V = Σ Var(log p), whatever came
before each token. A colder draw has D < 0, and −D / V is about the share by which its temperature is lower.
"""

import dataclasses
import math
import random
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

from hocket.common.tasks import run_in_thread, timed
from hocket.sync.proof import Proof, as_samples
from hocket.types import Metrics, Rollout, TokenSequence

History = Sequence[Mapping[str, float | None]]
"""Metrics of the steps so far."""
RARE = 10.0  # nats by which one token may surprise: p = 5e-5
ENTROPY = 3.0  # nats by which one may surprise less than expected
LONGEST = 1024  # steps
TINY = 1e-30  # a variance of 0, as a divisor


@dataclasses.dataclass
class SamplingCheck:
    """Compare a share of the rollouts with the trainer; those of stale weights are left out."""

    proof: Proof
    share: float
    group_size: int
    history: History
    claim: Callable[[TokenSequence], str] = lambda sequence: ""  # what is wrong in what a server says of its tokens

    async def check(self, groups: Sequence[Sequence[Rollout]], alone: bool) -> Metrics:
        """Return sampling/* of each prompt's rollouts: of all, `alone`, or of a share of them and the steps before.

        Raise SyncError, or warn, where they fail.
        """
        metrics: Metrics = {}
        with timed(metrics, "time/check"):
            rollouts = [rollout for group in groups for rollout in group]
            newest = self.proof.publisher.versions.current
            said = max((one.version_max for rollout in rollouts for one in rollout.sequences), default=newest)
            if said > newest:
                self.proof.fail(f"a server says that version {said} sampled a rollout, but {newest} is the newest")
            sequences = self._witnesses(rollouts, 1.0 if alone else self.share)
            if wrong := next(filter(None, map(self.claim, sequences)), ""):
                self.proof.fail(f"a server's answer contradicts its tokens: {wrong}. Nothing was trained on it")
            metrics |= await run_in_thread(equal_pairs, groups)
            if sequences:
                metrics |= self._compared(*await run_in_thread(self.proof.trainer.surprise, as_samples(sequences)))
            before = [] if alone else self.history[-LONGEST:]
            metrics |= over_run([*before, metrics], self.group_size)
        return metrics

    def _witnesses(self, rollouts: Sequence[Rollout], share: float) -> list[TokenSequence]:
        """Return the sequences of a share of the rollouts, by lot: chosen by rewards, they would be no fair draw."""
        version = self.proof.publisher.versions.current
        lot = random.Random(rollouts[0].id if rollouts else "")
        chosen = lot.sample(rollouts, math.ceil(share * len(rollouts)))
        return [
            one
            for rollout in chosen
            for one in rollout.sequences
            if one.version_min == one.version_max == version and any(one.mask[1:])
        ]

    def _compared(self, num_tokens: float, gap: float, surprise: float, variance: float) -> Metrics:
        gap = gap / num_tokens
        bound = max((self.proof.bound(member.dtype) for member in self.proof.publisher.pool.up), default=math.inf)
        if not gap <= bound:
            self.proof.fail(
                f"the servers' log-probs of these rollouts are not the trainer's: mean |Δ log-prob| {gap:.3g} is more "
                f"than {bound:.3g} (sync.max_logprob_gap). Nothing was trained on them. Likely: a server has other "
                f"weights, samples with another temperature, top_p or top_k, or mixes up prompts. Restart it"
            )
        return {
            "sampling/logprob_gap": gap,
            "sync/max_gap": bound,
            "sampling/surprise": surprise,
            "sampling/variance": variance,
        }


def contradiction(
    sequence: TokenSequence, *, decode: Callable[..., str], ends: Collection[int], stop: Sequence[str]
) -> str:
    """Return what an answer of one turn says of its tokens and is not so; "" if all is.

    `ends` are the ids of the tokens that end an answer, `stop` strings that do: the engine's text ends before them.
    """
    token_ids = [token for token, sampled in zip(sequence.token_ids, sequence.mask, strict=True) if sampled]
    stopped = sequence.finish_reason == "stop"
    ended = stopped and token_ids[-1] in ends
    said = decode(token_ids[:-1] if ended else token_ids, skip_special_tokens=True)
    if stopped and not ended and not any(string in said for string in stop):
        return f"it stopped by itself, but its last token, {token_ids[-1]}, ends no answer"
    if not (said.lstrip().startswith(sequence.text.lstrip()) if stop else said == sequence.text):
        return f"its text is {sequence.text[:80]!r}, its tokens are {said[:80]!r}"
    return ""


def equal_pairs(groups: Sequence[Sequence[Rollout]]) -> Metrics:
    """Return how many pairs of a prompt's rollouts have equal tokens, and an unbiased estimate of their number.

    Two draws are equal with the probability Σ p², the mean of p over rollouts; less often where an environment answers.
    """
    equal, expected = 0, 0.0
    for rollouts in groups:
        tokens = Counter(tuple(bytes(array("I", one.token_ids)) for one in rollout.sequences) for rollout in rollouts)
        equal += sum(count * (count - 1) // 2 for count in tokens.values())
        sums = [math.fsum(value for one in rollout.sequences for value in one.logprobs) for rollout in rollouts]
        expected += (len(rollouts) - 1) / 2 * math.fsum(map(math.exp, sums))
    return {"sampling/equal": float(equal), "sampling/equal_expected": expected}


def over_run(rows: History, group_size: int) -> Metrics:
    """Return how far draws are from what is expected, in standard errors, in that part of the run where most.

    Parts are the last 1, 2, 4, ... steps: what begins late is not hidden by what came before. The errors are those of
    Bernstein's inequality, as one rare token, or one completion that all others equal, may be most of a sum.
    """
    found = {"sampling/z": 0.0, "sampling/colder": 0.0, "sampling/equal_z": 0.0}
    for steps in (2**power for power in range(len(rows).bit_length())):
        surprise, variance, equal, expected = (
            math.fsum(row.get(f"sampling/{name}") or 0.0 for row in rows[-steps:])
            for name in ("surprise", "variance", "equal", "equal_expected")
        )
        jump = RARE if surprise > 0 else ENTROPY
        z = surprise / math.sqrt(max(variance + abs(surprise) * jump / 3, TINY))
        if abs(z) > abs(found["sampling/z"]):
            found |= {"sampling/z": z, "sampling/colder": -surprise / variance if variance else 0.0}
        excess = max(0.0, equal - expected)
        equal_z = excess / math.sqrt(max(group_size * (expected / 2 + excess / 3), TINY))
        found["sampling/equal_z"] = max(found["sampling/equal_z"], equal_z)
    return found
