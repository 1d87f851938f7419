"""Prompts in, scored groups out: plays the episodes of a step against the server.

Each rollout is scored as soon as its episode is over, while the others are still being played; each group leaves as
soon as its last score is there. Knows nothing of losses, trainers or files.
"""

import asyncio
import contextlib
import functools
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from typing import Protocol

from hocket.config import RolloutConfig
from hocket.errors import ServerError
from hocket.protocol import Completion, SamplingParams
from hocket.rollout.coalescer import Generator
from hocket.rollout.episode import Transcript
from hocket.rollout.played import Played, Player, Wave
from hocket.system import seed_of
from hocket.types import Group, Prompt, Rollout, Score


class Scorer(Protocol):
    """What a rollout needs of the rewards: hocket.rewards.RewardScorer is one."""

    async def score(self, rollout: Rollout) -> Score:
        """Returns the score; a failure is a Score with an error, never an exception."""


def sampling_params(config: RolloutConfig, *, seed: int, step: int, temperature: float | None = None) -> SamplingParams:
    """Returns the sampling parameters of one step; (seed, step) alone decide the engine's random numbers."""
    return SamplingParams(
        temperature=config.temperature if temperature is None else temperature,
        max_tokens=config.max_tokens,
        stop=config.stop,
        stop_token_ids=config.stop_token_ids,
        seed=seed_of(seed, step),
    )


def to_rollout(prompt: Prompt, completion: Completion, name: str) -> Rollout:
    """Returns the episode of one turn: the prompt's tokens, then the sampled ones, exactly as the engine gave them."""
    transcript = Transcript(prompt)
    transcript.sampled(completion)
    return transcript.rollout(name)


async def play(
    wave: Wave,
    *,
    server: Generator,
    scorer: Scorer,
    on_generated: Callable[[], None] = lambda: None,
    episodes: Player | None = None,
) -> AsyncIterator[Group]:
    """Yields one Group per prompt, each as soon as it is complete.

    Args:
        on_generated: called when the last completion is there, and only scores are missing.
        episodes: how they are played; None: in a single turn.

    Raises:
        ServerError: generation failed before its time was over; neither environments nor scoring raise.
    """
    scored: list[list[tuple[int, Rollout, asyncio.Task[Score]]]] = [[] for _ in wave.prompts]
    pending: set[asyncio.Task[Group]] = set()
    scoring: set[asyncio.Task[Score]] = set()
    try:
        source = (_single_turns if episodes is None else episodes.play)(wave, server)
        async with contextlib.aclosing(source) as ended:
            async for played in ended:
                i, rollout = played.prompt, played.rollout
                task = asyncio.create_task(_score(scorer, rollout))
                scoring.add(task)
                scored[i].append((played.sample, rollout, task))
                if len(scored[i]) == wave.group_size:
                    pending.add(asyncio.create_task(_group(wave.group_id(i), scored[i])))
                for done in [group for group in pending if group.done()]:
                    pending.remove(done)
                    yield done.result()
        on_generated()
        for group in asyncio.as_completed(pending):
            yield await group
    finally:
        for unfinished in (*pending, *scoring):
            unfinished.cancel()


async def _single_turns(wave: Wave, server: Generator) -> AsyncGenerator[Played, None]:
    """Yields what `Episodes.play` would of episodes of one turn, which are asked for together."""
    end = time.monotonic() + wave.timeout_s
    left = dict.fromkeys(wave.pairs)
    prompts = [prompt.token_ids for prompt in wave.prompts]
    seed = functools.partial(seed_of, wave.sampling.seed)  # (number, turn), as in episodes of several turns
    seeds = [[seed(wave.number(i, j), 1) for j in range(wave.group_size)] for i in range(len(prompts))]
    try:
        async for i, j, completion in server.generate(
            prompts, wave.sampling, n=wave.group_size, timeout_s=wave.timeout_s, seeds=seeds
        ):
            del left[i, j]
            yield Played(prompt=i, sample=j, rollout=to_rollout(wave.prompts[i], completion, wave.name(i, j)))
    except ServerError as late:
        if time.monotonic() < end:
            raise
        error = f"it was not sampled within {wave.timeout_s:g} s (rollout.timeout_s): {late}"
        for i, j in left:
            yield Played(prompt=i, sample=j, rollout=Transcript(wave.prompts[i]).rollout(wave.name(i, j), error))


async def _score(scorer: Scorer, rollout: Rollout) -> Score:
    if rollout.error is not None:
        return Score(total=math.nan, error=rollout.error)
    return await scorer.score(rollout)


def in_order(groups: Sequence[Group]) -> list[Group]:
    """Returns the groups of one `play` in the order of their prompts: a run must not depend on who was first."""
    return sorted(groups, key=lambda group: int(group.id.rpartition("/")[2]))


async def _group(group_id: str, scored: list[tuple[int, Rollout, "asyncio.Task[Score]"]]) -> Group:
    scored = sorted(scored, key=lambda item: item[0])
    scores = [await task for _, _, task in scored]
    return Group(id=group_id, rollouts=tuple(rollout for _, rollout, _ in scored), scores=tuple(scores))
