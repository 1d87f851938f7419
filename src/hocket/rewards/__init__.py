"""Rewards: functions and classes that score finished rollouts; each names only the arguments that it uses."""

from hocket.rewards import builtin  # registers the rewards that need nothing more
from hocket.rewards.base import RetryError, reward
from hocket.rewards.scorer import RewardCalls, RewardScorer

__all__ = ["RetryError", "RewardCalls", "RewardScorer", "builtin", "reward"]
