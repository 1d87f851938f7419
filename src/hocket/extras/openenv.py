"""Roll out episodes with the environment of an OpenEnv server (docs/how-to/hubs.md)."""

import json
from collections.abc import Mapping
from typing import Any

from hocket.common.registry import need
from hocket.envs.base import Action, Environment, Observation, Step, environment
from hocket.types import Prompt

MAX_SEED = (1 << 31) - 1


@environment("openenv")
class OpenEnv(Environment):
    """A session of a server.

    The model writes the field `action` of an action; if that is None, the whole action as JSON.
    It reads the field `observation` of an observation; if that is None, all fields as JSON.
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
        arguments = {"seed": seed & MAX_SEED} | prompt.meta.get("reset", {})
        result = await self._client.reset(**arguments)
        text = self._shown(result.observation)
        return Observation(messages=[{"role": "user", "content": text}]) if text else None

    async def step(self, action: Action) -> Step:
        try:
            if self._action is None:
                fields = dict(json.loads(action.text))
            else:
                fields = {self._action: action.text}
        except (ValueError, TypeError) as error:
            text = f"error: the action is no JSON object: {error}"
            return Step(messages=[{"role": "user", "content": text}])
        result = await self._client.step(fields)
        self.gives_reward |= result.reward is not None
        reward = float(result.reward or 0.0)
        if result.done:
            return Step(reward=reward, done=True)
        text = self._shown(result.observation)
        return Step(reward=reward, messages=[{"role": "user", "content": text}])

    async def truncated(self) -> float:
        self.gives_reward = True  # a server may give all of it at the end
        return 0.0

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()

    def _shown(self, observation: Mapping[str, Any]) -> str:
        """Write an observation as the model reads it. Raise ValueError if the field is missing."""
        if self._observation is None:
            return json.dumps(observation, ensure_ascii=False)
        if self._observation not in observation:
            known = ", ".join(observation)
            raise ValueError(
                f"the observation has no field {self._observation!r}, only {known}: set "
                "env.observation"
            )
        return str(observation[self._observation])
