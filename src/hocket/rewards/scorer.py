"""Score rollouts: call every configured reward with a deadline. An error is never counted as a number.

Plain functions are called in worker processes, because a thread that hangs can't be ended. A request goes to a worker
pickled: 16 characters that no other has, then (reward name, arguments). The answer is one line of JSON that begins with
them: a reward may run code that a model wrote, and what that writes there is no answer.
"""

import asyncio
import contextlib
import importlib
import itertools
import json
import math
import os
import pickle
import random
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import IO, TYPE_CHECKING, Any

from hocket.errors import ConfigError, RewardError
from hocket.processes import OVER_LIMIT, kill_with_parent, without_secrets
from hocket.registry import PLUGIN_PREFIX, load_plugins
from hocket.rewards.base import REWARDS, Reward, as_score, bind, call, failure, no_score
from hocket.types import Group, Rollout, Score

if TYPE_CHECKING:
    from hocket.config import RewardsConfig  # its import would take most of a worker's start

NUM_WORKERS = min(4, os.cpu_count() or 1)
START_TIMEOUT_S, KILL_TIMEOUT_S = 120.0, 30.0
MAX_PROCESSES, MAX_MIB = 256, 8192  # of one worker and all that it starts
MAX_ANSWER = 1 << 16  # bytes
MAX_LINES, MAX_LINE = 1000, 1 << 12  # lines that all rewards may print, bytes of one
_MAIN = "from hocket.rewards.scorer import work; work()"


class RewardScorer:
    """The rewards of one config section; a context manager, because it may own NUM_WORKERS processes."""

    def __init__(self, config: "RewardsConfig") -> None:
        self._timeout_s = config.timeout_s
        self._rewards = [bind(name, spec.weight, spec.model_extra or {}) for name, spec in config.functions.items()]
        in_workers = [reward for reward in self._rewards if reward.runs == "worker"]
        self._modules = dict.fromkeys(module for one in in_workers for module in (*one.imports, _module_of(one)))
        # Each asks one worker. Never shut down: a worker dies with the thread that started it.
        self._threads = ThreadPoolExecutor(NUM_WORKERS, "reward")
        self._workers: dict[int, Worker] = {}  # by thread
        self._printed = itertools.count(1)  # lines, by all of them
        self._unusable: str | None = None  # why no worker can be started any more

    def __enter__(self) -> "RewardScorer":
        """Start the workers, so that the first scores need not wait for them."""
        for _ in range(NUM_WORKERS if self._modules else 0):
            self._threads.submit(self._worker)
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Kill all workers; callers of busy ones get an error. May be called from any thread."""
        self._unusable = "the rewards are closed"
        for worker in list(self._workers.values()):
            worker.kill()

    async def score(self, rollout: Rollout) -> Score:
        """Return the weighted sum of the rewards and their unweighted parts; an error if one of them fails."""
        if rollout.error is not None:
            return no_score(rollout.error)
        if len(self._rewards) == 1:  # a task for each of thousands of short calls would cost more than the calls
            results = [await self._call(self._rewards[0], rollout)]
        else:
            results = await asyncio.gather(*(self._call(reward, rollout) for reward in self._rewards))
        total, parts, errors = 0.0, {}, []
        for reward, result in zip(self._rewards, results, strict=True):
            if result.error is not None:
                errors.append(f"{reward.name}: {result.error}")
                continue
            total += reward.weight * result.total
            parts[reward.name] = result.total
            parts |= {f"{reward.name}/{part}": value for part, value in result.parts.items()}
        if not math.isfinite(total):
            errors.append(f"the weighted sum is {total}")
        return no_score("; ".join(errors), parts) if errors else Score(total=total, parts=parts)

    async def _call(self, reward: Reward, rollout: Rollout) -> Score:
        arguments = reward.arguments(rollout)
        if reward.runs == "inline":
            return call(reward.function, arguments)
        try:
            if reward.runs == "worker":  # a cancelled call goes on there, up to the deadline
                request, loop = pickle.dumps((reward.name, arguments)), asyncio.get_running_loop()
                return await loop.run_in_executor(self._threads, self._ask_worker, request)
            return await self._in_time(reward.function(**arguments))
        except Exception as error:  # noqa: BLE001 - whatever a reward raises is the rollout's error
            return failure(error)

    async def _in_time(self, coroutine: Awaitable[Any]) -> Score:
        """Return the coroutine's score; one that is late or no longer wanted is cancelled but not waited for."""
        task = asyncio.ensure_future(_result(coroutine))
        try:
            await asyncio.wait({task}, timeout=self._timeout_s)
            if task.cancelled():
                return no_score("it cancelled itself")
            return task.result() if task.done() else no_score(f"no result within {self._timeout_s:g} s")
        finally:
            task.cancel()

    def _ask_worker(self, request: bytes) -> Score:
        worker = self._worker()
        return no_score(self._unusable or "") if worker is None else worker.ask(request, self._timeout_s)

    def _worker(self) -> "Worker | None":
        """Return this thread's worker, started first if there is none or if it was lost; None if it can't be used."""
        thread = threading.get_ident()
        worker = self._workers.get(thread)
        if self._unusable is None and (worker is None or not worker.ready()):
            worker = self._workers[thread] = Worker(self._modules, self._printed)
            if problem := worker.ask(b"", START_TIMEOUT_S).error:  # nor can the next one load it
                self._unusable = self._unusable or f"its worker process can't load it: {problem}"
            if self._unusable is not None:  # or the rewards were closed meanwhile
                worker.kill()
        return worker if self._unusable is None else None


