"""Worker processes for reward functions that may hang: this side starts, asks and kills them; `main` is the other.

Python can't end a thread that hangs, but a process it can. A request goes out pickled, from this process to its own
child; the answer comes back as JSON, because the child may have run what a model wrote.
"""

import asyncio
import contextlib
import dataclasses
import importlib
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from hocket.errors import ConfigError, HocketError
from hocket.registry import PLUGIN_PREFIX, load_plugins
from hocket.rewards.base import REWARDS, Outcome, Reward, failure, outcome
from hocket.system import die_with_parent

START_TIMEOUT_S = 120.0
_KILL_TIMEOUT_S = 10.0
_MAIN = "from hocket.rewards.worker import main; main()"


class WorkerLostError(HocketError):
    """The worker is of no more use: it ended, hung, or never started. The message says which."""


class Worker:
    """One process that has loaded the given modules and calls their rewards, one at a time.

    Args:
        modules: importable names, or paths of plugin files.
    """

    def __init__(self, modules: Iterable[str]) -> None:
        self._connection, theirs = Pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-c", _MAIN, str(theirs.fileno()), str(os.getpid()), *modules],
            pass_fds=[theirs.fileno()],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            stdin=subprocess.DEVNULL,
            stdout=2,  # a reward that prints must not write into the command's own output
            start_new_session=True,  # what a reward starts is killed with its worker
        )
        theirs.close()

    def wait_ready(self) -> None:
        """Waits until the modules are loaded. Raises WorkerLostError with the reason where they can't be."""
        started = self._receive(START_TIMEOUT_S)
        if started.error is not None:
            raise WorkerLostError(f"its worker process can't load it: {started.error}")

    def call(self, request: bytes, timeout_s: float) -> Outcome:
        """Returns what the reward gives. Raises WorkerLostError where it hangs or ends its process.

        Args:
            request: pickled (reward name, arguments).
        """
        with contextlib.suppress(BrokenPipeError):  # receiving says that it ended, and how
            self._connection.send_bytes(request)
        return self._receive(timeout_s)

    def kill(self) -> None:
        """Ends the process and whatever it started; who waits for it gets WorkerLostError."""
        with contextlib.suppress(ProcessLookupError):  # it ended by itself and left nobody
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(timeout=_KILL_TIMEOUT_S)

    def _receive(self, timeout_s: float) -> Outcome:
        try:
            if not self._connection.poll(timeout_s):
                raise WorkerLostError(f"no result within {timeout_s:g} s; its worker process was ended")
            return Outcome(**json.loads(self._connection.recv_bytes()))
        except (EOFError, OSError) as error:
            raise WorkerLostError(f"its worker process ended{self._exit_code()}") from error
        except (ValueError, TypeError) as error:
            raise WorkerLostError("its worker process answered with something else than a result") from error

    def _exit_code(self) -> str:
        try:
            return f" with exit code {self._process.wait(timeout=1)}"
        except subprocess.TimeoutExpired:
            return ""


class WorkerPool:
    """At most `num_workers` workers, started when needed, replaced when lost. Usable from any event loop.

    Each thread of the pool has a worker of its own and waits for it no longer than the deadlines of start and call: a
    function that hangs costs a process, not a thread.
    """

    def __init__(self, modules: Iterable[str], num_workers: int) -> None:
        self._modules = tuple(modules)
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="hocket-reward")
        self._mine = threading.local()
        self._lock = threading.Lock()
        self._workers: set[Worker] = set()
        self._closed = False
        self._unloadable: str | None = None

    async def call(self, name: str, arguments: Mapping[str, Any], timeout_s: float) -> Outcome:
        """Returns what the reward gives; an error where it raises, hangs or ends its process."""
        if self._closed:
            return Outcome(error="the rewards are closed")
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._call, name, arguments, timeout_s)

    def close(self) -> None:
        """Ends all workers, also those that are busy."""
        with self._lock:
            self._closed = True
            for worker in self._workers:
                worker.kill()
        self._threads.shutdown(cancel_futures=True)

    def _call(self, name: str, arguments: Mapping[str, Any], timeout_s: float) -> Outcome:
        try:
            request = pickle.dumps((name, arguments))
        except Exception as error:  # noqa: BLE001 - a value of the data set may raise anything here
            return failure(error)
        worker: Worker | None = getattr(self._mine, "worker", None)
        try:
            if worker is None:
                worker = self._mine.worker = self._start()
            return worker.call(request, timeout_s)
        except WorkerLostError as error:
            if worker is not None:
                self._end(worker)
            self._mine.worker = None
            return Outcome(error=str(error))

    def _start(self) -> Worker:
        with self._lock:
            if self._closed or self._unloadable is not None:
                raise WorkerLostError(self._unloadable or "the rewards are closed")
            worker = Worker(self._modules)
            self._workers.add(worker)
        try:
            worker.wait_ready()
        except WorkerLostError as error:
            self._unloadable = str(error)  # the next one would fail alike
            self._end(worker)
            raise
        return worker

    def _end(self, worker: Worker) -> None:
        worker.kill()
        with self._lock:
            self._workers.discard(worker)


def main() -> None:
    """The worker process; its command line is the pipe's file descriptor, the parent's pid, and the modules."""
    connection, parent, modules = Connection(int(sys.argv[1])), int(sys.argv[2]), sys.argv[3:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that owns this one
    die_with_parent(parent, signal.SIGKILL)
    _send(connection, _load(modules))
    while True:
        try:
            name, arguments = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        try:
            result = outcome(REWARDS.get(name).function(**arguments))
        except Exception as error:  # noqa: BLE001 - whatever a reward raises is the rollout's error
            result = failure(error)
        _send(connection, result)


def _load(modules: Iterable[str]) -> Outcome:
    try:
        for module in modules:
            if module.endswith(".py"):
                load_plugins([module])
            else:
                importlib.import_module(module)
    except Exception as error:  # noqa: BLE001 - a module of the user's may raise anything
        return failure(error)
    return Outcome(value=0.0)


def _send(connection: Connection, result: Outcome) -> None:
    connection.send_bytes(json.dumps(dataclasses.asdict(result)).encode())


def module_of(reward: Reward) -> str:
    """Returns what a worker has to load to find the reward.

    Raises:
        ConfigError: only this process can reach the function.
    """
    module, name = reward.function.__module__, reward.function.__qualname__
    if module == "__main__" or "<locals>" in name:
        raise ConfigError(
            f"reward {reward.name!r} runs in a worker process, which can't reach {module}.{name}; define it at the top "
            f"level of a Python file named under plugins:, or register it with inline=True"
        )
    if module.startswith(PLUGIN_PREFIX):
        return str(sys.modules[module].__file__)
    return module
