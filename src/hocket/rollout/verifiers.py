"""Play and score episodes with an environment of the package verifiers, which asks as an agent does (docs/hubs.md)."""

import functools
from typing import Annotated, Any

from pydantic import Field

from hocket.data.verifiers import made
from hocket.envs.agents import Agent, Task
from hocket.envs.base import environment


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
            raise ValueError(f"the rubric of {env} compares the rollouts of a group: have it score each by itself")
        self._play = self._rollout

    async def _rollout(self, task: Task) -> float:
        from verifiers.clients import OpenAIChatCompletionsClient

        asked = _client().with_options(base_url=task.base_url, api_key=task.api_key)
        row = {"example_id": 0, "answer": task.answer or "", **task.meta.get("verifiers", {})}
        row["prompt"] = [*task.messages]
        output = await self._env.run_rollout(row, OpenAIChatCompletionsClient(asked), task.model, {})
        if output["error"]:
            raise RuntimeError(output["error"])
        return float(output["reward"])


@functools.cache
def _client() -> Any:
    import openai

    return openai.AsyncOpenAI(base_url="http://127.0.0.1", api_key="none")  # whose connections all episodes share
