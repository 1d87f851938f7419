"""Held-out accuracy: one episode per prompt, with the same random numbers every time."""

import statistics
from collections.abc import Sequence

from hocket.config import Config, RewardsConfig, RewardSpec
from hocket.rollout.coalescer import Generator
from hocket.rollout.collect import Scorer, in_order, play, refuse_failing, sampling_params
from hocket.rollout.episodes import Episodes
from hocket.types import Group, Prompt

EVAL_STEP = -1
"""Takes the place of the step in the sampling seed: no training step has it."""


def rewards_of_eval(config: Config) -> RewardsConfig:
    """Returns a rewards section with `eval.reward` alone, its options as in rewards.functions where it is there too."""
    functions = config.rewards.functions
    name = config.eval.reward or next(iter(functions))
    return config.rewards.model_copy(update={"functions": {name: functions.get(name, RewardSpec(weight=1.0))}})


async def evaluate(
    prompts: Sequence[Prompt],
    *,
    server: Generator,
    scorer: Scorer,
    config: Config,
    label: str,
    episodes: Episodes | None = None,
) -> tuple[dict[str, float], list[Group]]:
    """Returns the eval/* metrics and the groups, in the prompts' order.

    Args:
        scorer: scores by `rewards_of_eval`.
        episodes: as for training.

    Raises:
        RewardError: more than rewards.max_error_rate of the completions, or all, could not be scored.
    """
    sampling = sampling_params(
        config.rollout, seed=config.trainer.seed, step=EVAL_STEP, temperature=config.eval.temperature
    )
    groups = [
        group
        async for group in play(
            prompts,
            server=server,
            scorer=scorer,
            sampling=sampling,
            group_size=1,
            label=label,
            timeout_s=config.rollout.timeout_s,
            episodes=episodes,
        )
    ]
    groups = in_order(groups)
    rollouts = [group.rollouts[0] for group in groups]
    scores = [group.scores[0] for group in groups]
    refuse_failing(groups, min(config.rewards.max_error_rate, 1 - 1 / len(groups)))  # one score at least
    (name,) = rewards_of_eval(config).functions
    correct = [score.parts[name] for score in scores if score.error is None]
    metrics = {
        "eval/accuracy": statistics.fmean(correct),
        "eval/reward_errors": 1 - len(correct) / len(scores),
        "eval/length_mean": statistics.fmean(rollout.num_sampled for rollout in rollouts),
        "eval/truncated": sum(rollout.finish_reason == "length" for rollout in rollouts) / len(rollouts),
    }
    return metrics, groups
