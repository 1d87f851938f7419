"""Prompts in, scored groups out: plays the episodes of a step against the server.

Each completion is scored as soon as it arrives, while the others are still being generated; each group leaves as soon
as its last score is there. Knows nothing of losses, trainers or files.
"""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol

from hocket.config import RolloutConfig
from hocket.errors import RewardError, ServerError
from hocket.types import Completion, Group, Prompt, Rollout, SamplingParams, Score


class Generator(Protocol):
    """What a rollout needs of a server: hocket.client.ServerClient is one."""

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams, *, n: int = 1, timeout_s: float
    ) -> AsyncIterator[tuple[int, int, Completion]]:
        """Yields (prompt index, sample index, completion) in any order."""


class Scorer(Protocol):
    """What a rollout needs of the rewards: hocket.rewards.RewardScorer is one."""

    async def score(self, rollout: Rollout) -> Score:
        """Returns the score; a failure is a Score with an error, never an exception."""


def sampling_params(config: RolloutConfig, *, seed: int, step: int, temperature: float | None = None) -> SamplingParams:
    """Returns the sampling parameters of one step; (seed, step) alone decide the engine's random numbers."""
    digest = hashlib.sha256(f"{seed}:{step}".encode()).digest()
    return SamplingParams(
        temperature=config.temperature if temperature is None else temperature,
        max_tokens=config.max_tokens,
        stop=config.stop,
        stop_token_ids=config.stop_token_ids,
        seed=int.from_bytes(digest[:6], "big"),
    )


def to_rollout(prompt: Prompt, completion: Completion, *, group_id: str, index: int) -> Rollout:
    """Returns the single-turn episode: the prompt's tokens, then the sampled ones, exactly as the engine gave them."""
    num_prompt = len(prompt.token_ids)
    versions = [version for version, _, _ in completion.versions]
    if not completion.token_ids or not versions:
        raise ServerError(
            f"the server returned a completion without tokens or versions for prompt {prompt.id}", code="protocol"
        )
    return Rollout(
        id=f"{group_id}/{index}",
        group_id=group_id,
        prompt=prompt,
        token_ids=prompt.token_ids + completion.token_ids,
        mask=(False,) * num_prompt + (True,) * len(completion.token_ids),
        logprobs=(0.0,) * num_prompt + completion.logprobs,
        finish_reason=completion.finish_reason,
        version_min=min(versions),
        version_max=max(versions),
        text=completion.text,
    )


async def play(
    prompts: Sequence[Prompt],
    *,
    server: Generator,
    scorer: Scorer,
    sampling: SamplingParams,
    group_size: int,
    label: str,
    timeout_s: float,
    on_generated: Callable[[], None] = lambda: None,
) -> AsyncIterator[Group]:
    """Yields one Group per prompt, each as soon as it is complete.

    Args:
        group_size: episodes per prompt.
        label: makes ids unique within a run, e.g. "step 3" gives groups "step 3/0", "step 3/1", ...
        timeout_s: deadline for the generation of all of them.
        on_generated: called when the last completion is there, and only scores are missing.

    Raises:
        ServerError: generation failed; scoring never raises.
    """
    scored: list[list[tuple[int, Rollout, asyncio.Task[Score]]]] = [[] for _ in prompts]
    pending: set[asyncio.Task[Group]] = set()
    scoring: set[asyncio.Task[Score]] = set()
    try:
        answers = server.generate([p.token_ids for p in prompts], sampling, n=group_size, timeout_s=timeout_s)
        async for i, j, completion in answers:
            rollout = to_rollout(prompts[i], completion, group_id=f"{label}/{i}", index=j)
            task = asyncio.create_task(scorer.score(rollout))
            scoring.add(task)
            scored[i].append((j, rollout, task))
            if len(scored[i]) == group_size:
                pending.add(asyncio.create_task(_group(f"{label}/{i}", scored[i])))
            for done in [group for group in pending if group.done()]:
                pending.remove(done)
                yield done.result()
        on_generated()
        for group in asyncio.as_completed(pending):
            yield await group
    finally:
        for unfinished in (*pending, *scoring):
            unfinished.cancel()


def in_order(groups: Sequence[Group]) -> list[Group]:
    """Returns the groups of one `play` in the order of their prompts: a run must not depend on who was first."""
    return sorted(groups, key=lambda group: int(group.id.rpartition("/")[2]))


def refuse_failing(groups: Sequence[Group], max_error_rate: float) -> None:
    """Raises RewardError where more than this share of the scores failed; training on the rest would mislead."""
    errors = [score.error for group in groups for score in group.scores if score.error is not None]
    num_scores = sum(len(group.scores) for group in groups)
    if len(errors) > max_error_rate * num_scores:
        raise RewardError(
            f"{len(errors)} of {num_scores} scores failed, more than rewards.max_error_rate={max_error_rate:g}; "
            f"the first: {errors[0]}"
        )


async def _group(group_id: str, scored: list[tuple[int, Rollout, "asyncio.Task[Score]"]]) -> Group:
    scored = sorted(scored, key=lambda item: item[0])
    scores = [await task for _, _, task in scored]
    return Group(id=group_id, rollouts=tuple(rollout for _, rollout, _ in scored), scores=tuple(scores))
