"""The ways to play episodes, one of which `Environment.player` takes."""

import dataclasses
from collections.abc import Callable, Sequence

from hocket.client.pool import ServerPool
from hocket.data.renderer import Renderer
from hocket.envs.agents import Agent
from hocket.envs.base import Environment
from hocket.errors import ConfigError
from hocket.rollout.agents import Agents
from hocket.rollout.collect import Play
from hocket.rollout.episode import Ask, Episode, Limits, TokenBudget


@dataclasses.dataclass(frozen=True, kw_only=True)
class Players:
    """Plays turns with an environment, or agents."""

    pool: ServerPool
    ask: Ask
    make: Callable[[], Environment]
    renderer: Renderer  # of the prompts' data
    decode: Callable[[Sequence[int]], str]
    limits: Limits

    def single_turns(self) -> Play:
        return self.episodes(TokenBudget())  # the engine queues them itself

    def episodes(self, budget: TokenBudget | None = None) -> Play:
        budget = budget or self._budget()
        return lambda prompt, seat: Episode(
            prompt, seat, self.make, self.ask, self.renderer, self.limits, budget
        ).play()

    def agents(self, agent: Agent) -> Play:
        if self.limits.history is not None:
            raise ConfigError("env.history: an agent shortens its chat itself; leave it out")
        budget = self._budget()
        return Agents(agent=agent, pool=self.pool, limits=self.limits, decode=self.decode, budget=budget).play

    def _budget(self) -> TokenBudget:
        return TokenBudget(lambda: sum(member.kv_tokens for member in self.pool.members))
