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

START_TIMEOUT_S = 120.0  # for a worker process to start, and for an async class to be set up
BACK_OFF_S = 1.0  # wait before the first retry
MAX_BACK_OFF_S = 300.0  # longest wait before any retry
_JITTER = random.Random()  # its own generator: the run's random numbers stay as they are

# Tasks that hold the instances of async classes. asyncio itself refers to a task only weakly: a
# task whose scorer was dropped would be destroyed before it has torn its instance down.
_HOLDING = set[asyncio.Task[None]]()


class Call(NamedTuple):
    """One call of a reward."""

    reward: Reward
    arguments: Mapping[str, Any]
    size: int  # number of scores that the call gives
    timeout_s: float
    seconds: deque[float]  # durations of the reward's last calls; this call's is appended


class Runner:
    """Calls rewards in one place: a thread, an event loop, or worker processes."""

    async def set_up(self) -> None:
        """Wait until calls can be made. Raises NoScoreError where none can."""

    async def call(self, call: Call) -> list[Score]:
        """Make a call. Returns its scores, or raises its error."""
        raise NotImplementedError

    def close(self) -> None:
        """Release what the rewards hold; may be called from any thread."""


class Inline(Runner):
    """Calls plain rewards in this thread; sets a class up before its first call."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._functions = dict[str, Callable[..., Any]]()  # by the reward's name

    async def call(self, call: Call) -> list[Score]:
        with clocked(call.seconds):
            returned = self.now(call.reward, call.arguments)
        return as_scores(returned, call.size, call.reward.of_group)

    def now(self, reward: Reward, arguments: Mapping[str, Any]) -> Any:
        """Call a reward at once, and return its result as it is."""
        if reward.name not in self._functions:
            function: Any = reward.make()
            if hasattr(function, "__enter__"):
                function = self._stack.enter_context(function)
            self._functions[reward.name] = function
        return self._functions[reward.name](**arguments)

    def close(self) -> None:
        self._stack.close()


class InLoop(Runner):
    """Calls an async reward in one event loop; the instance of a class lives as long as the loop.

    `seconds` has the durations of each reward's last calls, by name. Those of this reward are
    measured here, or by a class itself if it has the attribute `call_seconds`.
    """

    def __init__(self, reward: Reward, seconds: dict[str, deque[float]]) -> None:
        self._start_timeout_s = None if reward.own_deadline else START_TIMEOUT_S
        self._slots = asyncio.Semaphore(reward.max_concurrent or sys.maxsize)
        # The function, or the instance of the class; an exception if that can't be set up.
        self._function: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._seconds = clock()
        holding = asyncio.create_task(self._hold(reward, seconds))
        _HOLDING.add(holding)
        holding.add_done_callback(_HOLDING.discard)

    async def set_up(self) -> None:
        """Wait until the reward is set up. Raises NoScoreError if that fails, or takes too long."""
        timeout_s = self._start_timeout_s
        if not self._function.done():
            await asyncio.wait({self._function}, timeout=timeout_s)
        if not self._function.done():
            raise NoScoreError(
                f"can't be set up: its __aenter__ has not ended within {timeout_s:g} s; "
                "look whether what it waits for is up, or leave the reward out"
            )
        self._function.result()

    async def call(self, call: Call) -> list[Score]:
        # A call keeps its slot while it waits for a retry: a busy service is spared meanwhile.
        async with self._slots:
            returned = await retried(partial(self._in_time, call), call.reward.retries)
        return as_scores(returned, call.size, call.reward.of_group)

    async def _in_time(self, call: Call) -> Any:
        """Await the result until the deadline.

        A call that is late, or whose caller was cancelled, is cancelled. Nobody waits for its end:
        it may ignore that.
        """
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
                return await self._function.result()(**call.arguments)
        except SystemExit as error:  # in a task it would end the event loop
            raise NoScoreError(failure(error).error) from error

    async def _hold(self, reward: Reward, seconds: dict[str, deque[float]]) -> None:
        """Set the reward up, and tear it down in the same task when the event loop ends.

        One task for both, as some context managers (anyio's) can't be left in another one.
        """
        async with AsyncExitStack() as stack:
            try:
                function: Any = reward.make()
                if hasattr(function, "__aenter__"):
                    await stack.enter_async_context(function)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - every call raises it
                problem = NoScoreError(f"can't be set up: {type(error).__name__}: {error}")
                self._function.set_exception(problem)
                return
            # A class may have a clock of its own, which leaves out how long calls wait for others.
            seconds[reward.name] = getattr(function, "call_seconds", self._seconds)
            self._function.set_result(function)
            await asyncio.Event().wait()  # until the end of the event loop cancels this task


async def retried(call: Callable[[], Awaitable[T]], retries: int) -> T:
    """Make a call, and repeat it up to `retries` times while it raises RetryError.

    The wait is the error's `retry_after`, or doubles from retry to retry. An error that wants a
    longer wait than MAX_BACK_OFF_S is raised at once.
    """
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
    """Make a store for the durations of the last thousand calls."""
    return deque(maxlen=1000)


@contextmanager
def clocked(seconds: deque[float]) -> Iterator[None]:
    """Append the duration of the body."""
    start = time.perf_counter()
    try:
        yield
    finally:
        seconds.append(time.perf_counter() - start)
