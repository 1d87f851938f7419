"""Held-out accuracy and pass@k, with the same random numbers every time."""

import math
import statistics
from collections.abc import Mapping, Sequence

from hocket.config import Config, RewardsConfig, RewardSpec
from hocket.rewards.scorer import refuse_failing
from hocket.rollout.coalescer import Generator
from hocket.rollout.collect import Scorer, in_order, play, sampling_params
from hocket.rollout.pipeline import deadline_s
from hocket.rollout.played import Player, Wave
from hocket.types import Group, Prompt

MAIN = ""
"""Name of the dataset at eval.data, whose metrics have none in theirs."""
PASSED = 1.0
"""A sample passes with full marks."""
EVAL_STEP = -1
"""Takes the place of the step in the sampling seed: no training step has it."""


def rewards_of_eval(config: Config) -> RewardsConfig:
    """Returns a rewards section with `eval.reward` alone, its options as in rewards.functions where it is there too."""
    functions = config.rewards.functions
    name = config.eval.reward or next(iter(functions))
    return config.rewards.model_copy(update={"functions": {name: functions.get(name, RewardSpec(weight=1.0))}})


async def evaluate(
    datasets: Mapping[str, Sequence[Prompt]],
    *,
    server: Generator,
    scorer: Scorer,
    config: Config,
    label: str,
    episodes: Player | None = None,
) -> tuple[dict[str, float], list[Group]]:
    """Returns the eval/* metrics and the groups, in the prompts' order.

    Args:
        datasets: held-out prompts by the name that their metrics get, eval/NAME/accuracy; MAIN: eval/accuracy.
        scorer: scores by `rewards_of_eval`.
        episodes: as for training.

    Raises:
        RewardError: more than rewards.max_error_rate of the completions of a dataset, or all, could not be scored.
    """
    sampling = sampling_params(
        config.rollout, seed=config.trainer.seed, step=EVAL_STEP, temperature=config.eval.temperature
    )
    (reward,) = rewards_of_eval(config).functions
    metrics: dict[str, float] = {}
    every: list[Group] = []
    for name, prompts in datasets.items():
        wave = Wave(
            prompts=prompts,
            sampling=sampling,
            group_size=config.eval.samples,
            label=f"{label} {name}".strip(),
            timeout_s=deadline_s(config),
        )
        groups = in_order([group async for group in play(wave, server=server, scorer=scorer, episodes=episodes)])
        num_scores = sum(len(group.scores) for group in groups)
        refuse_failing(groups, min(config.rewards.max_error_rate, 1 - 1 / num_scores))  # one score at least
        prefix = f"eval/{name}/" if name else "eval/"
        metrics |= {f"{prefix}{key}": value for key, value in _measured(groups, reward).items()}
        every += groups
    return metrics, every


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """Returns the chance that at least one of k samples passes, from more of them (arXiv 2107.03374, eq. 1).

    1 - C(n - c, k) / C(n, k), which is unbiased where k ≤ n.
    """
    return 1 - math.comb(num_samples - num_passed, k) / math.comb(num_samples, k)


def _measured(groups: Sequence[Group], reward: str) -> dict[str, float]:
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    marks = [[score.parts[reward] for score in group.scores if score.error is None] for group in groups]
    num_scored = sum(map(len, marks))
    size = len(groups[0].rollouts)
    metrics = {
        "accuracy": statistics.fmean(statistics.fmean(mine) for mine in marks if mine),
        "reward_errors": 1 - num_scored / len(rollouts),
        "length_mean": statistics.fmean(rollout.num_sampled for rollout in rollouts),
        "truncated": sum(rollout.finish_reason == "length" for rollout in rollouts) / len(rollouts),
    }
    for k in (2**i for i in range(size.bit_length())):
        enough = [mine for mine in marks if len(mine) >= k]
        if enough:
            passed = [sum(mark >= PASSED for mark in mine) for mine in enough]
            chances = [pass_at_k(len(mine), count, k) for mine, count in zip(enough, passed, strict=True)]
            metrics[f"pass@{k}"] = statistics.fmean(chances)
    return metrics
