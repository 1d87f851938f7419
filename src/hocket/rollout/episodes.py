"""All episodes of a step at once, within a bound on their tokens; one that fails ends alone.

Knows nothing of rewards: it gives each rollout as soon as its episode is over, with what went wrong in it.
"""

import contextlib
import dataclasses
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any

from hocket import tokenizer as tokenizers
from hocket.config import Config
from hocket.data import Renderer
from hocket.envs import Agent, Environment
from hocket.envs.base import bind
from hocket.errors import ServerError
from hocket.protocol import Toolbox
from hocket.rollout.agents import Agents
from hocket.rollout.budget import Budget
from hocket.rollout.coalescer import Coalescer, Generator
from hocket.rollout.episode import Episode, EpisodeError, Limits
from hocket.rollout.played import Played, Player, Wave
from hocket.system import as_completed


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Episodes:
    """How the episodes of a run are played.

    Attributes:
        make: gives every episode an environment of its own.
        renderer: of the data that the prompts are from.
        toolbox: of the environments.
        max_in_flight_tokens: of all unfinished episodes, with the turn that each is about to take; None: what the
            servers' KV caches hold.
        budget: of all batches that are played at the same time.
    """

    make: Callable[[], Environment]
    renderer: Renderer
    limits: Limits
    toolbox: Toolbox | None = None
    max_in_flight_tokens: int | None = None
    budget: Budget = dataclasses.field(default_factory=Budget)

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        """The functions that prompts show to the model."""
        return self.renderer.tools

    async def play(self, wave: Wave, server: Generator) -> AsyncGenerator[Played, None]:
        """Yields every episode as it ends. One that is not over when its time is, has failed.

        Raises:
            ServerError: the model could not be asked.
        """
        budget = self.budget
        budget.limit = lambda: self.max_in_flight_tokens or server.kv_tokens
        async with Coalescer(server, timeout_s=wave.timeout_s, tools=self.toolbox) as coalescer:

            async def one(i: int, j: int) -> Played:
                held = len(wave.prompts[i].token_ids) + wave.sampling.max_tokens
                await budget.start(held)

                def grown(length: int) -> None:
                    nonlocal held
                    budget.change(length - held)
                    held = length

                episode = Episode(
                    wave.prompts[i],
                    self.make,
                    ask=coalescer.ask,
                    renderer=self.renderer,
                    sampling=wave.sampling,
                    number=wave.number(i, j),
                    limits=self.limits,
                )
                error = None
                try:
                    await episode.play(grown)
                except EpisodeError as failed:
                    error = f"environment: {failed}"
                except ServerError as failed:
                    if not coalescer.late:
                        raise
                    error = f"the episode was not over within {wave.timeout_s:g} s (rollout.timeout_s): {failed}"
                finally:
                    budget.change(-held)
                return Played(prompt=i, sample=j, rollout=episode.transcript.rollout(wave.name(i, j), error))

            episodes = as_completed([one(i, j) for i, j in wave.pairs])
            async with contextlib.aclosing(episodes) as ended:
                async for played in ended:
                    yield played


def episodes_of(config: Config, tokenizer: Any) -> Player | None:
    """Returns how a run's episodes are played; None where the model answers once.

    Raises:
        ConfigError: there is no such environment, or its options are wrong.
    """
    make = bind(config.env.name, config.env.model_extra or {})
    if config.env.name == "single_turn":
        return None
    limits = Limits(
        max_turns=config.env.max_turns,
        max_length=tokenizers.longest_sequence(config.model, config.trainer),
        timeout_s=config.env.timeout_s,
    )
    made = make()
    if isinstance(made, Agent):
        return Agents(made, limits=limits, decode=tokenizer.decode)
    toolbox = made.toolbox
    return Episodes(
        make=make,
        renderer=Renderer(config.data, tokenizer, () if toolbox is None else toolbox.tools),
        limits=limits,
        toolbox=toolbox,
    )
