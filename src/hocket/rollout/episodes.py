"""Choose how a run's episodes are played: single turns, turns with an environment, or agents."""

import functools
from collections.abc import Callable
from typing import Any

from hocket.batcher import Batcher
from hocket.config import DataConfig, EnvConfig
from hocket.data import Renderer
from hocket.envs import Agent, Environment, SingleTurn
from hocket.pool import ServerPool
from hocket.rollout.agents import Agents
from hocket.rollout.collect import Play
from hocket.rollout.episode import Episode, Limits, TokenBudget, single_turn


def player(
    make: Callable[[], Environment],  # as `envs.base.bind` gives it
    pool: ServerPool,
    tokenizer: Any,
    *,
    env: EnvConfig,
    data: DataConfig,
    max_length: int,  # tokens of a sequence that can be trained
) -> Play:
    """Return how the episodes of a run are played on the servers of a pool."""
    made = make()
    ask = Batcher(pool, tools=made.toolbox).ask
    if type(made) is SingleTurn:  # prompts leave room for rollout.max_tokens, and the engine queues the turns itself
        return functools.partial(single_turn, ask=ask)
    limits = Limits(max_turns=env.max_turns, max_length=max_length, timeout_s=env.timeout_s)
    budget = TokenBudget(lambda: sum(member.kv_tokens for member in pool.members))
    if isinstance(made, Agent):
        return Agents(agent=made, pool=pool, limits=limits, decode=tokenizer.decode, budget=budget).play
    renderer = Renderer(data, tokenizer, made.toolbox.tools if made.toolbox else ())
    return lambda prompt, seat: Episode(prompt, seat, make, ask, renderer, limits, budget).play()
