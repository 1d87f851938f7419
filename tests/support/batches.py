"""What the tests of rollouts have in common."""

import contextlib
import math
from array import array
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from hocket.algorithm.losses import LossBatch, LossOutput, policy_loss
from hocket.client.pool import Deadline
from hocket.config import RewardsConfig
from hocket.config.algorithm import PRESETS, LossConfig, PresetName
from hocket.protocol import SamplingParams
from hocket.rewards import RewardCalls, RewardScorer
from hocket.rollout.collect import Batch, Plan, Play, collect
from hocket.types import FinishReason, Prompt, Rollout, Score, TokenSequence

SAMPLING = SamplingParams(max_tokens=8, seed=77)


def preset_loss(name: PresetName, **changes: Any) -> LossConfig:
    """Returns the loss of a published algorithm, with changes."""
    row = {key: value for key, value in PRESETS[name].knobs.items() if key in LossConfig.model_fields}
    return LossConfig(**row | changes)


def loss_of(
    logprobs: torch.Tensor,
    rollout: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    config: LossConfig,
    num_tokens: int,
    num_sequences: int = 1,
    entropy: torch.Tensor | None = None,
    sample: torch.Tensor | None = None,
    **columns: torch.Tensor | None,
) -> LossOutput:
    """Returns the loss of rows that are a sequence each, and have no entropy, if nothing else is said."""
    rows = torch.arange(len(logprobs))[:, None].expand_as(logprobs)
    batch = LossBatch(
        rollout_logprobs_bt=rollout,
        advantages_bt=advantages,
        columns={name: column for name, column in columns.items() if column is not None},
        mask_bt=mask,
        sample_bt=rows if sample is None else sample,
        num_tokens_global=num_tokens,
        num_sequences_global=num_sequences,
    )
    return policy_loss(logprobs, torch.zeros_like(logprobs) if entropy is None else entropy, batch, config)


def drawing(prompts: Sequence[Prompt]) -> Callable[[int], Mapping[int, Prompt]]:
    """Gives each prompt once, in their order."""
    left = dict(enumerate(prompts))
    return lambda count: {number: left.pop(number) for number in list(left)[:count]}


@contextlib.contextmanager
def scorer_of_all(config: RewardsConfig) -> Iterator[RewardScorer]:
    """Gives the scorer of all rewards of a section."""
    with RewardCalls(config, config.functions) as calls:
        yield RewardScorer(calls, config.functions)


def scoring(score: Callable[[Rollout], Awaitable[Score]]) -> Any:
    """Returns a scorer of one function, whose groups need nothing more."""

    async def ask(rollout: Rollout) -> Mapping[str, Score]:
        return {"one": await score(rollout)}

    async def settle(rollouts: Sequence[Rollout], given: Sequence[Mapping[str, Score]]) -> tuple[Score, ...]:
        return tuple(one["one"] for one in given)

    return SimpleNamespace(ask=ask, settle=settle)


async def gathered(
    prompts: Sequence[Prompt],
    play: Play,
    score: Callable[[Rollout], Awaitable[Score]],
    *,
    group_size: int = 1,
    timeout_s: float = 60.0,
) -> Batch:
    """Collects one batch of all prompts."""
    plan = Plan(
        label="s",
        sampling=SAMPLING,
        group_size=group_size,
        wanted=len(prompts),
        at_most=len(prompts),
        deadline=Deadline(timeout_s),
    )
    return await collect(plan, drawing(prompts), play, scoring(score))


async def own_reward(rollout: Rollout) -> Score:
    """Gives the episode's own reward; 1 where it has none."""
    if rollout.error is not None:
        return Score(total=math.nan, error=rollout.error)
    return Score(total=1.0 if rollout.reward is None else rollout.reward)


def played(
    prompt: Prompt, id: str, text: str = "", *, sampled: int = 1, version: int = 0, finish: FinishReason = "stop"
) -> Rollout:
    """Returns the rollout of a single turn with so many tokens."""
    told = len(prompt.token_ids)
    sequence = TokenSequence(
        token_ids=array("I", (*prompt.token_ids, *range(5, 5 + sampled))),
        mask=(False,) * told + (True,) * sampled,
        logprobs=(0.0,) * told + tuple(-(i + 1) / 10 for i in range(sampled)),
        finish_reason=finish,
        version_min=version,
        version_max=version,
        text=text,
    )
    return Rollout(id=id, prompt=prompt, sequences=(sequence,))


def ids(batch: Batch) -> list[str]:
    """Returns the id of each group's prompt."""
    return [group.rollouts[0].prompt.id for group in batch.groups]
