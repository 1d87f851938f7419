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
from hocket.rewards.scorer import Scorer, refuse_failing
from hocket.rollout.collect import Plan, Play, Slot, collect
from hocket.types import Group, Metrics, Prompt, Rollout

EVAL_STEP = -1  # in place of the step in the sampling seed: no training step has it


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The held-out prompts of a run, and how they are measured."""

    prompts: Sequence[Prompt]
    play: Play
    scorer: Scorer  # scores by the rewards of `rewards` alone
    rewards: Mapping[str, str]  # name of the reward that measures each source
    samples: int  # samples per prompt at a temperature above 0, after a greedy rollout
    sampling: SamplingParams
    threshold: float  # reward from which a sample passes
    timeout_s: float  # seconds that all episodes may take
    max_error_rate: float  # largest share of rollouts that may have no score

    async def run(
        self,
        label: str,
        generated: Callable[[], None] = lambda: None,
        ended: Callable[[int, int], None] = lambda done, total: None,
    ) -> tuple[dict[str, float], list[Group]]:
        """Measure all prompts. Returns the eval/* metrics, and the groups in the prompts' order.

        label: the name of this evaluation, unique in a run. generated: called once all episodes
        have ended, while rewards may be missing. ended: called after each episode with the number
        of those that have ended, and of all. Raise ServerError if the servers failed before
        the deadline, and RewardError if more rollouts than max_error_rate have no score, or all.
        """
        num_prompts = len(self.prompts)
        greedy = self.sampling.model_copy(update={"temperature": 0.0})
        # At temperature 0 all samples would be alike.
        group_size = 1 + self.samples if self.sampling.temperature else 1
        num_rollouts = num_prompts * group_size
        plan = Plan(
            label=label,
            sampling=self.sampling,
            group_size=group_size,
            wanted=num_prompts,
            at_most=num_prompts,
            deadline=Deadline(self.timeout_s),
        )

        num_unfinished = num_rollouts

        async def play(prompt: Prompt, slot: Slot) -> Rollout:
            nonlocal num_unfinished
            if slot.number % group_size == 0:  # the first of its group
                slot = dataclasses.replace(slot, sampling=greedy)
            rollout = await self.play(prompt, slot)
            num_unfinished -= 1
            ended(num_rollouts - num_unfinished, num_rollouts)
            if num_unfinished == 0:
                generated()
            return rollout

        numbered = enumerate(self.prompts)

        def take(count: int) -> dict[int, Prompt]:
            return dict(itertools.islice(numbered, count))

        batch = await collect(plan, take, play, self.scorer)
        # One score is needed in any case.
        max_error_rate = min(self.max_error_rate, 1 - 1 / num_rollouts)
        refuse_failing(batch.groups, max_error_rate)
        return measured(batch.groups, self.rewards, self.threshold), batch.groups


def measured(groups: Sequence[Group], rewards: Mapping[str, str], threshold: float) -> Metrics:
    """Compute the metrics of an evaluation.

    eval/NAME/METRIC is the metric of a source that has a name in data.sources, and eval/METRIC is
    the mean over all sources that have it. The mean of k independent means has the standard error
    √(Σ error²) / k.

    groups: those of all prompts; the first rollout of each is greedy. rewards: the name of the
    reward that measures each source. threshold: the reward from which a sample passes.
    """
    values_by_key = defaultdict[str, list[float]](list)
    metrics = Metrics()
    for source, groups_of_source in by_source(groups).items():
        for key, value in _measured(groups_of_source, rewards[source], threshold).items():
            values_by_key[key].append(value)
            if source:
                metrics[key.replace("eval/", f"eval/{source}/", 1)] = value
    for key, values in values_by_key.items():
        if key.endswith("_stderr"):
            metrics[key] = math.hypot(*values) / len(values)
        else:
            metrics[key] = statistics.fmean(values)
    return metrics


def _measured(groups: Sequence[Group], reward: str, threshold: float) -> Metrics:
    """Compute the metrics of one source."""
    greedy = [_values(group, reward, slice(1)) for group in groups]
    sampled = [_values(group, reward, slice(1, None)) for group in groups]
    metrics = _mean("greedy", greedy) | _mean("sampled", sampled)

    values = list(itertools.chain.from_iterable(greedy + sampled))
    if values:
        metrics["eval/zero_or_one"] = statistics.fmean(value in (0, 1) for value in values)

    rollouts = list(itertools.chain.from_iterable(group.rollouts for group in groups))
    num_truncated = sum(rollout.finish_reason == "length" for rollout in rollouts)
    metrics["eval/reward_errors"] = 1 - len(values) / len(rollouts)
    metrics["eval/length_mean"] = statistics.fmean(rollout.num_sampled for rollout in rollouts)
    metrics["eval/truncated"] = num_truncated / len(rollouts)
    return metrics | _pass_metrics(sampled, threshold, len(groups[0].rollouts) - 1)


def _pass_metrics(
    sampled: Sequence[Sequence[float]], threshold: float, num_samples: int
) -> Metrics:
    """Estimate pass@k for k = 1, 2, 4, ... up to the number of samples per prompt."""
    metrics = Metrics()
    for exponent in range(num_samples.bit_length()):
        k = 2**exponent
        # Prompts with too few scores can't be estimated.
        chances = []
        for values in sampled:
            if len(values) >= k:
                num_passed = sum(value >= threshold for value in values)
                chances.append(pass_at_k(len(values), num_passed, k))
        if chances:
            metrics[f"eval/pass@{k}"] = statistics.fmean(chances)
    return metrics


def _values(group: Group, reward: str, part: slice) -> list[float]:
    """List a reward's values in a part of a group, without the rollouts that have no score."""
    return [score.parts[reward] for score in group.scores[part] if score.error is None]


def _mean(name: str, values_by_prompt: Sequence[Sequence[float]]) -> Metrics:
    """Compute the mean over prompts of the mean of each, and its standard error."""
    means = [statistics.fmean(values) for values in values_by_prompt if values]
    metrics = Metrics()
    if means:
        metrics[f"eval/{name}"] = statistics.fmean(means)
    if len(means) > 1:
        metrics[f"eval/{name}_stderr"] = statistics.stdev(means) / math.sqrt(len(means))
    return metrics


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """Estimate the chance that at least one of k samples passes, without bias.

    It is 1 - C(n - c, k) / C(n, k), where c of n samples have passed (arXiv 2107.03374, eq. 1).

    Example:
        >>> pass_at_k(num_samples=4, num_passed=1, k=2)
        0.5
    """
    return 1 - math.comb(num_samples - num_passed, k) / math.comb(num_samples, k)
