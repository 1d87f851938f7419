"""Held-out accuracy and pass@k, with the same random numbers every time."""

import dataclasses
import itertools
import math
import statistics
from collections.abc import Sequence

from hocket.client.pool import Deadline
from hocket.protocol import SamplingParams
from hocket.rewards.scorer import RewardScorer, refuse_failing
from hocket.rollout.collect import Plan, Play, collect
from hocket.types import Group, Prompt

PASSED = 1.0
"""A sample passes with full marks."""
EVAL_STEP = -1
"""Takes the place of the step in the sampling seed: no training step has it."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    prompts: Sequence[Prompt]
    play: Play
    scorer: RewardScorer  # by `reward` alone
    reward: str
    samples: int  # rollouts per prompt
    sampling: SamplingParams
    timeout_s: float
    max_error_rate: float

    async def run(self, label: str) -> tuple[dict[str, float], list[Group]]:
        """Return the eval/* metrics and the groups, in the prompts' order. Raise RewardError as `refuse_failing`."""
        size = len(self.prompts)
        deadline = Deadline(self.timeout_s)
        plan = Plan(
            label=label, sampling=self.sampling, group_size=self.samples, wanted=size, at_most=size, deadline=deadline
        )
        numbered = enumerate(self.prompts)
        batch = await collect(plan, lambda count: dict(itertools.islice(numbered, count)), self.play, self.scorer)
        refuse_failing(batch.groups, min(self.max_error_rate, 1 - 1 / (size * self.samples)))  # one score at least
        return _measured(batch.groups, self.reward), batch.groups


def _measured(groups: Sequence[Group], reward: str) -> dict[str, float]:
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    marks = [[score.parts[reward] for score in group.scores if score.error is None] for group in groups]
    metrics = {
        "eval/accuracy": statistics.fmean(statistics.fmean(mine) for mine in marks if mine),
        "eval/reward_errors": 1 - sum(map(len, marks)) / len(rollouts),
        "eval/length_mean": statistics.fmean(rollout.num_sampled for rollout in rollouts),
        "eval/truncated": sum(rollout.finish_reason == "length" for rollout in rollouts) / len(rollouts),
    }
    for k in (2**i for i in range(len(groups[0].rollouts).bit_length())):
        chances = [pass_at_k(len(mine), sum(mark >= PASSED for mark in mine), k) for mine in marks if len(mine) >= k]
        if chances:
            metrics[f"eval/pass@{k}"] = statistics.fmean(chances)
    return metrics


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """Return 1 − C(n − c, k) / C(n, k): the chance that one of k samples passes, unbiased (arXiv 2107.03374, eq. 1)."""
    return 1 - math.comb(num_samples - num_passed, k) / math.comb(num_samples, k)
