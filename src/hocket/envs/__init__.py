"""Environments: what answers the model between its turns and says when an episode is over, found by name."""

from hocket.envs import guess, single_turn, tools  # registers the environments that ship with hocket
from hocket.envs.base import Action, Environment, Observation, Step, environment
from hocket.envs.tools import tool

__all__ = ["Action", "Environment", "Observation", "Step", "environment", "guess", "single_turn", "tool", "tools"]
