"""Play the episodes of a run within a bound on their tokens; an episode that fails ends alone."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from hocket.batcher import Batcher
from hocket.config import DataConfig, EnvConfig
from hocket.data import Renderer
from hocket.envs import Agent, Environment, SingleTurn
from hocket.errors import ServerError
from hocket.pool import ServerPool
from hocket.rollout.agents import Agents
from hocket.rollout.budget import TokenBudget, most_tokens
from hocket.rollout.collect import Play, Seat
from hocket.rollout.episode import Ask, Episode, EpisodeError, Limits, Transcript, one_turn
from hocket.system import seed_of
from hocket.types import Prompt, Rollout


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Episodes:
    """Plays episodes of an environment, those of all batches under way in one budget."""

    make: Callable[[], Environment]  # gives every episode an environment of its own
    renderer: Renderer  # of the data that the prompts are from
    limits: Limits
    ask: Ask
    budget: TokenBudget = dataclasses.field(default_factory=TokenBudget)

    async def play(self, prompt: Prompt, seat: Seat) -> Rollout:
        """Play one episode; one that fails, or is not over at its deadline, has an error. Raise only ServerError."""
        error = None
        held = most_tokens(prompt, seat.sampling)

        def grown(tokens: int) -> None:
            nonlocal held
            self.budget.change(tokens - held)
            held = tokens

        await self.budget.start(held)
        try:
            episode = Episode(prompt, seat, self.make, ask=self.ask, renderer=self.renderer, limits=self.limits)
            await episode.play(grown)
        except EpisodeError as failed:
            error = f"environment: {failed}"
        except ServerError as failed:
            error = late(failed, seat)
        finally:
            grown(0)
        return episode.rollout(error)


async def single_turn(prompt: Prompt, seat: Seat, *, ask: Ask) -> Rollout:
    """Play what Episodes plays with SingleTurn, at a third of its cost. The prompt must leave room for the turn."""
    error = None
    try:
        completion = await ask(
            prompt.token_ids,
            seat.sampling,
            seed=seed_of(seat.sampling.seed, seat.number, 1),
            deadline=seat.deadline,
            group=seat.group,
            place=f"{seat.id} (prompt {prompt.id})",
        )
    except ServerError as failed:
        error, sequence = late(failed, seat), Transcript(prompt).sequence()
    else:
        sequence = one_turn(prompt, completion)
    return Rollout(id=seat.id, prompt=prompt, sequences=(sequence,), error=error)


def late(failed: ServerError, seat: Seat) -> str:
    """Return the error of an episode that its deadline ended; raise any other failure of the servers."""
    if not seat.deadline.over:
        raise failed
    return f"the episode was not over within {seat.deadline.seconds:g} s (rollout.timeout_s): {failed}"


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
    budget = TokenBudget(lambda: pool.kv_tokens)
    if isinstance(made, Agent):
        return Agents(made, pool, limits=limits, decode=tokenizer.decode, budget=budget).play
    tools = made.toolbox.tools if made.toolbox else ()
    return Episodes(
        make=make,
        renderer=Renderer(data, tokenizer, tools),
        limits=limits,
        ask=ask,
        budget=budget,
    ).play
