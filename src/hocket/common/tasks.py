"""Run coroutines, threads and tasks; measure their time and derive their seeds.

Standard library only.
"""

import asyncio
import gc
import hashlib
import threading
import time
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple, ParamSpec, TypeVar

from hocket.common.processes import ABANDONED

LOOK_S = 0.5  # seconds between looks for a signal
END_S = 30.0  # seconds that tasks may take to end with their event loop
_THREADS = ThreadPoolExecutor(32, "hocket")
_LOOK_UPS = dict[Any, Future[Any]]()  # calls of `look_up` that have not ended, by their arguments
P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")


@contextmanager
def event_loop() -> Iterator[Callable[[Coroutine[Any, Any, Any]], Any]]:
    """Yield a function that runs coroutines, one after another, in the same event loop.

    Tasks that a coroutine leaves go on while the next one runs. In a thread that already runs an
    event loop, as in a notebook, the coroutines run in a thread of their own.
    """
    with ExitStack() as stack:
        runner = asyncio.Runner()
        try:
            asyncio.get_running_loop()
        except RuntimeError:  # no event loop runs in this thread
            run_there = runner.run
            stack.callback(_close, runner)
        else:
            thread = stack.enter_context(ThreadPoolExecutor(1))
            # Wait until the thread has started: an interrupt of its start would leave it behind.
            thread.submit(int).result()
            stack.callback(thread.submit, _close, runner)
            run_there = partial(_run_in, thread, runner)
        yield run_there


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine and return its result.

    Unlike asyncio.run it does not wait for ever for tasks and threads that do not end.
    """
    with event_loop() as run_there:
        result: T = run_there(coroutine)
        return result


def _close(runner: asyncio.Runner) -> None:
    """Cancel the tasks of an event loop and close it.

    A loop whose tasks do not end is abandoned, and so are the threads of its executor.
    """
    loop = runner.get_loop()
    # The runner waits for the threads of the loop's executor: give it one without threads.
    loop.set_default_executor(ThreadPoolExecutor())
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.add_done_callback(retrieve)
        task.cancel()
    try:
        if tasks:
            runner.run(asyncio.wait(tasks, timeout=END_S))
    finally:
        if all(task.done() for task in tasks):
            runner.close()
        else:  # closing it would wait for them for ever
            ABANDONED.append(runner)


def _run_in(
    thread: ThreadPoolExecutor, runner: asyncio.Runner, coroutine: Coroutine[Any, Any, Any]
) -> Any:
    """Run a coroutine in another thread; an interrupt of this thread cancels it there."""
    task_there = Future[Any]()  # the coroutine's task in the other thread, once that runs

    async def work() -> Any:
        task_there.set_result(asyncio.current_task())
        return await coroutine

    try:
        running = thread.submit(runner.run, work())
        # Wake up now and then: a signal that another thread takes does not end this one's wait.
        while not running.done():
            wait([running], timeout=LOOK_S)
        return running.result()
    except KeyboardInterrupt:  # only the main thread gets it
        with suppress(TimeoutError):  # the interrupt came before the coroutine was submitted
            task = task_there.result(timeout=END_S)
            task.get_loop().call_soon_threadsafe(task.cancel)
        raise


@contextmanager
def starting() -> Iterator[None]:
    """Switch garbage collection off during the body, which imports modules.

    Imports leave hardly any garbage, and searching for it takes a quarter of their time.
    """
    enabled = gc.isenabled()  # a caller may have switched it off already
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


# Threads


async def run_in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function in a thread, while the event loop goes on.

    The threads are hocket's own: a user's code that hangs may hold all of asyncio's. A cancelled
    call waits until the function has ended, because that uses its objects until then.
    """
    call = partial(function, *args, **kwargs)
    running = asyncio.get_running_loop().run_in_executor(_THREADS, call)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        raise


def in_own_thread(call: Callable[[], T]) -> Future[T]:
    """Make a call that may hang for ever, in a thread that does not keep the process from exiting.

    Returns the future of its result.
    """
    future = Future[T]()
    # Mark it as running: a caller that stops waiting then can't cancel it for the others.
    future.set_running_or_notify_cancel()

    def work() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001 - the caller that waits gets it
            is_special = isinstance(error, StopIteration | CancelledError)
            if is_special or not isinstance(error, Exception):
                # KeyboardInterrupt and SystemExit would end the caller's event loop, StopIteration
                # is refused by its future, and CancelledError would cancel its task.
                error = RuntimeError(f"{type(error).__name__}: {error}")
            future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return future


async def look_up(function: Callable[..., T], *args: Any) -> T:
    """Call a function in its own thread; calls with equal arguments wait for the same thread."""
    key = function, args
    future: Future[T] | None = _LOOK_UPS.get(key)
    if future is None:
        future = _LOOK_UPS[key] = in_own_thread(partial(function, *args))
        future.add_done_callback(lambda _: _LOOK_UPS.pop(key))
    return await asyncio.wrap_future(future)


# Several coroutines at once


async def as_completed(
    function: Callable[[S], Coroutine[Any, Any, T]], items: Sequence[S], *, at_once: int
) -> AsyncGenerator[T, None]:
    """Call a function for each item, and yield the results in the order in which the calls end.

    At most `at_once` calls run at the same time. An exception of a call is raised here. A caller
    that stops early cancels the calls that have not ended.
    """
    slots = asyncio.Semaphore(at_once)

    async def work(item: S) -> T:
        async with slots:
            return await function(item)

    tasks = [asyncio.create_task(work(item)) for item in items]
    try:
        for task in asyncio.as_completed(tasks):
            yield await task
    finally:
        await cancel(tasks)


async def cancel(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait until they have ended; their exceptions are dropped."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def retrieve(task: asyncio.Task[Any]) -> None:
    """Read the exception of an ended task, which asyncio would else report as never retrieved."""
    if not task.cancelled():
        task.exception()


# Times of pieces of work, for metrics and the timeline.

MAIN = "trainer, rank 0"


class Span(NamedTuple):
    """A piece of work and its time: from `start` to `end` by time.perf_counter."""

    name: str  # the metric of its duration, such as "time/train"
    start: float
    end: float
    who: str = MAIN  # the process or thread that did the work


LISTENERS: list[Callable[[Span], None]] = []
"""Functions that get each span, in the thread that took it. They must be quick, and never raise."""


def note(name: str, start: float, end: float | None = None, who: str = MAIN) -> float:
    """Pass a span to the listeners and return its seconds; without `end` it ends now."""
    if end is None:
        end = time.perf_counter()
    span = Span(name, start, end, who)
    for listener in LISTENERS:
        listener(span)
    return span.end - start


@contextmanager
def timed(metrics: dict[str, float], name: str) -> Iterator[None]:
    """Add the wall seconds of the body to `metrics` under `name`."""
    start = time.perf_counter()
    try:
        yield
    finally:
        metrics[name] = metrics.get(name, 0.0) + note(name, start)


# Seeds


def seed_of(*parts: object) -> int:
    """Derive a 48-bit seed from the SHA-256 hash of the parts, joined by colons."""
    digest = hashlib.sha256(":".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:6], "big")
