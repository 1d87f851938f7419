"""Stand in for the classes of OpenRLHF that its users' files inherit from, where that is not installed."""

import importlib.util
import sys
from types import ModuleType
from typing import Any

BASES = "openrlhf.utils.agent"


class Base:
    """An agent that begins with the prompt as it is."""

    async def reset(self, states: dict[str, Any], **_: Any) -> dict[str, Any]:
        return states


def stand_in() -> None:
    """Let files import these classes."""
    if BASES not in sys.modules and importlib.util.find_spec("openrlhf") is None:
        made = ModuleType(BASES)
        made.__dict__.update(AgentInstanceBase=Base, MultiTurnAgentExecutor=Base, AgentExecutorBase=Base)
        sys.modules[BASES] = made
