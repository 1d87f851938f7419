"""Groups with scores, and what an algorithm makes of them: what the tests of algorithms have in common."""

import math
from array import array
from collections.abc import Mapping, Sequence

from hocket import config
from hocket.algorithm.samples import shape, train_samples
from hocket.config import AlgorithmConfig
from hocket.types import Columns, FinishReason, Group, Prompt, Rollout, Score, TokenSequence, TrainSample, TurnReward

MAX_TOKENS = 10
NORMALISED = 3e-6
"""How far, relatively, advantages are from x / deviation: a deviation, .5 or more, has 1e-6 added; float32 has 6e-8."""


def algorithm(*overrides: str) -> AlgorithmConfig:
    """Returns the section algorithm, beside a reward of the environment, which credit per turn needs."""
    rewards = "rewards.functions={env: 1, other: 1}"
    return config.load(None, [rewards, *(f"algorithm.{override}" for override in overrides)]).algorithm


DEFAULT = algorithm()


def make_rollout(
    *logprobs: float | None, name: str = "a", finish_reason: FinishReason = "stop", first: int = 10
) -> Rollout:
    """A prompt of two tokens, then one per log-prob; None is a token that the policy did not sample."""
    sequence = TokenSequence(
        token_ids=array("I", (1, 2, *(first + i for i in range(len(logprobs))))),
        mask=(False, False, *(logprob is not None for logprob in logprobs)),
        logprobs=(0.0, 0.0, *(logprob or 0.0 for logprob in logprobs)),
        finish_reason=finish_reason,
    )
    return Rollout(id=name, prompt=Prompt(id=name, token_ids=array("I", (1, 2))), sequences=(sequence,))


def taken(*turns: TurnReward, finish_reason: FinishReason = "stop") -> TokenSequence:
    """A prompt of one token, then each turn's tokens and one of the environment."""
    mask = (False, *(flag for turn in turns for flag in (*[True] * turn.tokens, False)))
    return TokenSequence(
        token_ids=array("I", (1,)) * len(mask),
        mask=mask,
        logprobs=(0.0,) * len(mask),
        finish_reason=finish_reason,
        turn_rewards=turns,
    )


def episode(*sequences: TokenSequence) -> Rollout:
    return Rollout(id="a", prompt=Prompt(id="p", token_ids=array("I", (1,))), sequences=sequences)


def score(reward: float | Mapping[str, float] | None) -> Score:
    """Of one number, of parts whose sum it is, or of what failed."""
    if reward is None:
        return Score(total=math.nan, error="broke")
    if isinstance(reward, Mapping):
        return Score(total=sum(reward.values()), parts=reward)
    return Score(total=reward)


def group_of(*rollouts: Rollout, rewards: Sequence[float | Mapping[str, float] | None], name: str = "g") -> Group:
    return Group(id=name, rollouts=rollouts, scores=tuple(map(score, rewards)))


def sampled(
    groups: Sequence[Group],
    algorithm: AlgorithmConfig = DEFAULT,
    measured: Sequence[Columns] = (),
    kl_coef: float = 0.0,
    env_weight: float = 1.0,
) -> tuple[list[TrainSample], dict[str, float]]:
    """Returns the samples of all groups, and metrics."""
    shaped = [shape(group, algorithm, MAX_TOKENS, env_weight) for group in groups]
    return train_samples(shaped, measured, algorithm, kl_coef)
