"""Play episodes of an environment: in turns with it, or as an agent that asks by itself."""

from collections.abc import Awaitable, Callable
from functools import partial

from hocket.client.pool import ServerPool
from hocket.data.renderer import Renderer
from hocket.envs import Environment
from hocket.envs.base import SingleTurn
from hocket.rollout.collect import Play, Seat
from hocket.rollout.episode import Ask, Episode, Limits, TokenBudget
from hocket.rollout.single_turn import play_single_turn
from hocket.types import Prompt, Rollout


def player(make: Callable[[], Environment], pool: ServerPool, ask: Ask, renderer: Renderer, limits: Limits) -> Play:
    """Return what plays episodes of the environment that `make` makes; `renderer`: of the prompts' data."""
    example = make()
    if type(example) is SingleTurn and not example.thinking_tokens:  # a subclass has a step of its own
        return partial(play_single_turn, ask=ask, limits=limits, placeholder=renderer.placeholder)
    budget = TokenBudget(lambda: sum(member.kv_tokens for member in pool.members))
    whole = example.player(pool=pool, limits=limits, decode=renderer.decode, budget=budget)
    if whole is not None:
        return whole

    def play(prompt: Prompt, seat: Seat) -> Awaitable[Rollout]:
        return Episode(prompt, seat, make, ask, renderer, limits, budget).play()

    return play
