"""Score rollouts by their rewards.

An error of a reward becomes the error of its rollout's score; it never counts as a zero.
"""

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from hocket.errors import RewardError, program
from hocket.rewards.base import RetryError, bind
from hocket.rewards.runners import Call, Inline, InLoop, Runner, clock
from hocket.rewards.scores import LateError, NoScoreError, compose, failure, no_score
from hocket.rewards.workers import Workers
from hocket.types import Group, Rollout, Score

if TYPE_CHECKING:
    from hocket.config import RewardsConfig  # its import would take most of a worker's start

logger = logging.getLogger("hocket")

PATIENCE_S = 10.0  # seconds without the end of a call until a warning says so
# Numbers of late calls in a row that end the run: at a reward's start, and after a call in time.
FIRST_LATE = 8
MOST_LATE = 32


class Scorer(Protocol):
    """Scores the rollouts of a group: each when its episode ends, then all of them together."""

    async def ask(self, rollout: Rollout) -> Mapping[str, Score]:
        """Call the rewards that score a single rollout. Returns their scores by name."""

    async def settle(
        self, rollouts: Sequence[Rollout], values: Sequence[Mapping[str, Score]]
    ) -> tuple[Score, ...]:
        """Score a complete group. `values` holds the result of `ask` for each rollout."""


class RewardScorer:
    """Scores rollouts by some of the rewards of a config.

    It raises nothing but RewardError, which ends the run.

        with RewardCalls(config.rewards, names) as calls:
            scores = await RewardScorer(calls, names).score_group(rollouts)
    """

    def __init__(self, calls: "RewardCalls", names: Iterable[str]) -> None:
        self._calls = calls
        self._specs = {name: calls.specs[name] for name in names}

    async def score(self, rollout: Rollout) -> Score:
        """Score a rollout as a group of its own."""
        (score,) = await self.score_group([rollout])
        return score

    async def score_group(self, rollouts: Sequence[Rollout]) -> tuple[Score, ...]:
        """Score the rollouts of a group. Returns a score for each."""
        values = await asyncio.gather(*map(self.ask, rollouts))
        return await self.settle(rollouts, values)

    async def ask(self, rollout: Rollout) -> dict[str, Score]:
        """Call the rewards that score a single rollout. Returns {} where its episode failed."""
        if rollout.error is not None:
            return {}
        results = await self._call_rewards([rollout], of_group=False)
        return {name: score for name, (score,) in results.items()}

    async def settle(
        self, rollouts: Sequence[Rollout], values: Sequence[Mapping[str, Score]]
    ) -> tuple[Score, ...]:
        """Call the rewards that score a group, and combine all rewards of each rollout."""
        scores = [no_score(rollout.error) for rollout in rollouts]
        played = [i for i, rollout in enumerate(rollouts) if rollout.error is None]
        if not played:
            return tuple(scores)
        # Rollouts whose episodes failed are left out: no reward compares others with them.
        results = {}
        for name in values[played[0]]:
            results[name] = [values[i][name] for i in played]
        results |= await self._call_rewards([rollouts[i] for i in played], of_group=True)
        for i, score in zip(played, compose(self._specs, results), strict=True):
            scores[i] = score
        return tuple(scores)

    async def _call_rewards(
        self, rollouts: Sequence[Rollout], *, of_group: bool
    ) -> dict[str, list[Score]]:
        """Call at once those rewards that score groups, or those that score single rollouts."""
        rewards = self._calls.rewards
        names = [name for name in self._specs if rewards[name].of_group == of_group]
        if len(names) == 1:
            # A task for each of thousands of short calls would cost more than the calls.
            return {names[0]: await self._calls.ask(names[0], rollouts)}
        results = await asyncio.gather(*(self._calls.ask(name, rollouts) for name in names))
        return dict(zip(names, results, strict=True))


