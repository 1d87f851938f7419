"""Run threads and tasks, write files atomically, derive seeds, measure time and memory. Standard library only."""

import asyncio
import ctypes
import functools
import hashlib
import ipaddress
import math
import os
import shutil
import socket
import sys
import time
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

_THREADS = ThreadPoolExecutor(32, "hocket")

SMALL_MODEL = 16 << 20  # bytes of weights
KEPT_MEMORY = 2 << 30  # bytes of a process; to get them anew in each step takes longer than the step

P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")


def door() -> str:
    """Return how a command of hocket begins where this one was typed."""
    name = Path(sys.argv[0]).name
    return "hocket" if name == "hocket" else f"python3 {sys.argv[0] if name == 'run.py' else 'run.py'}"


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Return a coroutine's result as asyncio.run does, also where an event loop runs already, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    begun = Future[Any]()

    async def begin() -> T:
        begun.set_result(asyncio.current_task())
        return await coroutine

    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(asyncio.run, begin())
        try:
            return running.result()
        except KeyboardInterrupt:  # only the main thread gets it
            task = begun.result()
            task.get_loop().call_soon_threadsafe(task.cancel)
            raise


async def run_in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return function(*args, **kwargs) from a thread, so that the event loop goes on.

    The threads are hocket's own: a user's tools that hang may hold all of asyncio's. A cancelled call ends once the
    function has: its objects are in use until then.
    """
    call = functools.partial(function, *args, **kwargs)
    running = asyncio.get_running_loop().run_in_executor(_THREADS, call)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        raise


async def as_completed(
    function: Callable[[S], Coroutine[Any, Any, T]], items: Sequence[S], *, at_once: int
) -> AsyncGenerator[T, None]:
    """Yield the results of a function of each item, in the order in which they come; leaving early cancels those begun.

    At most `at_once` run at the same time. Raises what one of them raises.
    """
    todo, results = iter(items), asyncio.Queue[T | Exception]()

    async def work() -> None:
        try:
            for item in todo:
                results.put_nowait(await function(item))
        except Exception as error:  # noqa: BLE001 - raised below
            results.put_nowait(error)

    tasks = [asyncio.create_task(work()) for _ in range(min(at_once, len(items)))]
    try:
        for _ in items:
            if isinstance(result := await results.get(), Exception):
                raise result
            yield result
    finally:
        await cancel(tasks)


async def cancel(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Cancel the tasks that run and wait until they have ended."""
    for task in tasks:
        task.cancel()
    if running := [task for task in tasks if not task.done()]:
        await asyncio.wait(running)
    for task in tasks:
        task.cancelled() or task.exception()  # or asyncio reports it as overlooked


def cpu_threads(model: str, *, processes: int) -> int:
    """Return how many threads each of `processes` computes with: all ranks, or all servers' workers, of this machine.

    Ranks and servers use all cores, even at the same time: a waiting thread leaves its core to others
    (environment.prepare). A small model uses half of them: more threads cost more in waiting than they save.
    """
    cores, folder = len(os.sched_getaffinity(0)), Path(model)
    is_small = 0 < sum(file.stat().st_size for file in folder.glob("*.safetensors")) < SMALL_MODEL
    return max(1, (cores // 2 if is_small else cores) // processes)


def bound_nccl(timeout_s: float) -> None:
    """Set the deadline of NCCL connections that do not block; torch reads it once, at a process's first use of NCCL."""
    os.environ.setdefault("TORCH_NCCL_NONBLOCKING_TIMEOUT", str(math.ceil(timeout_s)))


def return_freed_memory() -> None:
    """Give memory of freed tensors, which the C library keeps, back to the system if the process has > KEPT_MEMORY."""
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    if resident > KEPT_MEMORY:
        with suppress(AttributeError):  # not glibc
            ctypes.CDLL(None).malloc_trim(0)


def flush(path: Path) -> None:
    """Sync a file, or a folder's list of names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, text: str) -> None:
    """Replace a file's content; a reader sees the old or the new one, never a part."""
    partial = partial_of(path)
    with naming(path):
        try:
            partial.write_text(text, encoding="utf-8", errors="replace")  # JSON may hold half a surrogate pair
            os.replace(partial, path)
        except OSError:
            with suppress(OSError):
                partial.unlink()
            raise


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Name the file in an OSError of the body: where a write fails, Python does not."""
    try:
        yield
    except OSError as error:
        if error.errno is not None:
            error.filename = error.filename or str(path)
        raise


def kind_of(folder: Path) -> str:
    """Return what is in a folder: "model" or "adapter" (a version is one of them), "checkpoint", "run", or ""."""
    marks = (("config.json", "model"), ("adapter_config.json", "adapter"), ("state.json", "checkpoint"))
    return next((kind for name, kind in (*marks, ("metrics.jsonl", "run")) if (folder / name).is_file()), "")


def newest_version(path: str) -> str:
    """Return the newest version of a run folder, or what sft has made in it; a path that is none as it is."""
    folder = Path(path)
    made = [*folder.glob("model/config.json"), *sorted(folder.glob("weights/v*/COMPLETE"))]
    return str(made[-1].parent) if made and kind_of(folder) == "run" else path


def partial_of(path: Path) -> Path:
    """Return the hidden name under which a file or folder is written until it is complete."""
    return path.with_name(f".{path.name}.partial")


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yield an empty folder that becomes `path` after the body (`complete_folder`); a failing body leaves nothing."""
    partial = partial_of(path)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        complete_folder(path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def complete_folder(path: Path) -> None:
    """Sync the partial folder of `path` to the disk and rename it to `path`, in place of an older folder."""
    partial, old = partial_of(path), path.with_name(f".{path.name}.old")
    mode = partial.stat().st_mode & 0o666  # safetensors writes for the owner alone; a server may run as another user
    for file in filter(Path.is_file, partial.iterdir()):
        file.chmod(mode)
        flush(file)
    flush(partial)
    shutil.rmtree(old, ignore_errors=True)
    if path.exists():
        path.rename(old)
    partial.rename(path)
    flush(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def remove_folder(path: Path) -> None:
    """Remove a folder; it is renamed first, so that no reader takes half of it for complete."""
    partial = partial_of(path)
    shutil.rmtree(partial, ignore_errors=True)
    path.rename(partial)
    shutil.rmtree(partial)


@contextmanager
def timed(metrics: dict[str, float], name: str) -> Iterator[None]:
    """Add the wall seconds of the body to `metrics` under `name`."""
    start = time.perf_counter()
    yield
    metrics[name] = time.perf_counter() - start


def seed_of(*parts: object) -> int:
    """Return a 48-bit seed derived from a SHA-256 hash of the parts."""
    digest = hashlib.sha256(":".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:6], "big")


def free_memory() -> int:
    """Return the bytes of memory left to this machine, or to the control group of this process (Linux)."""
    info = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(info["MemAvailable"].split()[0]) << 10
    for folder, limit, used, cached in (
        ("/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        with suppress(OSError, ValueError):  # there is no such group, or its limit is "max"
            stat = dict(line.split() for line in Path(folder, "memory.stat").read_text().splitlines())
            most, now = (int(Path(folder, name).read_text()) for name in (limit, used))
            free = min(free, most - now + int(stat[cached]))  # cached files can go
    return max(free, 0)


def is_here(host: str) -> bool:
    """Return whether a host name or address is one of this machine's own: whether a socket can be bound to it."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind(address)
    except OSError:  # it is another machine's, or unknown
        return False
    return True


def is_loopback(host: str) -> bool:
    """Return whether a host name or address is this machine's own."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
