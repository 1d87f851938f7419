"""Play and score episodes with an environment of the package verifiers, which asks as an agent does
(docs/hubs.md)."""

import functools
import inspect
from collections.abc import Callable
from contextvars import ContextVar
from typing import Annotated, Any

from pydantic import Field

from hocket.envs.base import environment
from hocket.extras.agents.agent import Agent
from hocket.extras.agents.task import Task
from hocket.extras.verifiers.rows import made

_FAILURES = ContextVar[list[str]]("failures")
"""Of the reward functions of the rollout that is scored: a rubric logs them, and counts 0."""
_TELLING = set[
    Callable[..., Any]
]()  # reward functions that note them; all runs of a process share an environment


@environment("verifiers")
class Verifiers(Agent):
    """The rubric's score of a rollout is the reward."""

    def __init__(
        self,
        env: str,
        args: dict[str, Any] = {},  # noqa: B006 - only read; of its load_environment
        concurrency: Annotated[int, Field(ge=1)] = 64,
    ) -> None:
        self.concurrency = concurrency
        self._env = made(env, args)
        if self._env.requires_group_rollouts:
            raise ValueError(
                f"the rubric of {env} compares the rollouts of a group: have it score each by itself"
            )
        for rubric in getattr(self._env.rubric, "rubrics", [self._env.rubric]):
            weighed = zip(rubric.funcs, rubric.weights, strict=True)
            rubric.funcs = [
                _telling(function) if weight else function for function, weight in weighed
            ]
        self._play = self._rollout

    async def _rollout(self, task: Task) -> float:
        from verifiers.clients import OpenAIChatCompletionsClient

        asked = _client().with_options(base_url=task.base_url, api_key=task.api_key)
        row = {"example_id": 0, "answer": task.answer or "", **task.meta.get("verifiers", {})}
        row["prompt"] = [*task.messages]
        failures = list[str]()
        _FAILURES.set(failures)
        output = await self._env.run_rollout(
            row, OpenAIChatCompletionsClient(asked), task.model, {}
        )
        if output["error"]:
            raise RuntimeError(output["error"])
        if failures:
            raise RuntimeError(f"its rubric has no score: {failures[0]}")
        return float(output["reward"])


def _telling(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a reward function that notes its failures, too."""
    if function in _TELLING:
        return function

    @functools.wraps(function)
    async def called(*arguments: Any, **named: Any) -> float:
        try:
            returned = function(*arguments, **named)
            return float(await returned if inspect.isawaitable(returned) else returned)
        except Exception as error:
            _FAILURES.get().append(f"{called.__name__} raised {type(error).__name__}: {error}")
            raise

    _TELLING.add(called)
    return called


@functools.cache
def _client() -> Any:
    import openai

    return openai.AsyncOpenAI(
        base_url="http://127.0.0.1", api_key="none"
    )  # whose connections all episodes share
