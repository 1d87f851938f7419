"""Score rollouts: call every configured reward with a deadline. An error is never counted as a number.

Plain functions are called in worker processes (worker.py), because a thread that hangs can't be ended.
"""

import asyncio
import itertools
import math
import os
import pickle
import sys
import threading
from collections.abc import Awaitable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from hocket.config import RewardsConfig
from hocket.errors import ConfigError, RewardError
from hocket.registry import PLUGIN_PREFIX
from hocket.rewards.base import Reward, as_score, bind, call, failure, no_score
from hocket.rewards.worker import Worker
from hocket.types import Group, Rollout, Score

MAX_WORKERS = 4
START_TIMEOUT_S = 120.0


class RewardScorer:
    """The rewards of one config section; a context manager, because it may own up to MAX_WORKERS processes."""

    def __init__(self, config: RewardsConfig) -> None:
        self._timeout_s = config.timeout_s
        self._rewards = [bind(name, spec.weight, spec.model_extra or {}) for name, spec in config.functions.items()]
        in_workers = [reward for reward in self._rewards if reward.runs == "worker"]
        self._modules = dict.fromkeys(module for one in in_workers for module in (*one.imports, _module_of(one)))
        # Each asks one worker. Never shut down: a worker dies with the thread that started it.
        self._threads = ThreadPoolExecutor(min(MAX_WORKERS, os.cpu_count() or 1), "reward")
        self._workers: dict[int, Worker] = {}  # by thread
        self._printed = itertools.count(1)  # lines, by all of them
        self._unusable: str | None = None  # why no worker can be started any more

    def __enter__(self) -> "RewardScorer":
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Kill all workers; callers of busy ones get an error. May be called from any thread."""
        self._unusable = "the rewards are closed"
        for worker in list(self._workers.values()):
            worker.kill()

    async def score(self, rollout: Rollout) -> Score:
        """Return the weighted sum of the rewards and their unweighted parts; an error if one of them fails."""
        if rollout.error is not None:
            return no_score(rollout.error)
        if len(self._rewards) == 1:  # a task for each of thousands of short calls would cost more than the calls
            results = [await self._call(self._rewards[0], rollout)]
        else:
            results = await asyncio.gather(*(self._call(reward, rollout) for reward in self._rewards))
        total, parts, errors = 0.0, {}, []
        for reward, result in zip(self._rewards, results, strict=True):
            if result.error is not None:
                errors.append(f"{reward.name}: {result.error}")
                continue
            total += reward.weight * result.total
            parts[reward.name] = result.total
            parts |= {f"{reward.name}/{part}": value for part, value in result.parts.items()}
        if not math.isfinite(total):
            errors.append(f"the weighted sum is {total}")
        return no_score("; ".join(errors), parts) if errors else Score(total=total, parts=parts)

    async def _call(self, reward: Reward, rollout: Rollout) -> Score:
        arguments = reward.arguments(rollout)
        if reward.runs == "inline":
            return call(reward.function, arguments)
        try:
            if reward.runs == "worker":  # a cancelled call goes on there, up to the deadline
                request, loop = pickle.dumps((reward.name, arguments)), asyncio.get_running_loop()
                return await loop.run_in_executor(self._threads, self._ask_worker, request)
            return await self._in_time(reward.function(**arguments))
        except Exception as error:  # noqa: BLE001 - whatever a reward raises is the rollout's error
            return failure(error)

    async def _in_time(self, coroutine: Awaitable[Any]) -> Score:
        """Return the coroutine's score; one that is late or no longer wanted is cancelled but not waited for."""
        task = asyncio.ensure_future(_result(coroutine))
        try:
            await asyncio.wait({task}, timeout=self._timeout_s)
            if task.cancelled():
                return no_score("it cancelled itself")
            return task.result() if task.done() else no_score(f"no result within {self._timeout_s:g} s")
        finally:
            task.cancel()

    def _ask_worker(self, request: bytes) -> Score:
        """Ask this thread's worker, which is started first if there is none or if it was lost."""
        thread = threading.get_ident()
        worker = self._workers.get(thread)
        if self._unusable is None and (worker is None or not worker.ready()):
            worker = self._workers[thread] = Worker(self._modules, self._printed)
            if problem := worker.ask(b"", START_TIMEOUT_S).error:  # nor can the next one load it
                self._unusable = self._unusable or f"its worker process can't load it: {problem}"
            if self._unusable is not None:  # or the rewards were closed meanwhile
                worker.kill()
        if worker is None or self._unusable is not None:
            return no_score(self._unusable or "")
        return worker.ask(request, self._timeout_s)


async def _result(coroutine: Awaitable[Any]) -> Score:
    try:
        return as_score(await coroutine)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a reward raises is the rollout's error
        return failure(error)


def _module_of(reward: Reward) -> str:
    """Return the module or file that a worker loads to find the reward."""
    module, name = reward.function.__module__, reward.function.__qualname__
    if module == "__main__" or "<locals>" in name:
        raise ConfigError(
            f"reward {reward.name!r} runs in a worker process, which can't reach {module}.{name}; define it at the top "
            f"level of a Python file named under plugins:, or register it with inline=True"
        )
    return str(sys.modules[module].__file__) if module.startswith(PLUGIN_PREFIX) else module


def refuse_failing(groups: Sequence[Group], max_error_rate: float) -> None:
    """Raise RewardError if more than this share of the scores failed: training on the rest would mislead."""
    errors = [score.error for group in groups for score in group.scores if score.error is not None]
    num_scores = sum(len(group.scores) for group in groups)
    if len(errors) > max_error_rate * num_scores:
        raise RewardError(
            f"{len(errors)} of {num_scores} scores failed, more than rewards.max_error_rate={max_error_rate:g}; "
            f"the first: {errors[0]}"
        )
