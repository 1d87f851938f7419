"""Measure held-out prompts greedily and by samples, with the same random numbers every time."""

import dataclasses
import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from hocket.client.pool import Deadline
from hocket.observe.metrics import by_source
from hocket.protocol import SamplingParams
from hocket.rewards.scorer import RewardScorer, refuse_failing
from hocket.rollout.collect import Plan, Play, Slot, collect
from hocket.types import Group, Metrics, Prompt, Rollout

EVAL_STEP = -1  # in place of the step in the sampling seed: no training step has it


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    prompts: Sequence[Prompt]
    play: Play
    scorer: RewardScorer  # by these alone
    rewards: Mapping[str, str]  # of each source its own
    samples: int  # per prompt, at a temperature above 0; its first rollout is greedy
    sampling: SamplingParams
    threshold: float  # reward from which a sample passes
    timeout_s: float
    max_error_rate: float

    async def run(
        self, label: str, generated: Callable[[], None] = lambda: None
    ) -> tuple[dict[str, float], list[Group]]:
        """Return the eval/* metrics and the groups, in the prompts' order. Raise RewardError as `refuse_failing`.

        `generated`: called once all episodes have ended, while rewards may be missing.
        """
        size = len(self.prompts)
        greedy = self.sampling.model_copy(update={"temperature": 0.0})
        group_size = 1 + self.samples if self.sampling.temperature else 1
        deadline = Deadline(self.timeout_s)
        plan = Plan(
            label=label,
            sampling=self.sampling,
            group_size=group_size,
            wanted=size,
            at_most=size,
            deadline=deadline,
        )

        left = size * group_size

        async def play(prompt: Prompt, slot: Slot) -> Rollout:
            nonlocal left
            if slot.number % group_size == 0:
                slot = dataclasses.replace(slot, sampling=greedy)
            rollout = await self.play(prompt, slot)
            left -= 1
            if left == 0:
                generated()
            return rollout

        numbered = enumerate(self.prompts)
        batch = await collect(
            plan, lambda count: dict(itertools.islice(numbered, count)), play, self.scorer
        )
        refuse_failing(
            batch.groups, min(self.max_error_rate, 1 - 1 / (size * group_size))
        )  # one score at least
        return measured(batch.groups, self.rewards, self.threshold), batch.groups


def measured(groups: Sequence[Group], rewards: Mapping[str, str], threshold: float) -> Metrics:
    """Return as eval/METRIC the mean over held-out sets that have it, and eval/NAME/METRIC of each of data.sources.

    The mean of k independent means has the standard error √(Σ error²) / k.
    """
    of_all = defaultdict[str, list[float]](list)
    metrics = Metrics()
    for name, mine in by_source(groups).items():
        for key, value in _measured(mine, rewards[name], threshold).items():
            of_all[key].append(value)
            if name:
                metrics[key.replace("eval/", f"eval/{name}/", 1)] = value
    for key, values in of_all.items():
        metrics[key] = (
            math.hypot(*values) / len(values)
            if key.endswith("_stderr")
            else statistics.fmean(values)
        )
    return metrics


def _measured(groups: Sequence[Group], reward: str, threshold: float) -> Metrics:
    rollouts = [*itertools.chain.from_iterable(group.rollouts for group in groups)]
    greedy = [_marks(group, reward, slice(1)) for group in groups]
    sampled = [_marks(group, reward, slice(1, None)) for group in groups]
    given = [*itertools.chain(*greedy, *sampled)]
    metrics = {
        **_mean("greedy", greedy),
        **_mean("sampled", sampled),
        **(
            {"eval/zero_or_one": statistics.fmean(mark in (0, 1) for mark in given)}
            if given
            else {}
        ),
        "eval/reward_errors": 1 - len(given) / len(rollouts),
        "eval/length_mean": statistics.fmean(rollout.num_sampled for rollout in rollouts),
        "eval/truncated": sum(rollout.finish_reason == "length" for rollout in rollouts)
        / len(rollouts),
    }
    for k in (2**i for i in range((len(groups[0].rollouts) - 1).bit_length())):
        chances = [
            pass_at_k(len(mine), sum(mark >= threshold for mark in mine), k)
            for mine in sampled
            if len(mine) >= k
        ]
        if chances:
            metrics[f"eval/pass@{k}"] = statistics.fmean(chances)
    return metrics


def _marks(group: Group, reward: str, part: slice) -> list[float]:
    return [score.parts[reward] for score in group.scores[part] if score.error is None]


def _mean(name: str, marks: Sequence[Sequence[float]]) -> dict[str, float]:
    """Return the mean over prompts of the mean of each, and its standard error."""
    means = [statistics.fmean(mine) for mine in marks if mine]
    metrics = {f"eval/{name}": statistics.fmean(means)} if means else {}
    if len(means) > 1:
        metrics[f"eval/{name}_stderr"] = statistics.stdev(means) / math.sqrt(len(means))
    return metrics


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """Return 1 − C(n − c, k) / C(n, k): the chance that one of k samples passes, unbiased (arXiv 2107.03374, eq. 1)."""
    return 1 - math.comb(num_samples - num_passed, k) / math.comb(num_samples, k)
