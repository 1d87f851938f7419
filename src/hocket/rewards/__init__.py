"""Rewards score finished rollouts.

A reward is a function or a class. It names as parameters only those arguments that it uses.
"""

from hocket.rewards import builtin  # registers the rewards that need nothing more
from hocket.rewards.base import RetryError, reward
from hocket.rewards.scorer import RewardCalls, RewardScorer

__all__ = ["RetryError", "RewardCalls", "RewardScorer", "builtin", "reward"]
