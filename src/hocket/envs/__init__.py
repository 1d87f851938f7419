"""Environments: what answers the model between its turns and says when an episode is over, found by name."""

from hocket.envs.agents import Agent, Task, agent
from hocket.envs.base import Action, Environment, Observation, Step, environment, history
from hocket.envs.tools import tool

__all__ = ["Action", "Agent", "Environment", "Observation", "Step", "Task", "agent", "environment", "history", "tool"]
