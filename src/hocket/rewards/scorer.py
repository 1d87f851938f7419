"""Score rollouts, and call rewards in worker processes, because a thread that hangs can't be ended.

A request is 16 random characters, and what `work` unpickles; its answer a line of JSON that begins with them.
"""

import asyncio
import contextlib
import dataclasses
import importlib
import itertools
import json
import logging
import os
import pickle
import secrets
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import IO, TYPE_CHECKING, Any

from hocket.common.processes import OVER_LIMIT, kill_with_parent, without_secrets
from hocket.common.registry import PLUGIN_PREFIX, load_plugins
from hocket.errors import ConfigError, RewardError, door
from hocket.rewards.base import REWARDS, RetryError, Reward, bind
from hocket.rewards.runners import Call, Inline, InLoop, Runner, clock, clocked
from hocket.rewards.scores import LateError, NoScoreError, as_score, as_scores, compose, failure, no_score
from hocket.types import Group, Rollout, Score

if TYPE_CHECKING:
    from hocket.config import RewardsConfig  # would take most of a worker's start

logger = logging.getLogger("hocket")

NUM_WORKERS = min(4, os.cpu_count() or 1)
START_TIMEOUT_S = 120.0
KILL_TIMEOUT_S = 30.0
PATIENCE_S = 10.0  # without the end of a call, before it is said
FIRST_LATE, MOST_LATE = 8, 32  # late calls in a row that end the run: the first ones, later ones
TEAR_DOWN_S = 5.0
MAX_PROCESSES, MAX_MIB = 256, 8192  # of one worker and all that it starts
MAX_ANSWER = 1 << 16  # bytes
MAX_LINES, MAX_LINE = 1000, 1 << 12  # lines that all of them may print, bytes of one
_MAIN = "from hocket.rewards.scorer import work; work()"


class RewardScorer:
    """Makes scores of what some of the rewards return; raises only RewardError, to end the run."""

    def __init__(self, calls: "RewardCalls", names: Iterable[str]) -> None:
        self._calls = calls
        self._specs = {name: calls.specs[name] for name in names}

    async def score(self, rollout: Rollout) -> Score:
        (score,) = await self.score_group([rollout])
        return score

    async def score_group(self, rollouts: Sequence[Rollout]) -> tuple[Score, ...]:
        return await self.settle(rollouts, await asyncio.gather(*map(self.ask, rollouts)))

    async def ask(self, rollout: Rollout) -> dict[str, Score]:
        """Return what each reward of a single rollout gives it; {} where its episode failed."""
        if rollout.error is not None:
            return {}
        results = await self._ask([rollout], of_group=False)
        return {name: score for name, (score,) in results.items()}

    async def settle(self, rollouts: Sequence[Rollout], given: Sequence[Mapping[str, Score]]) -> tuple[Score, ...]:
        """Return the scores of a group whose rollouts were given these; ask the rewards of a group."""
        scores = [no_score(rollout.error) for rollout in rollouts]
        played = [i for i, rollout in enumerate(rollouts) if rollout.error is None]
        if played:
            results = {name: [given[i][name] for i in played] for name in given[played[0]]}
            results |= await self._ask([rollouts[i] for i in played], of_group=True)
            for i, score in zip(played, compose(self._specs, results), strict=True):
                scores[i] = score
        return tuple(scores)

    async def _ask(self, rollouts: Sequence[Rollout], *, of_group: bool) -> dict[str, list[Score]]:
        names = [name for name in self._specs if self._calls.rewards[name].of_group == of_group]
        if len(names) == 1:  # a task for each of thousands of short calls would cost more than the calls
            return {names[0]: await self._calls.ask(names[0], rollouts)}
        results = await asyncio.gather(*(self._calls.ask(name, rollouts) for name in names))
        return dict(zip(names, results, strict=True))


