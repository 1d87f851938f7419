"""Play agents that were written for OpenRLHF: files with a class AgentInstance, or with a function
`step`."""

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
    """An agent that begins with the prompt as it is: the class of OpenRLHF that files inherit
    from."""

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
    """An episode has its own AgentInstance, or, as a lone `step` keeps its state in globals, its
    own module."""

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
            self._ask = _function(self._module)
            return None
        agent = object.__new__(self._module.AgentInstance)
        begun = agent.__init__()
        if inspect.isawaitable(begun):  # an actor of Ray may have it so
            await begun
        self._ask = partial(invoke, agent.step)
        given = await invoke(agent.reset, {"observation": self._text, "label": self._label})
        return Observation(text=self._added(given["observation"]))

    async def step(self, action: Action) -> Step:
        said = {"observation_text": self._text, "action_text": action.text, "label": self._label}
        told = await self._ask(
            {**said, "sampling_params": SimpleNamespace(stop=None, max_tokens=None)}
        )
        logs = {"scores": told.get("scores"), **(told.get("extra_logs") or {})}
        self.metrics = {
            f"env/{name}": _number(value)
            for name, value in logs.items()
            if numpy.asarray(value).dtype.kind in "biuf"
        }
        reward = _number(told["rewards"])
        if told["done"]:
            return Step(reward=reward, done=True)
        if told.get("environment_images"):
            raise ValueError("environment_images can't be shown: answer with text alone")
        self._text += action.text
        whole = told.get("next_observation", told.get("next_state"))  # as older files have it
        if whole is None:
            whole = self._text + told["environment_feedback"]
        stop = getattr(told.get("sampling_params"), "stop", None)
        stops = (stop,) if isinstance(stop, str) else stop
        return Step(text=self._added(whole), reward=reward, stop=tuple(stops) if stops else None)

    def _added(self, whole: str) -> str:
        """Return what a text adds to the one before."""
        before = self._text
        if not whole.startswith(before):
            advice = "what it should begin with instead belongs into the data, or into data.system_prompt"
            raise ValueError(
                f"a text must go on from the one before, {before[-40:]!r} at its end: {advice}"
            )
        self._text = whole
        return whole.removeprefix(before)


def _function(module: Any) -> Callable[[dict[str, Any]], Awaitable[Any]]:
    """Return `step` of a module like this one, with globals of its own."""
    own: Any = importlib.util.module_from_spec(module.__spec__)
    module.__spec__.loader.exec_module(own)

    def ask(states: dict[str, Any]) -> Awaitable[Any]:
        *given, sampling_params = states.values()
        return invoke(own.step, *given, sampling_params=sampling_params)

    return ask


def _number(value: Any) -> float:
    """Return a number, or that in an array or tensor of one."""
    return float(numpy.asarray(value).item())
