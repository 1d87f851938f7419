"""Play episodes of an environment: in turns with it, or as an agent that asks by itself."""

from collections.abc import Callable

from hocket.client.pool import ServerPool
from hocket.data.renderer import Renderer
from hocket.envs import Environment
from hocket.envs.agents import Agent
from hocket.errors import ConfigError
from hocket.rollout.agents import Agents
from hocket.rollout.collect import Play
from hocket.rollout.episode import Ask, Episode, Limits, TokenBudget


def player(make: Callable[[], Environment], pool: ServerPool, ask: Ask, renderer: Renderer, limits: Limits) -> Play:
    """Return what plays episodes of the environment that `make` makes; `renderer`: of the prompts' data."""
    example = make()
    budget = TokenBudget(lambda: sum(member.kv_tokens for member in pool.members) * example.takes_turns)
    if isinstance(example, Agent):
        if limits.history is not None:
            raise ConfigError("env.history: an agent shortens its chat itself; leave it out")
        return Agents(agent=example, pool=pool, limits=limits, decode=renderer.decode, budget=budget).play
    return lambda prompt, seat: Episode(prompt, seat, make, ask, renderer, limits, budget).play()
