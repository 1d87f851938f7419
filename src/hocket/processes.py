"""End processes with the one that started them, and with it all their descendants. Standard library only.

As a program, `processes.py PARENT_PID COMMAND ...` runs a command so that nothing outlives it (Linux).
"""

import ctypes
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import NoReturn

GRACE_S = 30  # after a Ctrl-C, for the command to end by itself
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def exit_with(main: Callable[[list[str]], int]) -> NoReturn:
    """Run a command line and exit with its status; quietly where nobody reads the output any more (`| head`)."""
    try:
        status = main(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:
        if not nobody_reads():
            raise
        for stream in (sys.stdout, sys.stderr):  # or Python flushes once more at its end
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        status = 128 + signal.SIGPIPE
    # Quickstart may interrupt a command that is ending by itself; libraries' exit handlers would print tracebacks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.exit(status)


def nobody_reads() -> bool:
    """Return whether standard output or standard error is a pipe whose reader has gone."""
    poll = select.poll()
    for stream in (sys.stdout, sys.stderr):
        poll.register(stream.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def die_with_parent(parent: int, signum: signal.Signals) -> None:
    """Have the kernel send `signum` to this process when `parent`, which started it, ends; exit if it has (Linux)."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signum)
    if os.getppid() != parent:  # it ended before prctl
        sys.exit(f"the process that started this one (pid {parent}) is gone")


def kill_with_parent(command: Sequence[str]) -> list[str]:
    """Return the command line that runs `command` contained, and also ends it when this process is gone."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


def contain(command: Sequence[str]) -> int:
    """Run a command, kill what it leaves running, return its exit status; a Ctrl-C gives it GRACE_S seconds to end."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)  # processes that lose their parent become children of this one
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    signal.signal(signal.SIGALRM, lambda *_: sys.exit(128 + signal.SIGINT))
    signal.signal(signal.SIGINT, lambda *_: signal.alarm(GRACE_S))
    program = os.fork()
    if program == 0:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        os.execvp(command[0], list(command))
    try:
        while True:
            pid, status = os.wait()
            if pid == program:
                code = os.waitstatus_to_exitcode(status)
                return code if code >= 0 else 128 - code
    finally:
        for signum in (signal.SIGTERM, signal.SIGALRM, signal.SIGINT):
            signal.signal(signum, signal.SIG_IGN)
        _kill_descendants()


def _kill_descendants() -> None:
    while True:
        with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:
            children = [int(pid) for pid in file.read().split()]
        for pid in children:
            os.kill(pid, signal.SIGKILL)
        try:
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                time.sleep(0.01)
        except ChildProcessError:
            return


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]), signal.SIGTERM)
    sys.exit(contain(sys.argv[2:]))
