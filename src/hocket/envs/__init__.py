"""Environments: what answers the model between its turns and says when an episode is over, found by name."""

from hocket.envs import guess as guess  # registers the environment
from hocket.envs.agents import Agent, Task, agent
from hocket.envs.base import Action, Environment, Observation, SingleTurn, Step, environment
from hocket.envs.tools import tool

__all__ = [
    "Action",
    "Agent",
    "Environment",
    "Observation",
    "SingleTurn",
    "Step",
    "Task",
    "agent",
    "environment",
    "tool",
]
