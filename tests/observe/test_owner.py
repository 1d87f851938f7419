"""One process at a time owns a run folder: two live ones, a killed one, and one that another machine can't see."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from hocket.errors import ConfigError
from hocket.observe import owner
from hocket.observe.owner import owning
from support import fakes
from support.processes import ROOT, wait_for
from support.records import write_rows

PROGRAM = """
import select, sys, time, types
from pathlib import Path
from hocket.observe import owner
run, wait, machine, silence = sys.argv[1:]

def look(seconds):
    time.sleep(seconds)
    if Path(run + ".silent").exists():  # from now on little silence is enough
        owner.SILENCE_S = 0.2

owner.time = types.SimpleNamespace(sleep=look, monotonic=time.monotonic, strftime=time.strftime)
owner.BEAT_S, owner.LOOK_S, owner.SILENCE_S = 0.05, 0.02, float(silence)
owner._machine = lambda: machine
try:
    with owner.owning(Path(run), lambda text: print(text, flush=True), wait=wait == "wait"):
        print("owns", flush=True)
        while not select.select([sys.stdin], [], [], 0.05)[0]:
            pass  # a signal just before one long wait would not end it
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


class Owner(subprocess.Popen[str]):
    """A process that owns the folder until its standard input ends."""

    def __init__(self, run: Path, *, wait: bool, machine: str = "a", silence_s: float = 999) -> None:
        super().__init__(
            [sys.executable, "-c", PROGRAM, str(run), "wait" if wait else "-", machine, str(silence_s)],
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
    said = second.communicate()[0]
    assert second.returncode == 1
    assert f"{run} belongs to process {first.pid} on " in said
    assert said.rstrip().endswith("which is running: choose another run.dir, or end that process first")
    elsewhere = start(run, wait=False, machine="b")  # knows it by its signs of life
    assert "waiting for its end" in elsewhere.line()
    assert "which is running" in elsewhere.communicate()[0]
    resumed = start(run, wait=True)
    assert resumed.line().endswith("waiting for its end, or for 999 s of silence (Ctrl-C to give up)")
    first.communicate("")
    assert resumed.line() == "owns"
    resumed.communicate("")
    assert not run.exists()  # nobody has written anything


@pytest.mark.parametrize("machine", ["a", "b"])
def test_when_the_owner_is_killed_one_of_those_that_wait_gets_the_folder(
    machine: str, tmp_path: Path, start: Callable[..., Owner]
) -> None:
    first = start(tmp_path / "a", wait=True)
    assert first.line() == "owns"
    waiting = [start(tmp_path / "a", wait=True, machine=machine) for _ in range(2)]
    for process in waiting:
        assert f"belongs to process {first.pid} on" in process.line()
    first.kill()  # and not waited for: it stays a zombie
    if machine == "b":  # where silence is all that tells it
        (tmp_path / "a.silent").touch()
    found = wait_for(lambda: [p for p in waiting if _owner(tmp_path / "a").get("pid") == p.pid], "a new owner")
    assert found[0].line() == "owns"
    found[0].communicate("")


def test_an_owner_on_another_machine_is_gone_a_whole_silence_after_its_last_sign_of_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_rows(tmp_path / "a" / "owner.json", {"pid": 1, "host": "b", "since": "then", "process": ["b", "1"]})
    clock = fakes.Clock()

    def look(seconds: float) -> None:
        clock.now += seconds
        if clock.now <= 1030:
            os.utime(file, (clock.now, clock.now))

    monkeypatch.setattr(owner, "time", SimpleNamespace(sleep=look, monotonic=clock.monotonic, strftime=time.strftime))
    with owning(file.parent, print, wait=True):
        assert clock.now == 1030 + owner.SILENCE_S == 1090


def test_an_owner_that_is_stopped_keeps_its_folder_on_its_own_machine(
    tmp_path: Path, start: Callable[..., Owner]
) -> None:
    first = start(tmp_path / "a", wait=False)
    assert first.line() == "owns"
    first.send_signal(signal.SIGSTOP)
    resumed = start(tmp_path / "a", wait=True, silence_s=0.3)
    assert "which is running: choose another run.dir" in resumed.communicate()[0]


@pytest.mark.parametrize("left", [b"", b'{"pid": 12, "ho', b"\0\xff", b"12"])
def test_an_owner_file_that_was_cut_off_is_told_and_removed_after_its_silence(
    left: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, "SILENCE_S", 0.2)
    monkeypatch.setattr(owner, "LOOK_S", 0.02)
    (tmp_path / "owner.json").write_bytes(left)
    said: list[str] = []
    with owning(tmp_path, said.append, wait=False):
        assert _owner(tmp_path)["pid"] == os.getpid()
    (text,) = said
    assert text.startswith(f"{tmp_path}/owner.json does not say whose {tmp_path} is; waiting for its end, or for 0.2 s")


def _owner(run: Path) -> dict[str, object]:
    with contextlib.suppress(OSError, ValueError):
        return dict(json.loads((run / "owner.json").read_text()))
    return {}


def test_an_owner_that_slept_until_another_one_came_ends(tmp_path: Path, start: Callable[..., Owner]) -> None:
    first = start(tmp_path / "a", wait=False)
    assert first.line() == "owns"
    first.send_signal(signal.SIGSTOP)
    (tmp_path / "a.silent").touch()
    second = start(tmp_path / "a", wait=True, machine="b")
    assert "waiting for" in second.line()
    assert second.line() == "owns"
    first.send_signal(signal.SIGCONT)
    assert f"error: {tmp_path}/a was taken over: " in first.line()
    assert first.line() == "interrupted"
    assert first.wait(60) == 0
    assert _owner(tmp_path / "a")["pid"] == second.pid


def test_a_lock_that_changed_hands_is_put_back_and_a_resumed_run_does_not_wait_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, "SILENCE_S", 0.2)
    with owning(tmp_path, print, wait=False):
        owner._remove(tmp_path / "owner.json", "the one before")
        assert _owner(tmp_path)["pid"] == os.getpid()
        said: list[str] = []
        with pytest.raises(ConfigError, match="which is running"), owning(tmp_path, said.append, wait=True):
            pass
        assert f"belongs to process {os.getpid()} on" in said[0]
    assert not tmp_path.exists()
