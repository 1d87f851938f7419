"""Coroutines, threads and tasks."""

import asyncio
import contextlib
import gc
import os
import signal
import threading

import pytest

from hocket.common.tasks import event_loop, run_in_thread, starting
from support.programs import run_code


async def test_a_cancelled_call_ends_once_its_thread_has() -> None:
    begun, may_end, ended = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        may_end.wait(30)
        ended.set()

    assert (await run_in_thread(threading.current_thread)).name.startswith("hocket")  # no thread of asyncio's
    task = asyncio.create_task(run_in_thread(work))
    while not begun.is_set():
        await asyncio.sleep(0)
    task.cancel()
    for _ in range(100):  # turns of the event loop
        await asyncio.sleep(0)
    assert not task.done()  # nobody else may begin with what it still works on
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()


async def test_a_coroutine_runs_inside_a_running_loop_too_and_an_interrupt_cancels_it() -> None:
    ended = []

    async def work(seconds: float) -> int:
        if seconds == 60:
            asyncio.get_running_loop().call_soon(os.kill, os.getpid(), signal.SIGINT)  # once this waits
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
    with pytest.raises(KeyboardInterrupt), event_loop() as run:
        run(work(60))
    signal.signal(signal.SIGINT, before)
    assert ended == [0, 30, 60]


def test_no_task_or_thread_keeps_an_event_loop_or_a_process_from_ending() -> None:
    code = """
import asyncio, contextlib, time
from hocket.common import tasks
from hocket.common.processes import exit_with

tasks.END_S = 0.05

async def stubborn():
    while True:
        with contextlib.suppress(BaseException):
            await asyncio.sleep(3600)

async def work():
    stubborns.append(asyncio.create_task(stubborn()))
    threads.append(asyncio.create_task(asyncio.to_thread(time.sleep, 3600)))
    await asyncio.sleep(0)  # both begin
    return 7

def main(arguments):
    print(tasks.run(work()), stubborns[0].done(), threads[0].cancelled())
    return tasks.run(asyncio.sleep(0, 3))  # in another event loop

stubborns, threads = [], []
exit_with(main)
"""
    done = run_code(code)
    assert (done.returncode, done.stdout, done.stderr) == (3, "7 False True\n", "")


def test_a_start_that_fails_leaves_the_search_for_garbage_on() -> None:
    with contextlib.suppress(OSError), starting():
        assert not gc.isenabled()
        raise OSError("no model")
    assert gc.isenabled()
    gc.disable()
    try:
        with starting():
            pass
        assert not gc.isenabled()  # as the caller of hocket.train wants it
    finally:
        gc.enable()
