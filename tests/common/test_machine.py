"""What this machine has left, and who has its ports."""

import os
import platform
import socket
from pathlib import Path

import pytest

from hocket.common.machine import SMALL_MODEL, cpu_threads, free_memory, holder
from support.programs import run_code


@pytest.mark.parametrize(
    ("size", "processes", "expected"),
    [(SMALL_MODEL, 4, 3), (SMALL_MODEL, 16, 1), (SMALL_MODEL - 2, 1, 6), (0, 1, 12)],  # 0: a hub's
)
def test_every_process_gets_its_share_of_all_cores_and_a_small_model_half_of_them(
    size: int, processes: int, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(12)))
    for name in ("model-1.safetensors", "model-2.safetensors"):
        (tmp_path / name).write_bytes(bytes(size // 2))
    assert cpu_threads(str(tmp_path), processes=processes) == expected


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


def test_who_listens_on_a_port_is_named() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # bound, not listening: nobody else can take it meanwhile
        number = held.getsockname()[1]
        assert holder(number) == "another process"
        held.listen()
        assert str(holder(number)).startswith(f"process {os.getpid()} (")


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
@pytest.mark.parametrize("keeps", [False, True])
def test_freed_memory_is_used_again_by_a_thread_without_new_pages(keeps: bool) -> None:
    program = f"""
import resource, threading
from hocket.common import machine
{keeps} and machine.keep_freed_memory()
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    bytearray(100 << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
thread = threading.Thread(target=lambda: print(faults(), faults()))
thread.start()
thread.join()
"""
    first, second = map(int, run_code(program).stdout.split())
    assert first > 500  # of 4 KiB 25,600, of 64 KiB 1,600
    assert second < first / 100 if keeps else second == pytest.approx(first, rel=0.1)
