"""Real child processes: they end when told to, with everything they started, and when their parent is killed."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hocket import config as config_module
from hocket import launch
from hocket.errors import ServerError
from hocket.launch import Child, refuse_dead

STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
)
WITH_CHILD = (
    "import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']);"
    "print(p.pid, flush=True); time.sleep(600)"
)


def wait_for(condition: object, seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end, "the condition did not come true in time"
        time.sleep(0.05)


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


def first_line(log: Path) -> str:
    wait_for(lambda: log.exists() and log.read_text().endswith("\n"))
    return log.read_text().splitlines()[0]


def test_a_child_that_ends_by_itself_gives_its_status_and_log(tmp_path: Path) -> None:
    child = Child(
        ["-c", "import os; print('hello', os.environ['X']); raise SystemExit(3)"],
        env={"X": "y"},
        log=tmp_path / "logs" / "a",
    )
    wait_for(lambda: child.poll() is not None)
    assert child.poll() == 3
    assert child.tail() == "hello y"
    with pytest.raises(ServerError, match=r"ended with status 3(.|\n)*hello y"):
        refuse_dead(child)


def test_stopping_a_child_ends_what_it_started_too(tmp_path: Path) -> None:
    child = Child(["-c", WITH_CHILD], env={}, log=tmp_path / "log")
    grandchild = int(first_line(tmp_path / "log"))
    refuse_dead(child)  # it runs: no error
    assert child.stop() == -signal.SIGTERM
    wait_for(lambda: gone(grandchild))


def test_a_child_that_ignores_the_signal_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "STOP_TIMEOUT_S", 1.0)
    child = Child(["-c", STUBBORN], env={}, log=tmp_path / "log")
    first_line(tmp_path / "log")
    assert child.stop() == -signal.SIGKILL


def test_a_child_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    code = (
        "import time; from pathlib import Path; from hocket.launch import Child\n"
        "inner = 'from hocket.launch import die_with_parent; die_with_parent();"
        "import os, time; print(os.getpid(), flush=True); time.sleep(600)'\n"
        f"Child(['-c', inner], env={{}}, log=Path({str(log)!r})); time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": "src"})
    try:
        child = int(first_line(log))
        parent.kill()
        parent.wait(10)
        wait_for(lambda: gone(child))
    finally:
        parent.kill()


def test_a_port_in_use_is_replaced_by_a_free_one() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        chosen = launch._free_port(config_module.load(None, [f"server.port={port}"]))
        assert chosen != port
    assert launch._free_port(config_module.load(None, [f"server.port={port}"])) == port


def test_a_run_folder_in_use_is_left_alone(tmp_path: Path) -> None:
    run_dir = tmp_path / "quickstart"
    assert launch._unused(run_dir) == run_dir
    run_dir.mkdir()
    (tmp_path / "quickstart-2").mkdir()
    assert launch._unused(run_dir) == tmp_path / "quickstart-3"