async def _result(coroutine: Awaitable[Any]) -> Score:
    try:
        return as_score(await coroutine)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a reward raises is the rollout's error
        return failure(error)


class Worker:
    """A process that has loaded modules (names, or paths of plugins) and calls their rewards, one at a time."""

    def __init__(self, modules: Iterable[str], printed: Iterator[int]) -> None:
        """Start it; `printed` counts the lines that all workers print."""
        self.ended = False
        self._socket, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-c", _MAIN, str(theirs.fileno()), *modules]
            self._process = subprocess.Popen(
                kill_with_parent(command, MAX_PROCESSES, MAX_MIB),
                pass_fds=[theirs.fileno()],
                env={**without_secrets(), "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a Ctrl-C is for the process that owns this one
            )
        self._numbers = random.Random(os.urandom(16))  # the run's own are left as they are
        self._unasked = select.poll()
        self._unasked.register(self._socket, select.POLLIN)
        threading.Thread(target=_show, args=(self._process.stdout, printed), daemon=True).start()

    def ready(self) -> bool:
        """Return whether it can be asked; one that has ended, or has said something unasked, is killed."""
        if not self.ended and self._unasked.poll(0):
            self.kill()
        return not self.ended

    def ask(self, request: bytes, timeout_s: float) -> Score:
        """Send a pickled (reward name, arguments), b"" to load; return the answer. A worker without one is killed."""
        deadline, answer = time.monotonic() + timeout_s, bytearray()
        number = f"{self._numbers.getrandbits(64):016x}" if request else ""
        try:
            if self._socket.gettimeout() != timeout_s:  # a system call lets other threads go first
                self._socket.settimeout(timeout_s)
            self._socket.sendall(number.encode() + request)
            while b"\n" not in answer:
                if answer:
                    self._socket.settimeout(max(deadline - time.monotonic(), 1e-3))
                if not (received := self._socket.recv(MAX_ANSWER)):
                    raise EOFError
                answer += received
                if len(answer) > MAX_ANSWER:
                    raise ValueError
            line, unasked = answer.split(b"\n", 1)
            answers, total, parts, error = json.loads(line)
            if answers != number or unasked:
                raise ValueError
            return as_score(Score(total=total, parts=parts, error=error))
        except TimeoutError:
            problem = f"no result within {timeout_s:g} s; its worker process was ended"
        except (EOFError, OSError):
            problem = "its worker process ended"
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self._process.wait(1)
                over = f": it took more than {MAX_MIB} MiB or {MAX_PROCESSES} processes"
                problem += over if code == OVER_LIMIT else f" with exit code {code}"
        except Exception:  # noqa: BLE001 - no answer may end the run
            problem = "its worker process answered with something else than a result"
        self.kill()
        return no_score(problem)

    def kill(self) -> None:
        """Kill it and all that it has started."""
        if self.ended:
            return  # by now the pid may be another process's
        self.ended = True
        self._process.terminate()
        self._process.send_signal(signal.SIGCONT)  # a reward may have stopped it
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(KILL_TIMEOUT_S)
        with contextlib.suppress(ProcessLookupError):  # as it should be: no process of the group is left
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(KILL_TIMEOUT_S)
        self._socket.close()


def _show(output: IO[bytes], printed: Iterator[int]) -> None:
    """Show what a worker prints; drop it after MAX_LINES lines of all workers, so that none waits."""
    with output:
        while line := output.readline(MAX_LINE):
            if (number := next(printed)) > MAX_LINES:
                output.read1(1 << 16)  # type: ignore[attr-defined]
            if number > MAX_LINES + 1:
                continue
            with contextlib.suppress(OSError):  # the console is closed
                os.write(2, line if number <= MAX_LINES else b"rewards have printed more: it is not shown\n")


def work() -> None:
    """Run a worker process; its arguments are the file descriptor of a socket and the modules to load."""
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    stream, pid, number = socket.socket(fileno=int(sys.argv[1])).makefile("rwb"), os.getpid(), b""
    score = call(_load, {"modules": sys.argv[2:]})
    while True:
        if os.getpid() != pid:  # a reward has forked, and returned in both
            os._exit(0)
        stream.write(json.dumps([number.decode(), score.total, score.parts, score.error]).encode() + b"\n")
        stream.flush()
        if not (number := stream.read(16)):
            return
        name, arguments = pickle.load(stream)
        score = call(REWARDS.get(name).function, arguments)


def _load(modules: Sequence[str]) -> float:
    for module in modules:
        if module.endswith(".py"):
            load_plugins([module])
        else:
            importlib.import_module(module)
    return 0.0


def _module_of(reward: Reward) -> str:
    """Return the module or file that a worker loads to find the reward."""
    module, name = reward.function.__module__, reward.function.__qualname__
    if module == "__main__" or "<locals>" in name:
        raise ConfigError(
            f"reward {reward.name!r} runs in a worker process, which can't reach {module}.{name}; define it at the top "
            f"level of a Python file named under plugins:, or register it with inline=True"
        )
    return str(sys.modules[module].__file__) if module.startswith(PLUGIN_PREFIX) else module


def refuse_failing(groups: Sequence[Group], max_error_rate: float) -> None:
    """Raise RewardError if more than this share of the scores failed: training on the rest would mislead."""
    errors = [score.error for group in groups for score in group.scores if score.error is not None]
    num_scores = sum(len(group.scores) for group in groups)
    if len(errors) > max_error_rate * num_scores:
        raise RewardError(
            f"{len(errors)} of {num_scores} scores failed, more than rewards.max_error_rate={max_error_rate:g}; "
            f"the first: {errors[0]}"
        )
