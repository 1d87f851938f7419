"""Roll out episodes of agents that were written for OpenRLHF: files with a class AgentInstance, or
with a function `step`."""

import importlib.util
import inspect
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy

from hocket.common.registry import load_plugin, stand_in
from hocket.envs.base import Action, Environment, Observation, Step, environment, invoke
from hocket.types import Prompt

BASES = "openrlhf.utils.agent"


class Base:
    """Stands for the class of OpenRLHF that agents inherit from: it takes the prompt as it is."""

    async def reset(self, states: dict[str, Any], **_: Any) -> dict[str, Any]:
        return states


@stand_in("openrlhf")
def provide_bases() -> None:
    """Let files import OpenRLHF's base classes where it is not installed."""
    if BASES not in sys.modules and importlib.util.find_spec("openrlhf") is None:
        made = ModuleType(BASES)
        made.__dict__.update(
            AgentInstanceBase=Base, MultiTurnAgentExecutor=Base, AgentExecutorBase=Base
        )
        sys.modules[BASES] = made


@environment("step")
class StepFile(Environment):
    """Gives each episode an AgentInstance of its own; for a lone `step`, which keeps its state in
    globals, a module of its own."""

    def __init__(self, path: str) -> None:
        self._module: Any = load_plugin(path)
        if not {"AgentInstance", "step"} & vars(self._module).keys():
            advice = "code that asks a server by itself is an agent: env={name: agent, ...}"
            raise ValueError(
                f"{path} has neither a class AgentInstance nor a function step; {advice}"
            )

    async def reset(self, prompt: Prompt, seed: int) -> Observation | None:
        self._label = prompt.answer
        self._text = self.decode(prompt.token_ids)
        if not hasattr(self._module, "AgentInstance"):
            self._call = _function(self._module)
            return None
        agent = object.__new__(self._module.AgentInstance)
        begun = agent.__init__()
        if inspect.isawaitable(begun):  # an actor of Ray may have it so
            await begun
        self._call = partial(invoke, agent.step)
        states = await invoke(agent.reset, {"observation": self._text, "label": self._label})
        return Observation(text=self._added(states["observation"]))

    async def step(self, action: Action) -> Step:
        states = {
            "observation_text": self._text,
            "action_text": action.text,
            "label": self._label,
            "sampling_params": SimpleNamespace(stop=None, max_tokens=None),
        }
        result = await self._call(states)
        logs = {"scores": result.get("scores")} | dict(result.get("extra_logs") or {})
        self.metrics = {
            f"env/{name}": _number(value)
            for name, value in logs.items()
            if numpy.asarray(value).dtype.kind in "biuf"
        }
        reward = _number(result["rewards"])
        if result["done"]:
            return Step(reward=reward, done=True)
        if result.get("environment_images"):
            raise ValueError("environment_images can't be shown: answer with text alone")
        self._text += action.text
        whole = result.get("next_observation", result.get("next_state"))  # as older files have it
        if whole is None:
            whole = self._text + result["environment_feedback"]
        stop = getattr(result.get("sampling_params"), "stop", None)
        stops = (stop,) if isinstance(stop, str) else stop
        return Step(text=self._added(whole), reward=reward, stop=tuple(stops) if stops else None)

    def _added(self, whole: str) -> str:
        """Return what follows the text so far in `whole`. Raise ValueError if that differs."""
        before = self._text
        if not whole.startswith(before):
            raise ValueError(
                f"a text must go on from the one before, {before[-40:]!r} at its end: what it "
                "should begin with instead belongs into the data, or into data.system_prompt"
            )
        self._text = whole
        return whole.removeprefix(before)


def _function(module: Any) -> Callable[[dict[str, Any]], Awaitable[Any]]:
    """Return `step` of another copy of this module, which has globals of its own."""
    copy: Any = importlib.util.module_from_spec(module.__spec__)
    module.__spec__.loader.exec_module(copy)

    def call(states: dict[str, Any]) -> Awaitable[Any]:
        *arguments, sampling_params = states.values()
        return invoke(copy.step, *arguments, sampling_params=sampling_params)

    return call


def _number(value: Any) -> float:
    """Convert a number, or an array or tensor with a single number."""
    return float(numpy.asarray(value).item())
