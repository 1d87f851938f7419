"""Call rewards in worker processes, because a thread that hangs can't be ended.

A worker process has two pipes. Requests go in: pickles of (function, size, of_group), where the
call of the function gives `size` scores. Answers come out as JSON, the list of the scores, so that
this process unpickles nothing that a reward may have written.
"""

import contextlib
import dataclasses
import importlib
import itertools
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
from asyncio import get_running_loop
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import IO, Any

from hocket.common.processes import OVER_LIMIT, contained, without_secrets
from hocket.common.registry import PLUGIN_PREFIX, load_plugins
from hocket.errors import ConfigError
from hocket.rewards.base import REWARDS, Reward
from hocket.rewards.runners import START_TIMEOUT_S, Call, Inline, Runner, clocked
from hocket.rewards.scores import LateError, NoScoreError, as_score, as_scores, failure
from hocket.types import Score

NUM_WORKERS = min(4, os.cpu_count() or 1)
KILL_TIMEOUT_S = 30.0  # seconds for a worker and its descendants to end, once they are killed
TEAR_DOWN_S = 5.0  # seconds for a worker's classes to leave their contexts
# Limits of one worker and all processes that it starts.
MAX_PROCESSES, MAX_MIB = 256, 8192
MAX_ANSWER = 1 << 16  # bytes of an answer, for each of its scores
MAX_LINES = 1000  # number of lines that all workers together may print
MAX_LINE = 1 << 12  # bytes of a printed line


class Workers(Runner):
    """Calls rewards in NUM_WORKERS processes, each of which calls one at a time.

    A process belongs to a thread, which sends it requests, and replaces it when it has ended.
    """

    def __init__(self, rewards: Sequence[Reward]) -> None:
        # What each worker imports at its start; a dict serves as a set that keeps the order.
        modules = dict[str, None]()
        for reward in rewards:
            modules |= dict.fromkeys(reward.imports)
            modules[_module_of(reward)] = None
        self._load_request = pickle.dumps((partial(_load, list(modules)), 1, False))  # one score
        has_class = any(reward.is_class for reward in rewards)
        self._tear_down_s = TEAR_DOWN_S if has_class else 0.0
        self._line_numbers = itertools.count(1)  # numbers the printed lines of all workers
        self._unusable = ""  # why no worker can be started any more
        # Never shut down: the kernel ends a worker with the thread that started it.
        self._threads = ThreadPoolExecutor(NUM_WORKERS, "reward")
        self._by_thread = dict[int, Worker]()
        # Have all workers load their modules now, before the first call waits for it.
        if rewards:
            for _ in range(NUM_WORKERS):
                self._threads.submit(self._worker)

    async def call(self, call: Call) -> list[Score]:
        """Make a call in the next free worker. Returns its scores.

        A cancelled call goes on in its worker until it ends, or is late.
        """
        function = partial(_call, call.reward.name, call.reward.options, call.arguments)
        request = pickle.dumps((function, call.size, call.reward.of_group))
        return await get_running_loop().run_in_executor(self._threads, self._ask, call, request)

    def close(self) -> None:
        self._unusable = "the rewards are closed"
        for worker in list(self._by_thread.values()):
            worker.kill(self._tear_down_s)

    def _ask(self, call: Call, request: bytes) -> list[Score]:
        worker = self._worker()
        with clocked(call.seconds):
            return worker.ask(request, call.timeout_s, call.size)

    def _worker(self) -> "Worker":
        """Get the worker of this thread; start one if there is none, or if it has ended.

        Raises NoScoreError where none can be started, or they were closed.
        """
        if self._unusable:
            raise NoScoreError(self._unusable)
        thread = threading.get_ident()
        worker = self._by_thread.get(thread)
        if worker is not None and worker.is_alive():
            return worker
        worker = self._by_thread[thread] = Worker(self._line_numbers)
        try:
            (loaded,) = worker.ask(self._load_request, START_TIMEOUT_S, 1)
            problem = loaded.error
        except NoScoreError as error:
            problem = str(error)
        if problem and not self._unusable:  # the next worker could not load it either
            self._unusable = f"its worker process can't load it: {problem}"
        if self._unusable:  # for this problem, or as the rewards were closed meanwhile
            worker.kill()
            raise NoScoreError(self._unusable)
        return worker