class RewardCalls:
    """Calls rewards, each where it runs."""

    def __init__(self, config: "RewardsConfig", names: Iterable[str]) -> None:
        self.specs = {name: config.spec(name) for name in names}
        self.rewards = {name: bind(name, spec) for name, spec in self.specs.items()}
        self.seconds = {name: clock() for name in self.specs}  # of the last calls, without what they waited for
        self._timeout_s = config.timeout_s
        self._may_fail = config.max_error_rate == 1
        self._late = dict.fromkeys(self.specs, MOST_LATE - FIRST_LATE)  # calls in a row
        self._news = dict.fromkeys(self.specs, 0.0)  # when a call ended, or this was said
        workers = Workers([one for one in self.rewards.values() if one.runs == "worker"])
        self._workers = workers.by_thread
        self._here: dict[str, Runner] = {"inline": Inline(), "worker": workers}
        self._in_loop = cache(lambda loop, name: InLoop(self.rewards[name], self.seconds))

    def __enter__(self) -> "RewardCalls":
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Kill all workers, from any thread; callers of busy ones get an error."""
        for runner in self._here.values():
            runner.close()

    async def set_up(self) -> None:
        """Set async rewards up in this event loop. Raise RewardError for the first that can't be."""
        for name in self.rewards:
            try:
                await self._runner(name).set_up()
            except NoScoreError as error:
                raise RewardError(f"reward {name!r} {error}") from error

    async def ask(self, name: str, rollouts: Sequence[Rollout]) -> list[Score]:
        reward = self.rewards[name]
        silence = asyncio.get_running_loop().call_later(PATIENCE_S, self._tell_silence, name)
        late = 0
        try:
            arguments = reward.arguments(rollouts)
            call = Call(reward, arguments, len(rollouts), self._timeout_s, self.seconds[name])
            return await self._runner(name).call(call)
        except RewardError:
            raise
        except (Exception, SystemExit) as error:
            late = isinstance(error, LateError | RetryError) * (self._late[name] + 1)
            if late == MOST_LATE and not self._may_fail:
                cure = "mend it, raise its timeout_s, or go on without its scores by rewards.max_error_rate=1"
                raise RewardError(f"reward {name!r} gives no results, call after call: {error}; {cure}") from error
            return [failure(error)] * len(rollouts)  # whatever a reward raises is the rollout's error
        finally:
            silence.cancel()
            self._late[name] = late
            self._news[name] = time.monotonic()

    def _tell_silence(self, name: str) -> None:
        now = time.monotonic()
        if now - self._news[name] >= PATIENCE_S:
            self._news[name] = now
            logger.warning("reward %r: no call has ended for %g s; its deadline is its timeout_s", name, PATIENCE_S)

    def _runner(self, name: str) -> Runner:
        runs = self.rewards[name].runs
        return self._in_loop(asyncio.get_running_loop(), name) if runs == "async" else self._here[runs]


class Workers(Runner):
    """Calls rewards in processes; each is asked by a thread of its own, and replaced when it is lost."""

    def __init__(self, rewards: Sequence[Reward]) -> None:
        self._modules = list(dict.fromkeys(path for one in rewards for path in (*one.imports, _module_of(one))))
        self._tear_down_s = max((TEAR_DOWN_S for one in rewards if one.is_class), default=0.0)
        # Never shut down: a worker dies with the thread that started it.
        self._threads = ThreadPoolExecutor(NUM_WORKERS, "reward")
        self.by_thread = dict[int, Worker]()
        self._printed = itertools.count(1)  # lines, by all of them
        self._unusable = ""  # why no worker can be started any more
        for _ in range(NUM_WORKERS if rewards else 0):
            self._threads.submit(self._worker)

    async def call(self, call: Call) -> list[Score]:
        """Return its scores; a cancelled call goes on in its worker, up to the deadline."""
        reward = call.reward
        request = pickle.dumps((_call, (reward.name, reward.options, call.arguments), call.size, reward.of_group))
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._ask, call, request)

    def close(self) -> None:
        self._unusable = "the rewards are closed"
        for worker in list(self.by_thread.values()):
            worker.kill(self._tear_down_s)

    def _ask(self, call: Call, request: bytes) -> list[Score]:
        worker = self._worker()
        with clocked(call.seconds):
            return worker.ask(request, call.timeout_s, call.size)

    def _worker(self) -> "Worker":
        """Return this thread's worker, a new one if need be. Raise NoScoreError if none can be used."""
        thread = threading.get_ident()
        if not self._unusable:
            worker = self.by_thread.get(thread)
            if worker is not None and worker.ready():
                return worker
            worker = self.by_thread[thread] = Worker(self._printed)
            try:
                (loaded,) = worker.ask(pickle.dumps((_load, self._modules, 1, False)), START_TIMEOUT_S, 1)
            except LateError as error:
                loaded = failure(error)
            if loaded.error:  # nor can the next one load it
                self._unusable = self._unusable or f"its worker process can't load it: {loaded.error}"
            if not self._unusable:
                return worker
            worker.kill()  # the rewards may have been closed meanwhile
        raise NoScoreError(self._unusable)


