"""Play episodes with the environment of an OpenEnv server, through its client (docs/hubs.md)."""

import json
from collections.abc import Mapping
from typing import Any

from hocket.common.registry import need
from hocket.envs.base import Action, Environment, Observation, Step, environment
from hocket.types import Prompt

MAX_SEED = (1 << 31) - 1


@environment("openenv")
class OpenEnv(Environment):
    """A session of a server: what the model writes is the field `action` of an action, or all of it
    as JSON.

    `observation`: the field that the model reads; without one it reads all of them as JSON.
    """

    def __init__(
        self, url: str, action: str | None = "message", observation: str | None = None
    ) -> None:
        need("env openenv", "openenv")
        self._url = url
        self._action = action
        self._observation = observation
        self._client: Any = None
        self.gives_reward = False  # until the server does

    async def reset(self, prompt: Prompt, seed: int) -> Observation | None:
        """Begin a session; a row's column `reset` has further arguments of the server's reset."""
        from openenv.core.generic_client import GenericEnvClient

        self._client = GenericEnvClient(base_url=self._url)
        await self._client.connect()
        result = await self._client.reset(
            **{"seed": seed & MAX_SEED, **prompt.meta.get("reset", {})}
        )
        said = self._said(result.observation)
        return Observation(messages=[{"role": "user", "content": said}]) if said else None

    async def step(self, action: Action) -> Step:
        try:
            done = (
                dict(json.loads(action.text))
                if self._action is None
                else {self._action: action.text}
            )
        except (ValueError, TypeError) as error:
            return Step(
                messages=[
                    {"role": "user", "content": f"error: the action is no JSON object: {error}"}
                ]
            )
        result = await self._client.step(done)
        self.gives_reward |= result.reward is not None
        reward = float(result.reward or 0.0)
        if result.done:
            return Step(reward=reward, done=True)
        return Step(
            reward=reward, messages=[{"role": "user", "content": self._said(result.observation)}]
        )

    async def truncated(self) -> float:
        self.gives_reward = True  # a server may give all of it at the end
        return 0.0

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()

    def _said(self, observation: Mapping[str, Any]) -> str:
        if self._observation is None:
            return json.dumps(observation, ensure_ascii=False)
        if self._observation not in observation:
            known = ", ".join(observation)
            raise ValueError(
                f"the observation has no field {self._observation!r}, only {known}: set env.observation"
            )
        return str(observation[self._observation])