class Worker:
    """A process that calls rewards, one call at a time.

    `line_numbers` numbers the lines that it prints, together with those of other workers.
    """

    def __init__(self, line_numbers: Iterator[int]) -> None:
        requests, self._requests = Pipe(duplex=False)
        self._answers, answers = Pipe(duplex=False)
        variables = without_secrets()
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        # Close this process's copies of the worker's ends: while they are open, the pipes would
        # not show that the worker has ended.
        with requests, answers:
            worker_ends = requests.fileno(), answers.fileno()
            program = f"from hocket.rewards.workers import work; work{worker_ends}"
            # Not a multiprocessing.Process: it would have this process's environment, and would
            # import a user's script once more.
            self._process = subprocess.Popen(
                contained([sys.executable, "-c", program], MAX_PROCESSES, MAX_MIB),
                pass_fds=worker_ends,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches this process alone, which ends its workers
            )
        output = self._process.stdout
        threading.Thread(target=_show, args=(output, line_numbers), daemon=True).start()

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, request: bytes, timeout_s: float, size: int) -> list[Score]:
        """Send a request, and wait for its `size` scores.

        Kills a worker that gives no such answer, and raises NoScoreError; LateError if it took
        longer than `timeout_s`.
        """
        is_late = False

        def kill_late() -> None:
            nonlocal is_late
            is_late = True
            self.kill()

        # Not `poll(timeout_s)`: a worker may hang while it reads a request or writes an answer.
        timer = threading.Timer(timeout_s, kill_late)
        timer.daemon = True
        timer.start()
        has_ended = False
        try:
            self._requests.send_bytes(request)
            answer = json.loads(self._answers.recv_bytes(MAX_ANSWER * size))
            scores = [as_score(Score(**fields)) for fields in answer]
            if len(scores) == size:
                return scores
        except (EOFError, BrokenPipeError):
            has_ended = True
        except Exception:  # noqa: BLE001, S110 - no answer may end the run
            pass
        finally:
            timer.cancel()
        problem = "answered with something else than a result"
        if has_ended:
            problem = self._describe_end()
        self.kill()
        if is_late:
            raise LateError(f"no result within {timeout_s:g} s; its worker process was ended")
        raise NoScoreError(f"its worker process {problem}")

    def _describe_end(self) -> str:
        try:
            code = self._process.wait(1)
        except subprocess.TimeoutExpired:
            return "ended"
        if code == OVER_LIMIT:
            return f"ended: it took more than {MAX_MIB} MiB or {MAX_PROCESSES} processes"
        return f"ended with exit code {code}"

    def kill(self, tear_down_s: float = 0.0) -> None:
        """Kill the worker and all processes that it has started.

        Before that its rewards have `tear_down_s` to release what they hold.
        """
        if tear_down_s:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._requests.close()  # a worker that is idle ends, and leaves its contexts
                self._process.wait(tear_down_s)
        self._process.terminate()
        self._process.send_signal(signal.SIGCONT)  # a reward may have stopped it
        try:
            self._process.wait(KILL_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()


def _show(output: IO[bytes], line_numbers: Iterator[int]) -> None:
    """Copy a worker's output to the console, up to line MAX_LINES of all workers.

    Further lines are read, or the worker would wait until its pipe has room.
    """
    with output:
        while True:
            line = output.readline(MAX_LINE)
            if not line:
                return
            number = next(line_numbers)
            if number > MAX_LINES:
                line = b"rewards have printed more: it is not shown\n"
            if number <= MAX_LINES + 1:
                with contextlib.suppress(OSError):  # the console may be closed
                    os.write(2, line)


# Below is what runs in a worker process.
_IN_WORKER = Inline()


def work(requests_fd: int, answers_fd: int) -> None:
    """Answer requests until their pipe is closed: the program of a worker process."""
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    requests = Connection(requests_fd, writable=False)
    answers = Connection(answers_fd, readable=False)
    pid = os.getpid()
    with contextlib.closing(_IN_WORKER), contextlib.suppress(EOFError):
        while True:
            function, size, of_group = requests.recv()
            try:
                scores = as_scores(function(), size, of_group)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - it is the rollout's error
                scores = [failure(error)] * size
            if os.getpid() != pid:  # a reward has forked, and returned in both processes
                os._exit(0)
            answer = json.dumps([dataclasses.asdict(score) for score in scores])
            answers.send_bytes(answer.encode())


def _call(name: str, options: Mapping[str, Any], arguments: Mapping[str, Any]) -> Any:
    """Call a reward: a worker finds the function by its name, and binds the options itself."""
    return _IN_WORKER.now(dataclasses.replace(REWARDS.get(name), options=options), arguments)


def _load(modules: Sequence[str]) -> float:
    """Import modules and plugin files. Returns a score, as every request must."""
    for module in modules:
        if module.endswith(".py"):
            load_plugins([module])
        else:
            importlib.import_module(module)
    return 0.0


def _module_of(reward: Reward) -> str:
    """Find what a worker must import to have a reward: a module, or a plugin's file.

    Raises ConfigError for a function that no import reaches.
    """
    module = reward.function.__module__
    name = reward.function.__qualname__
    if module == "__main__" or "<locals>" in name:
        raise ConfigError(
            f"reward {reward.name!r} runs in a worker process, which can't reach {module}.{name}; "
            "define it at the top level of a Python file named under plugins:, or register it with "
            "inline=True"
        )
    if module.startswith(PLUGIN_PREFIX):
        return str(sys.modules[module].__file__)
    return module
