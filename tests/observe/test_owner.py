"""One process at a time owns a run folder: two live ones, a stopped one, a killed one, and disks without locks."""

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hocket.errors import ConfigError
from hocket.observe import owner
from hocket.observe.owner import owning
from support.processes import ROOT

PROGRAM = """
import os, sys, time
from pathlib import Path
from hocket.observe import owner
run, wait, patience = sys.argv[1:]

owner.PATIENCE_S, owner.LOOK_S = float(patience), 0.1
with owner.owning(Path(run), lambda text: print(text, flush=True), wait=wait == "wait"):
    if not os.fork():  # as a loader of data, which may outlive the run
        os.close(1)
        sys.stdin.read()
        os._exit(0)
    print("owns", flush=True)
    sys.stdin.read()
"""


class Owner(subprocess.Popen[str]):
    """A process that owns the folder until its standard input ends."""

    def __init__(self, run: Path, *, wait: bool, patience_s: float = 999) -> None:
        super().__init__(
            [sys.executable, "-c", PROGRAM, str(run), "wait" if wait else "-", str(patience_s)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        )  # fmt: skip

    def line(self) -> str:
        assert self.stdout is not None
        return self.stdout.readline().rstrip()


@pytest.fixture
def start() -> Iterator[Callable[..., Owner]]:
    with contextlib.ExitStack() as stack:

        def start(run: Path, **options: object) -> Owner:
            process = stack.enter_context(Owner(run, **options))  # type: ignore[arg-type]
            stack.callback(process.kill)
            return process

        yield start


def test_a_second_run_is_told_who_has_the_folder_and_a_third_gets_it_at_the_end(
    tmp_path: Path, start: Callable[..., Owner]
) -> None:
    run = tmp_path / "a"
    first = start(run, wait=False)
    assert first.line() == "owns"
    second = start(run, wait=False)
    text = second.communicate()[0]
    assert second.returncode == 1
    assert f"{run} belongs to process {first.pid} on " in text
    assert text.rstrip().endswith("which is running: choose another run.dir, or end that process first")
    resumed = start(run, wait=True)
    assert resumed.line().endswith("waiting up to 999 s for its end (Ctrl-C to give up)")
    first.communicate("")
    assert resumed.line() == "owns"
    resumed.communicate("")
    assert not run.exists()  # nobody has written anything


def test_when_the_owner_is_killed_one_of_those_that_wait_gets_the_folder(
    tmp_path: Path, start: Callable[..., Owner]
) -> None:
    run = tmp_path / "a"
    first = start(run, wait=True)
    assert first.line() == "owns"
    second = start(run, wait=True)
    assert f"belongs to process {first.pid} on" in second.line()
    first.kill()  # and not waited for: it stays a zombie, whose child lives
    assert second.line() == "owns"
    assert _owner(run)["pid"] == second.pid
    third = start(run, wait=False)
    assert f"belongs to process {second.pid} on" in third.communicate()[0]


def test_an_owner_that_is_stopped_keeps_its_folder(tmp_path: Path, start: Callable[..., Owner]) -> None:
    first = start(tmp_path / "a", wait=False)
    assert first.line() == "owns"
    first.send_signal(signal.SIGSTOP)
    resumed = start(tmp_path / "a", wait=True, patience_s=0.3)
    assert "waiting up to 0.3 s" in resumed.line()
    assert "which is running: choose another run.dir" in resumed.communicate()[0]


@pytest.mark.parametrize("text", [b"", b'{"pid": 12, "ho', b"\0\xff", b"12"])
def test_what_a_killed_owner_or_a_full_disk_left_is_in_nobodys_way(text: bytes, tmp_path: Path) -> None:
    (tmp_path / "owner.json").write_bytes(text)
    (tmp_path / "owner.lock").touch()
    with owning(tmp_path, print, wait=False):
        assert _owner(tmp_path)["pid"] == os.getpid()
        (tmp_path / "owner.json").write_bytes(text)
        with pytest.raises(ConfigError, match=f"^{tmp_path} belongs to another process, which"):
            owning(tmp_path, print, wait=False).__enter__()
    assert not tmp_path.exists()


def test_the_folder_of_a_run_that_wrote_something_stays(tmp_path: Path) -> None:
    with owning(tmp_path / "a", print, wait=False):
        (tmp_path / "a" / "metrics.jsonl").touch()
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["metrics.jsonl"]


def test_a_disk_without_locks_is_named_and_a_resumed_run_does_not_wait_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", flock)
    with pytest.raises(ConfigError, match=r"can't be locked \(No locks available\): mount its file system with locks"):
        owning(tmp_path, print, wait=True).__enter__()


@pytest.mark.filterwarnings("ignore:flock not supported")
def test_on_a_disk_that_knows_no_locks_the_file_itself_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr("fcntl.flock", flock)
    monkeypatch.setattr(owner, "LOOK_S", 0.1)
    second = owning(tmp_path / "a", print, wait=False)
    message = f"belongs to process {os.getpid()} on"
    with owning(tmp_path / "a", print, wait=False), pytest.raises(ConfigError, match=message):
        second.__enter__()
    assert not (tmp_path / "a").exists()


def _owner(run: Path) -> dict[str, object]:
    return dict(json.loads((run / "owner.json").read_text()))
