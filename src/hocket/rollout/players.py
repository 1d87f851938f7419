"""Play episodes of an environment: in turns with it, or as an agent that asks by itself."""

from collections.abc import Awaitable, Callable

from hocket.client.pool import ServerPool
from hocket.data.renderer import Renderer
from hocket.envs import Environment
from hocket.rollout.collect import Play, Seat
from hocket.rollout.episode import Ask, Episode, Limits, TokenBudget
from hocket.types import Prompt, Rollout


def player(make: Callable[[], Environment], pool: ServerPool, ask: Ask, renderer: Renderer, limits: Limits) -> Play:
    """Return what plays episodes of the environment that `make` makes; `renderer`: of the prompts' data."""
    example = make()
    budget = TokenBudget(lambda: sum(member.kv_tokens for member in pool.members) * example.takes_turns)
    whole = example.player(pool=pool, limits=limits, decode=renderer.decode, budget=budget)
    if whole is not None:
        return whole

    def play(prompt: Prompt, seat: Seat) -> Awaitable[Rollout]:
        return Episode(prompt, seat, make, ask, renderer, limits, budget).play()

    return play
