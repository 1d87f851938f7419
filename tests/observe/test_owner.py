"""One process at a time owns a run folder: live ones, a killed one, a stopped one."""

import contextlib
import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from hocket.errors import ConfigError
from hocket.observe import owner
from hocket.observe.owner import owning
from processes import ROOT

PROGRAM = """
import sys
from pathlib import Path
from hocket.observe import owner
run, wait = sys.argv[1:]
owner.LOOK_S, owner.WAIT_S = 0.02, float(wait)
with owner.owning(Path(run), lambda text: print(text, flush=True), wait=float(wait) > 0):
    print("owns", flush=True)
    sys.stdin.read()
"""


class Owner(subprocess.Popen[str]):
    """A process that owns the folder until its standard input ends."""

    def __init__(self, run: Path, *, wait_s: float = 0) -> None:
        super().__init__(
            [sys.executable, "-c", PROGRAM, str(run), str(wait_s)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        )  # fmt: skip

    def line(self) -> str:
        assert self.stdout is not None
        return self.stdout.readline().rstrip()


@pytest.fixture
def start() -> Iterator[Callable[..., Owner]]:
    with contextlib.ExitStack() as stack:

        def start(run: Path, **options: float) -> Owner:
            process = stack.enter_context(Owner(run, **options))
            stack.callback(process.kill)
            return process

        yield start


def owner_of(run: Path) -> dict[str, object]:
    with contextlib.suppress(OSError, ValueError):
        return dict(json.loads((run / "owner.json").read_text()))
    return {}


def test_a_second_run_is_told_who_has_the_folder_and_a_third_gets_it_at_the_end(
    tmp_path: Path, start: Callable[..., Owner]
) -> None:
    run = tmp_path / "a"
    first = start(run)
    assert first.line() == "owns"
    second = start(run)
    said = second.communicate()[0]
    assert second.returncode == 1
    assert f"{run} belongs to process {first.pid} on " in said
    assert said.rstrip().endswith("which is running: choose another run.dir, or end that process first")
    resumed = start(run, wait_s=999)
    assert resumed.line().endswith("waiting for its end, at most 999 s (Ctrl-C to give up)")
    first.communicate("")
    assert resumed.line() == "owns"
    resumed.communicate("")
    assert not run.exists()  # nobody has written anything


def test_when_the_owner_is_killed_one_of_those_that_wait_gets_the_folder(
    tmp_path: Path, start: Callable[..., Owner]
) -> None:
    first = start(tmp_path / "a")
    assert first.line() == "owns"
    waiting = [start(tmp_path / "a", wait_s=999) for _ in range(2)]
    for process in waiting:
        assert f"belongs to process {first.pid} on" in process.line()
    first.kill()  # and not waited for: it stays a zombie
    end = time.monotonic() + 60
    while not (found := [p for p in waiting if owner_of(tmp_path / "a").get("pid") == p.pid]):
        assert time.monotonic() < end
        time.sleep(0.01)
    assert found[0].line() == "owns"
    assert start(tmp_path / "a").wait(60) == 1
    found[0].communicate("")
    (left,) = set(waiting) - set(found)
    assert left.line() == "owns"


def test_an_owner_that_is_stopped_keeps_its_folder(tmp_path: Path, start: Callable[..., Owner]) -> None:
    first = start(tmp_path / "a")
    assert first.line() == "owns"
    first.send_signal(signal.SIGSTOP)
    resumed = start(tmp_path / "a", wait_s=0.3)
    assert "which is running: choose another run.dir" in resumed.communicate()[0]
    assert owner_of(tmp_path / "a")["pid"] == first.pid


def test_of_many_that_begin_and_end_at_once_one_at_a_time_owns_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, "LOOK_S", 0.0001)
    owners: list[int] = []
    times = []

    def work() -> None:
        for _ in range(40):
            with owning(tmp_path / "a", Mock(), wait=True):
                owners.append(1)
                times.append(len(owners))
                owners.pop()

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert times == [1] * 320
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("left", [b"", b'{"pid": 12, "ho', b"\0\xff", b"12"])
def test_what_a_crash_has_left_of_the_file_is_no_owner(left: bytes, tmp_path: Path) -> None:
    (tmp_path / "owner.json").write_bytes(left)
    with owning(tmp_path, Mock(side_effect=AssertionError), wait=False):
        assert owner_of(tmp_path)["pid"] == os.getpid()
        (tmp_path / "owner.json").write_bytes(left)  # by a full disk
        with pytest.raises(ConfigError, match=f"{tmp_path} belongs to another process, which is running"):
            owning(tmp_path, print, wait=False).__enter__()


def test_a_disk_without_locks_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(errno.ENOLCK, "No locks available")))
    said: list[str] = []
    with owning(tmp_path, said.append, wait=False):
        pass
    (text,) = said
    assert text.startswith(
        f"{tmp_path} is on a disk without locks ([Errno {errno.ENOLCK}] No locks available): nothing"
    )