class Worker:
    """A process that calls rewards, one at a time."""

    def __init__(self, printed: Iterator[int]) -> None:
        self.ended = False
        self._socket, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-c", _MAIN, str(theirs.fileno())]
            self._process = subprocess.Popen(
                kill_with_parent(command, MAX_PROCESSES, MAX_MIB),
                pass_fds=[theirs.fileno()],
                env={**without_secrets(), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a Ctrl-C is for its owner
            )
        self._unasked = select.poll()
        self._unasked.register(self._socket, select.POLLIN)
        threading.Thread(target=_show, args=(self._process.stdout, printed), daemon=True).start()

    def ready(self) -> bool:
        """Return whether it can be asked; kill one that has said something unasked."""
        if self.ended or self._unasked.poll(0):
            self.kill()
            return False
        return True

    def ask(self, request: bytes, timeout_s: float, size: int) -> list[Score]:
        """Return `size` scores. A worker without an answer is killed; raise LateError for one that is late."""
        deadline = time.monotonic() + timeout_s
        number = secrets.token_hex(8)
        answer = b""
        try:
            if self._socket.gettimeout() != timeout_s:  # a system call lets other threads go first
                self._socket.settimeout(timeout_s)
            self._socket.sendall(number.encode() + request)
            while b"\n" not in answer and len(answer) <= MAX_ANSWER * size:
                if answer:
                    self._socket.settimeout(max(deadline - time.monotonic(), 1e-3))
                received = self._socket.recv(MAX_ANSWER)
                if not received:
                    raise EOFError
                answer += received
            line, unasked = answer.split(b"\n", 1)
            answers, *scores = json.loads(line)
            if (answers, unasked, len(scores)) != (number, b"", size):
                raise ValueError
            return [as_score(Score(**one)) for one in scores]  # its code may have written them itself
        except TimeoutError as error:
            self.kill()
            raise LateError(f"no result within {timeout_s:g} s; its worker process was ended") from error
        except (EOFError, OSError):
            problem = "its worker process ended"
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self._process.wait(1)
                problem += f" with exit code {code}"
                if code == OVER_LIMIT:
                    problem = f"its worker process ended: it took more than {MAX_MIB} MiB or {MAX_PROCESSES} processes"
        except Exception:  # noqa: BLE001 - no answer may end the run
            problem = "its worker process answered with something else than a result"
        self.kill()
        return [no_score(problem)] * size

    def kill(self, tear_down_s: float = 0.0) -> None:
        """Kill it and all that it has started; its rewards may tear down before."""
        if self.ended:
            return  # by now the pid may be another process's
        self.ended = True
        if tear_down_s:
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                self._socket.shutdown(socket.SHUT_WR)
                self._process.wait(tear_down_s)
        self._process.terminate()
        self._process.send_signal(signal.SIGCONT)  # a reward may have stopped it
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(KILL_TIMEOUT_S)
        with contextlib.suppress(ProcessLookupError):  # as it should be: no process of the group is left
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(KILL_TIMEOUT_S)
        self._socket.close()


def _show(output: IO[bytes], printed: Iterator[int]) -> None:
    """Show what a worker prints, up to MAX_LINES lines of all workers."""
    with output:
        while line := output.readline(MAX_LINE):
            number = next(printed)
            if number <= MAX_LINES + 1:
                with contextlib.suppress(OSError):  # the console is closed
                    os.write(2, line if number <= MAX_LINES else b"rewards have printed more: it is not shown\n")


_IN_WORKER = Inline()  # a worker's own rewards


def work() -> None:
    """Run a worker process, whose argument is the descriptor of its socket."""
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    stream = socket.socket(fileno=int(sys.argv[1])).makefile("rwb")
    pid = os.getpid()
    with contextlib.closing(_IN_WORKER):
        while number := stream.read(16):
            function, arguments, size, of_group = pickle.load(stream)
            try:
                scores = as_scores(function(*arguments), size, of_group)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a reward raises is the rollout's error
                scores = [failure(error)] * size
            if os.getpid() != pid:  # a reward has forked, and returned in both
                os._exit(0)
            stream.write(json.dumps([number.decode(), *map(dataclasses.asdict, scores)]).encode() + b"\n")
            stream.flush()


def _call(name: str, options: Mapping[str, Any], arguments: Mapping[str, Any]) -> Any:
    return _IN_WORKER.now(dataclasses.replace(REWARDS.get(name), options=options), arguments)


def _load(*modules: str) -> float:
    for module in modules:
        if module.endswith(".py"):
            load_plugins([module])
        else:
            importlib.import_module(module)
    return 0.0


def _module_of(reward: Reward) -> str:
    module = reward.function.__module__
    name = reward.function.__qualname__
    if module == "__main__" or "<locals>" in name:
        raise ConfigError(
            f"reward {reward.name!r} runs in a worker process, which can't reach {module}.{name}; define it at the top "
            f"level of a Python file named under plugins:, or register it with inline=True"
        )
    return str(sys.modules[module].__file__) if module.startswith(PLUGIN_PREFIX) else module


def refuse_failing(groups: Sequence[Group], max_error_rate: float) -> None:
    """Raise RewardError if more than this share of the scores failed: training on the rest would mislead."""
    scored = [pair for group in groups for pair in zip(group.rollouts, group.scores, strict=True)]
    errors = [f"{rollout.id}: {score.error}" for rollout, score in scored if score.error is not None]
    if len(errors) > max_error_rate * len(scored):
        raise RewardError(
            f"{len(errors)} of {len(scored)} scores failed, more than rewards.max_error_rate={max_error_rate:g}; "
            f"the first: {errors[0]}; rewards can be tried: {door()} reward-test CONFIG --samples RUN/rollouts/FILE"
        )
