"""Roll out and score episodes with an environment of the package verifiers, which sends requests as
an agent does (docs/how-to/hubs.md)."""

import functools
import inspect
from collections.abc import Callable
from contextvars import ContextVar
from typing import Annotated, Any

from pydantic import Field

from hocket.envs.base import environment
from hocket.extras.agents.agent import Agent
from hocket.extras.agents.task import Task
from hocket.extras.verifiers.rows import loaded

_FAILURES = ContextVar[list[str]]("failures")
"""Failures of the reward functions of the rollout that is scored. A rubric only logs a failure, and
counts 0 for it."""
_noting = set[Callable[..., Any]]()
"""Reward functions that note their failures already: all runs of a process share an environment."""


@environment("verifiers")
class Verifiers(Agent):
    """The rubric's score of a rollout is the reward."""

    def __init__(
        self,
        env: str,
        args: dict[str, Any] = {},  # noqa: B006 - only read; arguments of its load_environment
        concurrency: Annotated[int, Field(ge=1)] = 64,
    ) -> None:
        self.concurrency = concurrency
        self._env = loaded(env, args)
        if self._env.requires_group_rollouts:
            advice = "have it score each by itself"
            raise ValueError(f"the rubric of {env} compares the rollouts of a group: {advice}")
        for rubric in getattr(self._env.rubric, "rubrics", [self._env.rubric]):
            functions = []
            for function, weight in zip(rubric.funcs, rubric.weights, strict=True):
                # A function of weight 0 is only logged, and may fail.
                functions.append(_noting_failures(function) if weight else function)
            rubric.funcs = functions
        self._play = self._rollout

    async def _rollout(self, task: Task) -> float:
        from verifiers.clients import OpenAIChatCompletionsClient

        session = _client().with_options(base_url=task.base_url, api_key=task.api_key)
        client = OpenAIChatCompletionsClient(session)
        row: dict[str, Any] = {"example_id": 0, "answer": task.answer or ""}
        row.update(task.meta.get("verifiers", {}))
        row["prompt"] = list(task.messages)
        failures = list[str]()
        _FAILURES.set(failures)
        output = await self._env.run_rollout(row, client, task.model, {})
        if output["error"]:
            raise RuntimeError(output["error"])
        if failures:
            raise RuntimeError(f"its rubric has no score: {failures[0]}")
        return float(output["reward"])


def _noting_failures(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a reward function so that it notes its failures, once."""
    if function in _noting:
        return function

    @functools.wraps(function)
    async def called(*arguments: Any, **named: Any) -> float:
        try:
            returned = function(*arguments, **named)
            if inspect.isawaitable(returned):
                returned = await returned
            return float(returned)
        except Exception as error:
            _FAILURES.get().append(f"{called.__name__} raised {type(error).__name__}: {error}")
            raise

    _noting.add(called)
    return called


@functools.cache
def _client() -> Any:
    """Make the client whose connections all episodes share; each sets its own URL and key."""
    import openai

    return openai.AsyncOpenAI(base_url="http://127.0.0.1", api_key="none")
