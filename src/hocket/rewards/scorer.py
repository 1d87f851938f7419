"""Scores rollouts: every configured reward on each, with a deadline, and an error never counted as a number."""

import asyncio
import math
import os
from collections.abc import Sequence
from typing import Any

from hocket.config import RewardsConfig
from hocket.errors import RewardError
from hocket.rewards.base import BoundReward, Outcome, bind, failure, outcome
from hocket.rewards.worker import WorkerPool, module_of
from hocket.types import Group, Rollout, Score

MAX_WORKERS = 4


class RewardScorer:
    """The rewards of one config section. Use it as a context manager, or `close` it: it may own processes.

    Args:
        config: names, weights and options of the rewards, and the deadline of one call.

    Raises:
        ConfigError: a reward is unknown, its options don't fit its function, or it needs a missing package.
    """

    def __init__(self, config: RewardsConfig) -> None:
        self._timeout_s = config.timeout_s
        self._rewards = [bind(name, spec.weight, spec.model_extra or {}) for name, spec in config.functions.items()]
        in_workers = [bound.reward for bound in self._rewards if bound.reward.runs == "worker"]
        modules = [package for reward in in_workers for package in (*reward.imports, module_of(reward))]
        self._workers = WorkerPool(dict.fromkeys(modules), min(MAX_WORKERS, os.cpu_count() or 1))
        self._abandoned: set[asyncio.Task[Any]] = set()

    def __enter__(self) -> "RewardScorer":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the worker processes, busy ones too."""
        self._workers.close()

    async def score(self, rollout: Rollout) -> Score:
        """Returns the weighted sum of the rewards, with each one's unweighted value among the parts.

        Where a reward has parts of its own they are there as "reward/part". Where a reward fails there is no total:
        `error` names each that did and why, `total` is nan. Never raises for what a reward does.
        """
        total, parts, errors = 0.0, {}, []
        for bound, result in zip(self._rewards, await self._outcomes(rollout), strict=True):
            name = bound.reward.name
            if result.error is not None:
                errors.append(f"{name}: {result.error}")
                continue
            total += bound.weight * result.value
            parts[name] = result.value
            parts |= {f"{name}/{part}": value for part, value in result.parts.items()}
        if errors:
            return Score(total=math.nan, parts=parts, error="; ".join(errors))
        return Score(total=total, parts=parts)

    async def _outcomes(self, rollout: Rollout) -> list[Outcome]:
        if len(self._rewards) == 1:  # a task for each of thousands of short calls would cost more than the calls
            return [await self._call(self._rewards[0], rollout)]
        return await asyncio.gather(*(self._call(bound, rollout) for bound in self._rewards))

    async def _call(self, bound: BoundReward, rollout: Rollout) -> Outcome:
        arguments = bound.arguments(rollout)
        if bound.reward.runs == "async":
            return await self._call_async(bound, arguments)
        if bound.reward.runs == "worker":
            return await self._workers.call(bound.reward.name, arguments, self._timeout_s)
        try:
            return outcome(bound.reward.function(**arguments))
        except Exception as error:  # noqa: BLE001 - whatever a reward raises is the rollout's error
            return failure(error)

    async def _call_async(self, bound: BoundReward, arguments: dict[str, Any]) -> Outcome:
        task = asyncio.ensure_future(bound.reward.function(**arguments))
        try:
            await asyncio.wait({task}, timeout=self._timeout_s)
            if not task.done():
                return Outcome(error=f"no result within {self._timeout_s:g} s")
            return outcome(task.result())
        except Exception as error:  # noqa: BLE001 - whatever a reward raises is the rollout's error
            return failure(error)
        finally:
            if not task.done():  # late, or this rollout is not wanted any more; it may not heed the cancellation
                task.cancel()
                self._abandoned.add(task)
                task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._abandoned.discard(task)
        if not task.cancelled():
            task.exception()  # asyncio logs an exception that nobody has looked at


def refuse_failing(groups: Sequence[Group], max_error_rate: float) -> None:
    """Raise RewardError if more than this share of the scores failed: training on the rest would mislead."""
    errors = [score.error for group in groups for score in group.scores if score.error is not None]
    num_scores = sum(len(group.scores) for group in groups)
    if len(errors) > max_error_rate * num_scores:
        raise RewardError(
            f"{len(errors)} of {num_scores} scores failed, more than rewards.max_error_rate={max_error_rate:g}; "
            f"the first: {errors[0]}"
        )
