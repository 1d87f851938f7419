"""Score rollouts: call every configured reward with a deadline. An error is never counted as a number.

Plain functions are called in worker processes, because a thread that hangs can't be ended. A request goes to a worker
pickled; the answer comes back as one line of JSON, because a reward may have run code that a model wrote.
"""

import asyncio
import contextlib
import dataclasses
import importlib
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from hocket.config import RewardsConfig
from hocket.errors import ConfigError, RewardError
from hocket.processes import die_with_parent
from hocket.registry import PLUGIN_PREFIX, load_plugins
from hocket.rewards.base import REWARDS, Reward, as_score, bind, call, failure, no_score
from hocket.types import Group, Rollout, Score

MAX_WORKERS = 4
START_TIMEOUT_S = 120.0
_MAIN = "from hocket.rewards.scorer import work; work()"


class RewardScorer:
    """The rewards of one config section; a context manager, because it may own up to MAX_WORKERS processes."""

    def __init__(self, config: RewardsConfig) -> None:
        self._timeout_s = config.timeout_s
        self._rewards = [bind(name, spec.weight, spec.model_extra or {}) for name, spec in config.functions.items()]
        in_workers = [reward for reward in self._rewards if reward.runs == "worker"]
        self._modules = dict.fromkeys(module for one in in_workers for module in (*one.imports, _module_of(one)))
        # Each asks one worker. Never shut down: a worker dies with the thread that started it.
        self._threads = ThreadPoolExecutor(min(MAX_WORKERS, os.cpu_count() or 1), "reward")
        self._workers: dict[int, Worker] = {}  # by thread
        self._unusable: str | None = None  # why no worker can be started any more

    def __enter__(self) -> "RewardScorer":
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
        task = asyncio.ensure_future(coroutine)
        try:
            await asyncio.wait({task}, timeout=self._timeout_s)
            return as_score(task.result()) if task.done() else no_score(f"no result within {self._timeout_s:g} s")
        finally:
            if not task.done():
                task.cancel()
                # Look at its exception: asyncio logs one that was never retrieved.
                task.add_done_callback(lambda task: task.cancelled() or task.exception())

    def _ask_worker(self, request: bytes) -> Score:
        """Ask this thread's worker, which is started first if there is none or if it was lost."""
        thread = threading.get_ident()
        if self._unusable is None and (thread not in self._workers or self._workers[thread].ended):
            worker = self._workers[thread] = Worker(self._modules)
            if problem := worker.ask(b"", START_TIMEOUT_S).error:  # nor can the next one load it
                self._unusable = self._unusable or f"its worker process can't load it: {problem}"
            if self._unusable is not None:  # or the rewards were closed meanwhile
                worker.kill()
        return no_score(self._unusable) if self._unusable else self._workers[thread].ask(request, self._timeout_s)


class Worker:
    """A process that has loaded modules (names, or paths of plugins) and calls their rewards, one at a time."""

    def __init__(self, modules: Iterable[str]) -> None:
        self.ended = False
        self._socket, theirs = socket.socketpair()
        self._process = subprocess.Popen(
            [sys.executable, "-c", _MAIN, str(theirs.fileno()), str(os.getpid()), *modules],
            pass_fds=[theirs.fileno()],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            stdin=subprocess.DEVNULL,
            stdout=2,  # a reward that prints must not write into the command's own output
            start_new_session=True,  # all that a reward starts is killed with its worker
        )
        theirs.close()

    def ask(self, request: bytes, timeout_s: float) -> Score:
        """Send a pickled (reward name, arguments), b"" to load; return the answer. A worker that is late is killed."""
        deadline, answer = time.monotonic() + timeout_s, b""
        try:
            self._socket.settimeout(timeout_s)
            self._socket.sendall(request)
            while not answer.endswith(b"\n"):
                self._socket.settimeout(max(deadline - time.monotonic(), 1e-3))
                if not (received := self._socket.recv(1 << 16)):
                    raise EOFError
                answer += received
            return as_score(Score(**json.loads(answer)))
        except TimeoutError:
            problem = f"no result within {timeout_s:g} s; its worker process was ended"
        except (EOFError, OSError):
            problem = "its worker process ended"
            with contextlib.suppress(subprocess.TimeoutExpired):
                problem += f" with exit code {self._process.wait(1)}"
        except (ValueError, TypeError):
            problem = "its worker process answered with something else than a result"
        self.kill()
        return no_score(problem)

    def kill(self) -> None:
        if self.ended:
            return  # by now the pid may be another process's
        self.ended = True
        with contextlib.suppress(ProcessLookupError):  # it ended by itself and left nothing
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(timeout=10)
        self._socket.close()


def work() -> None:
    """Run a worker process; its arguments are the file descriptor of a socket, the parent's pid, and the modules."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that owns this one
    die_with_parent(int(sys.argv[2]), signal.SIGKILL)
    stream = socket.socket(fileno=int(sys.argv[1])).makefile("rwb")
    score = call(_load, {"modules": sys.argv[3:]})
    while True:
        stream.write(json.dumps(dataclasses.asdict(score)).encode() + b"\n")
        stream.flush()
        try:
            name, arguments = pickle.load(stream)
        except EOFError:
            return
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
