"""An agent as OpenRLHF's README describes it: it checks an answer, and asks again where that is wrong."""

from typing import Any

import torch
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

TRIES = 3
AGAIN = "\n<|im_start|>user\nThat is wrong. Look for the mistake, and answer again.<|im_end|>\n<|im_start|>assistant\n"


class AgentInstance(AgentInstanceBase):
    async def __init__(self, *args, **kwargs):
        self.tries = 0

    async def reset(self, states: dict, **kwargs):
        return {"observation": states["observation"]}

    async def step(self, states: dict, **kwargs) -> dict[str, Any]:
        self.tries += 1
        is_right = states["label"] in states["action_text"]
        return {
            "rewards": torch.tensor(1 / self.tries if is_right else 0.0),
            "scores": torch.tensor(float(is_right)),
            "environment_feedback": "" if is_right else AGAIN,
            "done": is_right or self.tries == TRIES,
            "sampling_params": states.get("sampling_params"),
            "extra_logs": {"tries": torch.tensor(self.tries)},
        }


class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
