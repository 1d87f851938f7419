"""Rewards: functions that score a finished rollout; each names only the arguments that it uses."""

from hocket.rewards import builtin  # registers the rewards that ship with hocket
from hocket.rewards.base import reward
from hocket.rewards.scorer import RewardScorer

__all__ = ["RewardScorer", "builtin", "reward"]
