"""hocket commands as real processes that a test can watch, signal, kill and start again."""

import atexit
import collections
import contextlib
import json
import multiprocessing.forkserver
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
import unittest.mock
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import httpx
import psutil

ROOT = Path(__file__).parents[2]
FORK_SERVER: Any = multiprocessing.forkserver._forkserver  # type: ignore[attr-defined]
FORKS = "HOCKET_TEST_FORKS"
"""Variable of a forked program whose own `Process`es are forked, too."""
EPOCH = 2048
"""Prompts of the quickstart task."""
START_S = 300.0
"""An engine starts in 20 s on two idle cores; a busy machine may take many times that."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(condition: Callable[[], Any], what: str, seconds: float = START_S, poll_s: float = 0.05) -> Any:
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, f"not in {seconds:g} s: {what}"
        time.sleep(poll_s)
    return value


def is_gone(pid: int | str) -> bool:
    """Return whether a process has ended, waited for or not."""
    try:
        return psutil.Process(int(pid)).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def start_fork_server() -> str:
    """Starts what forks for this process, unless one is used already; returns its address."""
    FORK_SERVER.set_forkserver_preload(["support.preload"])
    with unittest.mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):  # where it looks for preload
        FORK_SERVER.ensure_running()
    return str(FORK_SERVER._forkserver_address)


def use_fork_server(address: str) -> None:
    """Uses the fork server that another process has started, and ends."""
    FORK_SERVER._forkserver_address = address
    if FORK_SERVER._forkserver_alive_fd is None:  # which the other one reads
        FORK_SERVER._forkserver_alive_fd = os.pipe()[1]
    FORK_SERVER.ensure_running = lambda: None


class Forked:
    """A Python program in a process like any other, but for its imports, which a fork server has done (preload.py).

    It has what this file uses of a subprocess.Popen. It hides what libraries read from the command's own environment
    while they are imported, its sys.path, which is that of the tests, and the end of the interpreter: only atexit's
    functions run. Tests of how a command starts and ends (e2e/test_runs.py, server/test_stopping.py) and of the pages'
    commands start them for real; one in e2e/test_runs.py compares a run of each kind.
    """

    def __init__(self, command: Sequence[str], log: Path, variables: dict[str, str]) -> None:
        """Starts a program with its arguments; `variables` are its whole environment."""
        what = (list(command), str(log), variables, start_fork_server())
        # A daemon, or a test process that ends would wait for it.
        self._process = multiprocessing.get_context("forkserver").Process(target=_run, args=what, daemon=True)
        self._process.start()
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout_s: float | None = None) -> int:
        self._process.join(timeout_s)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a forked command", timeout_s or 0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _run(command: list[str], log: str, variables: dict[str, str], fork_server: str) -> None:
    vars(multiprocessing.current_process())["_config"]["daemon"] = False  # it may start others
    use_fork_server(fork_server)
    if FORKS in variables:
        Process.forked = True
        _fork_children()
    os.setsid()
    os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND), 1)
    os.dup2(1, 2)
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(ROOT)
    sys.argv = command
    sys.path.insert(0, str(Path(command[0]).parent))
    try:
        runpy.run_path(command[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()


def _fork_children() -> None:
    """Have a launch in this process fork its servers and ranks."""
    from hocket import launch
    from hocket.commands import parts

    real = launch.Child

    class Child(real):  # type: ignore[misc, valid-type]
        def __init__(self, command: Sequence[str], *, env: Mapping[str, str], log: Path | None = None) -> None:
            self.log, self.begin = log, 0
            if log is not None:
                log.parent.mkdir(parents=True, exist_ok=True)
                log.touch()
            output = log or os.readlink("/proc/self/fd/1")
            self._forked = Forked(["run.py", *command[2:]], Path(output), {**os.environ, **env})
            self.pid = self._forked.pid
            self.returncode = None
            self.poll, self.wait, self.send_signal = self._forked.poll, self._forked.wait, self._forked.send_signal

        def __getattribute__(self, name: str) -> Any:
            return self.poll() if name == "returncode" else super().__getattribute__(name)

        def __del__(self) -> None: ...

    def child(*args: Any, sockets: Sequence[socket.socket] = (), **named: Any) -> Any:
        """Start what gets sockets for real: a fork server does not hand them on."""
        return real(*args, sockets=sockets, **named) if sockets else Child(*args, **named)

    launch.Child = parts.Child = child  # type: ignore[assignment, misc]


def started(mark: str) -> set[str]:
    """Return the processes of this machine that have the mark, but for this one."""
    found: set[str] = set()
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            found |= {path.parts[2]} if mark in path.read_text(errors="replace") else set()
        except OSError:
            continue
    return found - {str(os.getpid())}


class Process:
    """One hocket command with all it starts, or one of another `program`; `log` has its output."""

    forked = False  # from a process that has done its imports

    def __init__(
        self, command: Sequence[str], log: Path, *, program: Sequence[str] = ("run.py",), **environment: str
    ) -> None:
        self.log = log
        self.seen: set[psutil.Process] = set()
        with log.open("ab") as output:
            if self.forked and program[0] != "-c":
                variables = os.environ | environment
                self.popen: Forked | subprocess.Popen[bytes] = Forked([*program, *command], log, variables)
            else:
                self.popen = subprocess.Popen(
                    [sys.executable, *program, *command],
                    cwd=ROOT,
                    env=os.environ | environment,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Kill whatever is left of it."""
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGKILL)
        self.popen.wait(30)

    def members(self) -> list[psutil.Process]:
        """The process and everything below it, parents first."""
        try:
            me = psutil.Process(self.popen.pid)
            found = [me, *me.children(recursive=True)]
        except psutil.NoSuchProcess:
            found = []
        self.seen |= set(found)
        return found

    def signal(self, number: int) -> None:
        """Sends a signal to all of its processes at once, as a node that dies or freezes does."""
        for process in self.members():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def kill(self) -> None:
        """Kills the process itself only: what it started has to notice."""
        self.members()
        self.popen.kill()
        self.popen.wait(30)

    def assert_gone(self, seconds: float = 60.0) -> None:
        """Fails where anything it ever started is left."""
        assert self.seen
        _, alive = psutil.wait_procs(self.seen, timeout=seconds)
        left = []
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.status() != psutil.STATUS_ZOMBIE:
                    left.append((process, process.cmdline()))
        assert left == []

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_for(self, condition: Callable[[], Any], what: str) -> None:
        """Wait for a condition that comes true while the process runs; fail with its output."""

        def reached() -> bool:
            self.members()
            assert self.popen.poll() is None or condition(), "it has ended"
            return bool(condition())

        try:
            wait_for(reached, what)
        except AssertionError as error:
            raise AssertionError(f"{error}; it said:\n{self.output()}") from None

    def wait_end(self, seconds: float = START_S) -> int:
        """Return the exit status; remember every process that was seen below it."""
        end = time.monotonic() + seconds
        while self.popen.poll() is None:
            self.members()
            assert time.monotonic() < end, f"still running after {seconds:g} s:\n{self.output()}"
            time.sleep(0.1)
        return int(self.popen.wait())

    def end(self) -> None:
        """End it as its user does; fail where it ends otherwise than well, or leaves a process."""
        self.members()
        self.popen.send_signal(signal.SIGTERM)
        try:
            assert self.popen.wait(60) == 0, self.output()
        finally:
            self.popen.kill()
        self.assert_gone()


