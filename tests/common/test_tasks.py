"""Coroutines, threads and tasks."""

import asyncio
import os
import signal
import threading

import pytest

from hocket.common.tasks import event_loop, run_in_thread


async def test_a_cancelled_call_ends_once_its_thread_has() -> None:
    begun, may_end, ended = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        may_end.wait(30)
        ended.set()

    assert (await run_in_thread(threading.current_thread)).name.startswith("hocket")  # no thread of asyncio's
    task = asyncio.create_task(run_in_thread(work))
    while not begun.is_set():
        await asyncio.sleep(0.001)
    task.cancel()
    await asyncio.sleep(0.05)
    assert not task.done()  # nobody else may begin with what it still works on
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()


async def test_a_coroutine_runs_inside_a_running_loop_too_and_an_interrupt_cancels_it() -> None:
    ended = []

    async def work(seconds: float) -> int:
        try:
            await asyncio.sleep(seconds)
        finally:
            await asyncio.sleep(0)  # it can still tidy up
            ended.append(seconds)
        return 7

    async def leave() -> asyncio.Task[int]:
        return asyncio.create_task(work(30))

    with event_loop() as run:
        left = run(leave())
        assert (run(work(0)), left.done()) == (7, False)
    assert left.cancelled()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a notebook's, while a cell runs
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt), event_loop() as run:
        run(work(60))
    signal.signal(signal.SIGINT, before)
    assert ended == [0, 30, 60]
