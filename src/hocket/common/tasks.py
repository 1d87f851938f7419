"""Run coroutines, threads and tasks; measure their time, derive their seeds. Standard library only."""

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

LOOK_S = 0.5  # between looks for a signal
END_S = 30.0  # that tasks may take to end with their event loop
_THREADS = ThreadPoolExecutor(32, "hocket")
_LOOK_UPS = dict[Any, Future[Any]]()  # under way
P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")


@contextmanager
def event_loop() -> Iterator[Callable[[Coroutine[Any, Any, Any]], Any]]:
    """Yield what runs coroutines in one event loop: tasks of the first go on in the second.

    Where one runs already, as in a notebook, it is a thread's.
    """
    with ExitStack() as stack:
        runner = asyncio.Runner()
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            runs = runner.run
            stack.callback(_close, runner)
        else:
            thread = stack.enter_context(ThreadPoolExecutor(1))
            thread.submit(
                int
            ).result()  # it has started: an interrupt of its start would leave it behind
            stack.callback(thread.submit, _close, runner)
            runs = partial(_run_in, thread, runner)
        yield runs


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Return a coroutine's result; asyncio.run would wait for ever for tasks and threads that do not end."""
    with event_loop() as run_there:
        result: T = run_there(coroutine)
        return result


def _close(runner: asyncio.Runner) -> None:
    """Cancel the tasks of an event loop and close it; abandon one whose tasks do not end, and threads."""
    loop = runner.get_loop()
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
    begun = Future[Any]()

    async def begin() -> Any:
        begun.set_result(asyncio.current_task())
        return await coroutine

    try:
        running = thread.submit(runner.run, begin())
        while (
            not running.done()
        ):  # a signal that another thread takes does not end a wait of this one
            wait([running], timeout=LOOK_S)
        return running.result()
    except KeyboardInterrupt:  # only the main thread gets it
        with suppress(TimeoutError):  # it was not submitted
            task = begun.result(timeout=END_S)
            task.get_loop().call_soon_threadsafe(task.cancel)
        raise


@contextmanager
def starting() -> Iterator[None]:
    """Search for no garbage meanwhile: imports make hardly any, and searches take a quarter of their time."""
    enabled = gc.isenabled()  # a caller may have it off
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


async def run_in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function in a thread, while the event loop goes on.

    Tools that hang may hold all of asyncio's own threads. A cancelled call ends once the function has, which uses its
    objects until then.
    """
    call = partial(function, *args, **kwargs)
    running = asyncio.get_running_loop().run_in_executor(_THREADS, call)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        raise


def in_own_thread(call: Callable[[], T]) -> Future[T]:
    """Make a call that may hang for ever, in a thread that no exit waits for."""
    found = Future[T]()
    found.set_running_or_notify_cancel()  # who waits no longer can't cancel it

    def work() -> None:
        try:
            found.set_result(call())
        except BaseException as error:  # noqa: BLE001 - of who waits
            if not isinstance(error, Exception) or isinstance(
                error, StopIteration | CancelledError
            ):
                # These would end the event loop of who waits, are refused by its future, and would cancel the task.
                error = RuntimeError(f"{type(error).__name__}: {error}")
            found.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return found


async def look_up(function: Callable[..., T], *args: Any) -> T:
    """Call a function in its own thread; calls alike wait for the same one."""
    key = function, args
    found: Future[T] | None = _LOOK_UPS.get(key)
    if found is None:
        found = _LOOK_UPS[key] = in_own_thread(partial(function, *args))
        found.add_done_callback(lambda _: _LOOK_UPS.pop(key))
    return await asyncio.wrap_future(found)


async def as_completed(
    function: Callable[[S], Coroutine[Any, Any, T]], items: Sequence[S], *, at_once: int
) -> AsyncGenerator[T, None]:
    """Yield the results of a function of each item, as they come; leaving early cancels those begun.

    At most `at_once` run at the same time. Raises what one of them raises.
    """
    slots = asyncio.Semaphore(at_once)

    async def work(item: S) -> T:
        async with slots:
            return await function(item)

    tasks = [asyncio.create_task(work(item)) for item in items]
    try:
        for done in asyncio.as_completed(tasks):
            yield await done
    finally:
        await cancel(tasks)


async def cancel(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait until they have ended, whatever with."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def retrieve(task: asyncio.Task[Any]) -> None:
    """Take an ended task's exception, or asyncio reports it as overlooked."""
    if not task.cancelled():
        task.exception()


MAIN = "trainer, rank 0"


class Span(NamedTuple):
    """What took how long: from `start` to `end` by time.perf_counter."""

    name: str  # "time/train"
    start: float
    end: float
    who: str = MAIN


LISTENERS: list[Callable[[Span], None]] = []
"""Are told of each span, in the thread that took it; they must be quick, and never raise."""


def note(name: str, start: float, end: float | None = None, who: str = MAIN) -> float:
    """Tell the listeners of a span, which ends now if not told otherwise; return its seconds."""
    span = Span(name, start, time.perf_counter() if end is None else end, who)
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


def seed_of(*parts: object) -> int:
    """Return a 48-bit seed from a SHA-256 hash of the parts."""
    digest = hashlib.sha256(":".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:6], "big")
