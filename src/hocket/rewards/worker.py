"""Call rewards in a process of its own, which may do whatever the code of a user or of a model does.

A request goes to it pickled: 16 characters that no other request has, then (reward name, arguments). The answer is one
line of JSON that begins with them: what a reward, or something that it left running, writes there itself is no answer.
"""

import contextlib
import importlib
import json
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import IO

from pydantic import ConfigDict, TypeAdapter

from hocket.processes import OVER_LIMIT, kill_with_parent, without_secrets
from hocket.registry import load_plugins
from hocket.rewards.base import REWARDS, call, no_score
from hocket.types import Score

MAX_PROCESSES, MAX_MIB = 256, 8192  # of one worker and all that it starts
MAX_ANSWER = 1 << 16  # bytes
MAX_LINES = 1000  # that the rewards of a run may print
MAX_LINE = 1 << 12  # bytes
_MAIN = "from hocket.rewards.worker import work; work()"
_ANSWER: TypeAdapter[tuple[str, float, dict[str, float], str | None]] = TypeAdapter(
    tuple[str, float, dict[str, float], str | None], config=ConfigDict(strict=True, allow_inf_nan=False)
)


class Worker:
    """A process that has loaded modules (names, or paths of plugins) and calls their rewards, one at a time."""

    def __init__(self, modules: Iterable[str], printed: Iterator[int]) -> None:
        """Start it; `printed` counts the lines that all workers print."""
        self.ended = False
        self._socket, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-c", _MAIN, str(theirs.fileno()), *modules]
            self._process = subprocess.Popen(
                kill_with_parent(command, max_processes=MAX_PROCESSES, max_mib=MAX_MIB),
                pass_fds=[theirs.fileno()],
                env={**without_secrets(), "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a Ctrl-C is for the process that owns this one
            )
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
        number = os.urandom(8).hex() if request else ""
        try:
            self._socket.settimeout(timeout_s)
            self._socket.sendall(number.encode() + request)
            while b"\n" not in answer:
                self._socket.settimeout(max(deadline - time.monotonic(), 1e-3))
                if not (received := self._socket.recv(MAX_ANSWER)):
                    raise EOFError
                answer += received
                if len(answer) > MAX_ANSWER:
                    raise ValueError
            line, unasked = answer.split(b"\n", 1)
            answers, total, parts, error = _ANSWER.validate_json(line)
            if answers != number or unasked:
                raise ValueError
            return Score(total=total, parts=parts) if error is None else no_score(error, parts)
        except TimeoutError:
            problem = f"no result within {timeout_s:g} s; its worker process was ended"
        except (EOFError, OSError):
            problem = f"its worker process {self._end()}"
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
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:  # the reward has stopped the process that watches it
            self._process.kill()
        with contextlib.suppress(ProcessLookupError):  # as it should be: no process of the group is left
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._socket.close()

    def _end(self) -> str:
        try:
            code = self._process.wait(1)
        except subprocess.TimeoutExpired:
            return "hung up"
        if code == OVER_LIMIT:
            return f"was ended: with what it started it took more than {MAX_MIB} MiB or {MAX_PROCESSES} processes"
        return f"ended with exit code {code}" + (f" ({signal.strsignal(code - 128)})" if 128 < code < 160 else "")


def _show(output: IO[bytes], printed: Iterator[int]) -> None:
    """Show what a worker prints; after MAX_LINES lines of all workers, drop it, so that none waits."""
    with output, contextlib.suppress(OSError):  # nobody looks any more
        while (number := next(printed)) <= MAX_LINES and (line := output.readline(MAX_LINE)):
            os.write(2, line)
        if number == MAX_LINES + 1:
            os.write(2, b"rewards have printed %d lines: the rest is not shown\n" % MAX_LINES)
        while output.read(1 << 16):
            pass


def work() -> None:
    """Run a worker process; its arguments are the file descriptor of a socket and the modules to load."""
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    stream, pid, number = socket.socket(fileno=int(sys.argv[1])).makefile("rwb"), os.getpid(), b""
    score = call(_load, {"modules": sys.argv[2:]})
    while True:
        if os.getpid() != pid:  # a reward has forked, and returned in both
            os._exit(0)
        total = score.total if score.error is None else 0.0
        stream.write(json.dumps([number.decode(), total, score.parts, score.error]).encode() + b"\n")
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
