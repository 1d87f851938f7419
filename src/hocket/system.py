"""What several parts ask of the operating system. Standard library only."""

import asyncio
import ctypes
import functools
import os
import signal
import sys
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

_PR_SET_PDEATHSIG = 1
_TIE = """import ctypes, os, signal, sys, time
def end(status):
    while True:  # who loses its parent becomes a child of this process, until nobody is left
        try:
            with open(f"/proc/self/task/{os.getpid()}/children") as file:
                children = [int(pid) for pid in file.read().split()]
        except OSError:
            children = [program] if program else []
        for pid in children:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        try:
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                time.sleep(0.01)
        except ChildProcessError:
            os._exit(status if status >= 0 else 128 - status)
program = 0
signal.signal(signal.SIGTERM, lambda *_: end(143))
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(36, 1)
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)
    if os.getppid() != int(sys.argv[1]):
        sys.exit(1)
program = os.fork()
if program == 0:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    os.execvp(sys.argv[2], sys.argv[2:])
while True:
    pid, status = os.wait()
    if pid == program:
        end(os.waitstatus_to_exitcode(status))
"""
_THREADS = ThreadPoolExecutor(32, "hocket")

P = ParamSpec("P")
T = TypeVar("T")


async def aside(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Returns function(*args, **kwargs) from a thread, so that the event loop goes on.

    The threads are hocket's own: a user's tools that hang may hold all of asyncio's. Where it is cancelled, it ends
    once the function has: nobody may begin something else with what that still works on.
    """
    call = functools.partial(function, *args, **kwargs)
    running = asyncio.get_running_loop().run_in_executor(_THREADS, call)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        raise


async def as_they_end(coroutines: Sequence[Coroutine[Any, Any, T]]) -> AsyncGenerator[T, None]:
    """Runs all of these at once, and yields what each returns as it ends; leaving early ends the others."""
    ended: asyncio.Queue[asyncio.Task[T]] = asyncio.Queue()
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    for task in tasks:
        task.add_done_callback(ended.put_nowait)
    try:
        for _ in tasks:
            yield (await ended.get()).result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def end_with(parent: int, signum: signal.Signals) -> None:
    """Has the kernel send `signum` to this process when its parent ends (Linux; elsewhere nothing happens).

    Exits where that has happened already.

    Args:
        parent: pid of the process that started this one.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signum)
    if os.getppid() != parent:  # it went before the kernel was told
        sys.exit(f"the process that started this one (pid {parent}) is gone")


def tied(command: Sequence[str]) -> list[str]:
    """Returns the command line of a program that is killed when this process ends, whatever ends it (Linux).

    With it goes all that it has started; so it does when it ends by itself, or the command gets a SIGTERM. The exit
    status is the program's own, 128 and the signal's number where one ended it.
    """
    return [sys.executable, "-I", "-S", "-c", _TIE, str(os.getpid()), *command]


def flush(path: Path) -> None:
    """Returns once a file, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, text: str) -> None:
    """Writes a file so that a reader sees the old or the new content, never a part.

    Half a surrogate pair, which JSON allows in a string, has no encoding: it becomes a question mark.
    """
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8", errors="replace")
    os.replace(partial, path)


def free_memory() -> int:
    """Returns the bytes of memory that this machine, or the control group that this process is in, has left (Linux)."""
    info = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(info["MemAvailable"].split()[0]) << 10
    for folder, limit, used in (
        ("/sys/fs/cgroup", "memory.max", "memory.current"),
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        try:
            stat = dict(line.split() for line in Path(folder, "memory.stat").read_text().splitlines())
            bounds = [Path(folder, name).read_text().strip() for name in (limit, used)]
        except OSError:
            continue
        if bounds[0] != "max":
            reclaimable = int(stat.get("total_inactive_file", stat.get("inactive_file", "0")))  # cached files
            free = min(free, int(bounds[0]) - int(bounds[1]) + reclaimable)
    return max(free, 0)
