"""Environments answer the model between its turns, and decide when an episode is over."""

import importlib
from typing import Any

from hocket.common.registry import is_there
from hocket.envs.base import Action, Environment, Observation, Step, environment, history

# Names that plugins import from here, and the modules that have them. Such a module is imported
# when its name is first used.
EXTRAS = {
    "Agent": "hocket.extras.agents.agent",
    "Task": "hocket.extras.agents.task",
    "agent": "hocket.extras.agents.agent",
    "tool": "hocket.extras.tools.tools",
}

__all__ = ["Action", "Environment", "Observation", "Step", "environment", "history"]
__all__ += [name for name, module in EXTRAS.items() if is_there(module)]


def __getattr__(name: str) -> Any:
    if name not in EXTRAS or not is_there(EXTRAS[name]):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(EXTRAS[name]), name)