class RewardCalls:
    """Calls rewards, each where it runs: in this thread, in the event loop or in a worker process.

    As a context manager it kills the worker processes at its end.
    """

    def __init__(self, config: "RewardsConfig", names: Iterable[str]) -> None:
        self.specs = {name: config.spec(name) for name in names}
        self.rewards = {name: bind(name, spec) for name, spec in self.specs.items()}
        # Durations of each reward's last calls, without the time that they waited for other calls.
        self.seconds = {name: clock() for name in self.specs}
        self._timeout_s = config.timeout_s
        self._may_fail = config.max_error_rate == 1
        # Late calls in a row, by reward: MOST_LATE end the run. Until a call was in time, FIRST_LATE
        # suffice, as the count begins so high.
        self._late = dict.fromkeys(self.specs, MOST_LATE - FIRST_LATE)
        # When a call of the reward last ended, or a warning said that none does.
        self._quiet_since = dict.fromkeys(self.specs, 0.0)
        for_workers = [reward for reward in self.rewards.values() if reward.runs == "worker"]
        self._runners: dict[str, Runner] = {"inline": Inline(), "worker": Workers(for_workers)}
        self._in_loop = dict[tuple[asyncio.AbstractEventLoop, str], InLoop]()

    def __enter__(self) -> "RewardCalls":
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Kill all workers, from any thread; callers of busy ones get an error."""
        for runner in self._runners.values():
            runner.close()

    async def set_up(self) -> None:
        """Set async rewards up in this event loop. Raises RewardError for one that can't be."""
        for name in self.rewards:
            try:
                await self._runner(name).set_up()
            except NoScoreError as error:
                raise RewardError(f"reward {name!r} {error}") from error

    async def ask(self, name: str, rollouts: Sequence[Rollout]) -> list[Score]:
        """Call a reward for a group, or for a single rollout. Returns a score for each rollout.

        Raises RewardError if the reward raised it, or if its calls are late one after another.
        """
        reward = self.rewards[name]
        loop = asyncio.get_running_loop()
        warning = loop.call_later(PATIENCE_S, self._warn_if_silent, name)
        num_late = 0
        try:
            arguments = reward.arguments(rollouts)
            call = Call(reward, arguments, len(rollouts), self._timeout_s, self.seconds[name])
            return await self._runner(name).call(call)
        except RewardError:
            raise
        except (Exception, SystemExit) as error:
            if isinstance(error, LateError | RetryError):
                num_late = self._late[name] + 1
            if num_late == MOST_LATE and not self._may_fail:
                raise RewardError(
                    f"reward {name!r} gives no results, call after call: {error}; mend it, "
                    "raise its timeout_s, or go on without its scores by rewards.max_error_rate=1"
                ) from error
            # Whatever a reward raises is the rollout's error.
            return [failure(error)] * len(rollouts)
        finally:
            warning.cancel()
            self._late[name] = num_late
            self._quiet_since[name] = time.monotonic()

    def _warn_if_silent(self, name: str) -> None:
        """Warn that no call of a reward ends, once for all calls that wait meanwhile."""
        now = time.monotonic()
        if now - self._quiet_since[name] >= PATIENCE_S:
            self._quiet_since[name] = now
            text = "reward %r: no call has ended for %g s; its deadline is its timeout_s"
            logger.warning(text, name, PATIENCE_S)

    def _runner(self, name: str) -> Runner:
        """Choose where to call a reward; an async one has a runner in each event loop."""
        reward = self.rewards[name]
        if reward.runs != "async":
            return self._runners[reward.runs]
        key = asyncio.get_running_loop(), name
        if key not in self._in_loop:
            self._in_loop[key] = InLoop(reward, self.seconds)
        return self._in_loop[key]


def refuse_failing(groups: Sequence[Group], max_error_rate: float) -> None:
    """Raise RewardError if more than this share of the scores failed.

    The scores that are left would mislead: what fails is rarely a fair sample.
    """
    num_scores = 0
    errors = []
    for group in groups:
        for rollout, score in zip(group.rollouts, group.scores, strict=True):
            num_scores += 1
            if score.error is not None:
                errors.append(f"{rollout.id}: {score.error}")
    if len(errors) > max_error_rate * num_scores:
        raise RewardError(
            f"{len(errors)} of {num_scores} scores failed, more than "
            f"rewards.max_error_rate={max_error_rate:g}; the first: {errors[0]}; "
            f"rewards can be tried: {program()} reward-test CONFIG --samples RUN/rollouts/FILE"
        )
