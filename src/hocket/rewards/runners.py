"""Call rewards in this thread, or in the event loop."""

import asyncio
import math
import random
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple, TypeVar

from hocket.common.tasks import retrieve
from hocket.rewards.base import RetryError, Reward
from hocket.rewards.scores import LateError, NoScoreError, as_scores, failure
from hocket.types import Score

T = TypeVar("T")

START_TIMEOUT_S = 120.0  # of a worker process, and of the set-up of an async class
BACK_OFF_S, MAX_BACK_OFF_S = 1.0, 300.0  # before the first retry, at most before any
_JITTER = random.Random()  # leaves the run's random numbers alone


class Call(NamedTuple):
    reward: Reward
    arguments: Mapping[str, Any]
    size: int  # scores that it gives
    timeout_s: float
    seconds: deque[float]  # of the reward's last calls


class Runner:
    """Calls rewards in one place."""

    async def set_up(self) -> None:
        """Wait until calls can be made. Raise NoScoreError where none can."""

    async def call(self, call: Call) -> list[Score]:
        """Return the scores of a call, or raise its error."""
        raise NotImplementedError

    def close(self) -> None:
        """Leave nothing behind; may be called from any thread."""


class Inline(Runner):
    """Calls plain rewards in this thread; sets a class up before its first call."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._functions = dict[str, Callable[..., Any]]()

    async def call(self, call: Call) -> list[Score]:
        with clocked(call.seconds):
            returned = self.now(call.reward, call.arguments)
        return as_scores(returned, call.size, call.reward.of_group)

    def now(self, reward: Reward, arguments: Mapping[str, Any]) -> Any:
        if reward.name not in self._functions:
            made: Any = reward.made()
            if hasattr(made, "__enter__"):
                made = self._stack.enter_context(made)
            self._functions[reward.name] = made
        return self._functions[reward.name](**arguments)

    def close(self) -> None:
        self._stack.close()


class InLoop(Runner):
    """Calls an async reward in one event loop; the instance of a class lives until that ends."""

    def __init__(self, reward: Reward, seconds: dict[str, deque[float]]) -> None:
        self._start_timeout_s = None if reward.own_deadline else START_TIMEOUT_S
        self._slots = asyncio.Semaphore(reward.max_concurrent or sys.maxsize)
        self._made: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._seconds = clock()
        self._held = asyncio.create_task(self._hold(reward, seconds))

    async def set_up(self) -> None:
        timeout_s = self._start_timeout_s
        if not self._made.done():
            await asyncio.wait({self._made}, timeout=timeout_s)
        if not self._made.done():
            raise NoScoreError(
                f"can't be set up: its __aenter__ has not ended within {timeout_s:g} s; "
                "look whether what it waits for is up, or leave the reward out"
            )
        self._made.result()

    async def call(self, call: Call) -> list[Score]:
        async with self._slots:  # while it waits to be made again, too
            returned = await retried(partial(self._in_time, call), call.reward.retries)
        return as_scores(returned, call.size, call.reward.of_group)

    async def _in_time(self, call: Call) -> Any:
        """Return its result. Cancel a call that is late or not wanted; don't wait for its end."""
        timeout_s = math.inf if call.reward.own_deadline else call.timeout_s
        task = asyncio.create_task(self._result(call))
        try:
            await asyncio.wait({task}, timeout=timeout_s)
            if not task.done():
                raise LateError(f"no result within {timeout_s:g} s")
            if task.cancelled():
                raise NoScoreError("it cancelled itself")
            return task.result()
        finally:
            task.cancel()
            task.add_done_callback(retrieve)

    async def _result(self, call: Call) -> Any:
        await self.set_up()
        try:
            with clocked(self._seconds):
                return await self._made.result()(**call.arguments)
        except SystemExit as error:  # in a task it would end the event loop
            raise NoScoreError(failure(error).error) from error

    async def _hold(self, reward: Reward, seconds: dict[str, deque[float]]) -> None:
        """Set it up, and tear it down in the same task when the event loop ends."""
        async with AsyncExitStack() as stack:
            try:
                made: Any = reward.made()
                if hasattr(made, "__aenter__"):
                    await stack.enter_async_context(made)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - of every call
                problem = NoScoreError(f"can't be set up: {type(error).__name__}: {error}")
                self._made.set_exception(problem)
                return
            # A class may keep its own, without the time that its calls wait for each other.
            seconds[reward.name] = getattr(made, "call_seconds", self._seconds)
            self._made.set_result(made)
            await asyncio.Event().wait()


async def retried(call: Callable[[], Awaitable[T]], retries: int) -> T:
    """Return a call's result; repeat a call that raises RetryError after a while."""
    for attempt in range(retries):
        try:
            return await call()
        except RetryError as error:
            wait_s = error.retry_after
            if wait_s is None:
                wait_s = min(BACK_OFF_S * 2**attempt, MAX_BACK_OFF_S) * _JITTER.uniform(0.5, 1)
            if wait_s > MAX_BACK_OFF_S:
                raise
        await asyncio.sleep(wait_s)
    return await call()


def clock() -> deque[float]:
    return deque(maxlen=1000)  # of the seconds of the last calls


@contextmanager
def clocked(seconds: deque[float]) -> Iterator[None]:
    begun = time.perf_counter()
    try:
        yield
    finally:
        seconds.append(time.perf_counter() - begun)
