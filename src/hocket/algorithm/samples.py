"""From scored groups to what is trained on: advantages attached, rollouts without signal left out."""

import math
from collections.abc import Sequence

from hocket.algorithm.advantages import group_advantages, zero_variance_groups
from hocket.config import AlgorithmConfig
from hocket.types import Group, TrainSample


def train_samples(groups: Sequence[Group], config: AlgorithmConfig) -> tuple[list[TrainSample], dict[str, float]]:
    """Returns one sample per rollout that carries signal, and the share of groups that carry none.

    Rollouts without a score are left out of the group's mean and deviation and of the samples. Groups whose scores
    are all alike are left out of the loss's numerator and denominator: they would only shrink the others' gradient.
    """
    rollouts = [(index, rollout) for index, group in enumerate(groups) for rollout in group.rollouts]
    rewards = [score.total if score.error is None else math.nan for group in groups for score in group.scores]
    group_ids = [index for index, _ in rollouts]
    advantages = group_advantages(rewards, group_ids, scale=config.scale).tolist()
    silent = zero_variance_groups(rewards, group_ids).tolist()
    samples = [
        TrainSample(
            token_ids=rollout.token_ids,
            mask=rollout.mask,
            rollout_logprobs=rollout.logprobs,
            advantage=advantage,
            version_min=rollout.version_min,
            id=rollout.id,
        )
        for (_, rollout), reward, advantage, no_signal in zip(rollouts, rewards, advantages, silent, strict=True)
        if not no_signal and not math.isnan(reward)
    ]
    num_silent = len({index for index, no_signal in zip(group_ids, silent, strict=True) if no_signal})
    return samples, {"rollout/zero_variance": num_silent / len(groups)}