class Command(Process):
    """A hocket command, started where the imports are done."""

    forked = True


class Server(Command):
    """A generation server on a port of its own, which keeps that port over restarts."""

    starts_engine = True

    def __init__(self, folder: Path, port: int, *settings: str) -> None:
        self.folder, self.port, self.settings = folder, port, settings
        self.url = f"http://127.0.0.1:{port}"
        super().__init__(
            [
                "serve",
                "config/sort.yaml",
                f"server.port={port}",
                f"run.dir={folder}/runs/a",
                "server.kv_cache_mib=64",
                *settings,
            ],
            folder / f"server-{port}.log",
        )

    def health(self) -> dict[str, Any] | None:
        try:
            return dict(httpx.get(f"{self.url}/health", timeout=5).json())
        except httpx.TransportError:
            return None

    def wait_ready(self) -> "Server":
        self.wait_for(lambda: (health := self.health()) and health["status"] == "ready", "the server is ready")
        return self

    def wait_until(self, condition: Callable[[dict[str, Any]], bool], what: str) -> None:
        wait_for(lambda: (health := self.health()) is not None and condition(health), what, 120, poll_s=0.002)

    def again(self) -> "Server":
        """Starts it again on its port."""
        return Server(self.folder, self.port, *self.settings)


class Run(Command):
    """A trainer on config/sort.yaml, against given servers."""

    def __init__(self, folder: Path, name: str, servers: Sequence[Server], *settings: str, **environment: str) -> None:
        self.dir = folder / "runs" / name
        super().__init__(
            [
                "train",
                "config/sort.yaml",
                f"run.dir={self.dir}",
                f"server.urls=[{','.join(server.url for server in servers)}]",
                "eval.num_prompts=0",
                *settings,
            ],
            folder / f"{name}.log",
            **environment,
        )

    def steps(self) -> list[dict[str, Any]]:
        """Metrics of the finished steps."""
        with contextlib.suppress(FileNotFoundError):
            whole, _, _ = (self.dir / "metrics.jsonl").read_text().rpartition("\n")  # the last line may be half written
            return [line for line in map(json.loads, whole.splitlines()) if line["step"] > 0]
        return []

    def wait_step(self, number: int) -> None:
        self.wait_for(lambda: len(self.steps()) >= number, f"step {number}")

    def assert_whole(self, num_steps: int, prompts: int, group_size: int, max_staleness: int = 0) -> None:
        """Every step has every rollout exactly once, of different prompts, sampled from new enough weights only."""
        steps = self.steps()
        assert [step["step"] for step in steps] == list(range(1, num_steps + 1))
        trained: list[str] = []
        for step in steps:
            assert step["staleness/max"] <= max_staleness
            assert max_staleness or step.get("train/logprob_gap", 0.0) < 1e-3
            rows = (self.dir / "rollouts" / f"step_{int(step['step']):06d}.jsonl").read_text().splitlines()
            ids = [json.loads(row)["id"] for row in rows]
            assert len(ids) == len(set(ids)) == prompts * group_size
            trained += {json.loads(row)["prompt_id"] for row in rows}
        # The data comes around again after EPOCH prompts: nobody may be an epoch ahead of another.
        times = collections.Counter(trained)
        assert len(trained) == num_steps * prompts
        assert len(times) == min(EPOCH, len(trained))
        assert max(times.values()) == -(-len(trained) // EPOCH)
        assert min(times.values()) >= len(trained) // EPOCH
