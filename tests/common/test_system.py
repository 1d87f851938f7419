"""What is asked of the operating system: files that are whole, threads, free memory."""

import asyncio
import os
import signal
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from hocket.common.files import atomic_folder, remove_folder, write_atomically
from hocket.common.machine import SMALL_MODEL, cpu_threads, free_memory, return_freed_memory
from hocket.common.tasks import event_loop, run_in_thread, timed


def test_a_file_is_replaced_as_a_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    write_atomically(path, "old")
    write_atomically(path, "new é\ud800")  # half a surrogate pair has no encoding
    assert path.read_bytes() == "new é?".encode()
    assert list(tmp_path.iterdir()) == [path]

    def fail(*_: object) -> None:
        raise OSError("no space")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="no space"):
        write_atomically(path, "newer")
    assert path.read_text(encoding="utf-8") == "new é?"


def test_a_folder_appears_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b"
    for content in ("old", "new"):
        with atomic_folder(path) as partial:
            (partial / "file").write_text(content)
            (partial / "file").chmod(0o600)
            assert not path.exists() or (path / "file").read_text() == "old"
    assert (path / "file").read_text() == "new"
    assert (path / "file").stat().st_mode & 0o777 == path.stat().st_mode & 0o666  # readable for whom the folder is

    def fail() -> None:
        with atomic_folder(path) as partial:
            (partial / "file").touch()
            raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        fail()
    assert (path / "file").read_text() == "new"
    assert list(path.parent.iterdir()) == [path]


def test_a_removed_folder_is_never_seen_in_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "v1"
    path.mkdir()
    monkeypatch.setattr("shutil.rmtree", lambda *_, **__: None)  # killed half-way
    remove_folder(path)
    assert not path.exists()
    monkeypatch.undo()
    path.mkdir()
    remove_folder(path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("folder", ["/sys/fs/cgroup", "/sys/fs/cgroup/memory"])
def test_free_memory_is_what_the_machine_or_the_control_group_has_left(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {"/proc/meminfo": "MemTotal:       9000 kB\nMemAvailable:   3000 kB\n"}

    def read(path: Path) -> str:
        if str(path) not in files:
            raise FileNotFoundError(path)
        return files[str(path)]

    monkeypatch.setattr(Path, "read_text", read)
    assert free_memory() == 3000 * 1024
    new = folder == "/sys/fs/cgroup"
    limit, used = ("memory.max", "memory.current") if new else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    files[f"{folder}/memory.stat"] = f"cache 7\n{'' if new else 'total_'}inactive_file 1000\n"
    files[f"{folder}/{used}"] = "5000\n"
    files[f"{folder}/{limit}"] = "9000\n"
    assert free_memory() == 9000 - 5000 + 1000  # files that are only cached can go
    files[f"{folder}/{limit}"] = "max\n" if new else f"{1 << 62}\n"
    assert free_memory() == 3000 * 1024


def test_seconds_are_added_up_also_those_before_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    passing = iter([1.0, 3.0, 10.0, 10.5])
    monkeypatch.setattr("time.perf_counter", lambda: next(passing))
    metrics: dict[str, float] = {}
    with timed(metrics, "a"):
        assert metrics == {}
    with pytest.raises(OSError, match="no space"), timed(metrics, "a"):
        raise OSError("no space")
    assert metrics == {"a": 2.5}


async def test_a_cancelled_call_ends_once_its_thread_has() -> None:
    begun, may_end, ended = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        may_end.wait(30)
        ended.set()

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


async def test_a_call_in_a_thread_returns_or_raises_and_leaves_asyncios_threads_alone() -> None:
    assert await run_in_thread(divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        await run_in_thread(divmod, 7, 0)
    assert (await run_in_thread(threading.current_thread)).name.startswith("hocket")


@pytest.mark.parametrize(
    ("size", "processes", "expected"),
    [
        (SMALL_MODEL, 1, 12),
        (SMALL_MODEL, 4, 3),
        (SMALL_MODEL, 16, 1),
        (SMALL_MODEL - 2, 1, 6),
        (0, 1, 12),
    ],  # 0: a hub's
)
def test_every_process_gets_its_share_of_all_cores_and_a_small_model_half_of_them(
    size: int, processes: int, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(12)))
    for name in ("model-1.safetensors", "model-2.safetensors"):
        (tmp_path / name).write_bytes(bytes(size // 2))
    assert cpu_threads(str(tmp_path), processes=processes) == expected


@pytest.mark.parametrize("kept", [0, 1 << 50])
def test_freed_memory_is_returned_by_a_process_that_holds_much(kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    trimmed: list[int] = []
    monkeypatch.setattr("ctypes.CDLL", lambda name: SimpleNamespace(malloc_trim=trimmed.append))
    monkeypatch.setattr("hocket.common.machine.KEPT_MEMORY", kept)
    return_freed_memory()
    assert trimmed == ([0] if kept == 0 else [])
