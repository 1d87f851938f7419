"""End processes with the one that started them, together with all their descendants.

Standard library only. As a program (Linux), `processes.py PARENT_PID MAX_PROCESSES MAX_MIB COMMAND`
runs a command whose processes all end with it.
"""

import collections
import contextlib
import ctypes
import gc
import os
import re
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

GRACE_S = 30  # seconds that a contained command has after a Ctrl-C
EXIT_S = 10.0  # seconds that the threads of a command may take to end
LOOK_S = 0.1  # seconds between looks at what a contained command takes
SPARE_TASKS = 2048  # processes and threads that the user may have beside those of now
OVER_LIMIT = 100  # exit status of a contained command that took too much
PARENT_VARIABLE = "HOCKET_PARENT_PID"  # has the id of the process that started this one of hocket
PASS_VARIABLE = "HOCKET_PASS_ENV"  # names, separated by commas, of variables that are no secrets
SECRET_NAME = re.compile(
    r"(TOKEN|KEY|SECRET|PASSWORD|PASSWD|CREDENTIAL|COOKIE)S?(_|$)", re.IGNORECASE
)
_SECRET_VALUE = re.compile(r"://[^/@\s]*:[^/@\s]+@")  # a URL with a password
ABANDONED: list[object] = []
"""Objects that can't be ended, such as event loops whose tasks ignore that they are cancelled.
A command exits without waiting for them."""
# Options of prctl (linux/prctl.h).
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def exit_with(main: Callable[[list[str]], int]) -> None:
    """Run a command line and exit with its status; quietly if its output is closed (`| head`)."""
    try:
        status = _status_of(main)
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes both streams once more at its end: let that succeed.
        for stream in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        status = 128 + signal.SIGPIPE
    except OSError as error:  # of the flush: a command prints its own errors
        print(
            f"error: the output can't be written: {error.strerror}; free space where it goes",
            file=sys.stderr,
        )
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        status = 1
    # Ignore further interrupts, such as quickstart's: the exit handlers of libraries would print
    # tracebacks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if ABANDONED:
        sys.stderr.flush()
        os._exit(status)  # a usual exit would throw GeneratorExit into the code of their tasks
    # Bound the time in which Python waits for threads: one that hangs would hold it up for ever.
    timer = threading.Timer(EXIT_S, os._exit, [status])
    timer.daemon = True
    timer.start()
    gc.freeze()  # else Python searches all of torch for garbage once more, for a second
    sys.unraisablehook = _unless_finalizing
    sys.exit(status)


def _status_of(main: Callable[[list[str]], int]) -> int:
    """Run a command line. argparse, too, ends here with its status."""
    try:
        return main(sys.argv[1:])
    except SystemExit as error:  # --help raises it
        if isinstance(error.code, str):
            raise
        return error.code or 0


def _unless_finalizing(
    error: Any,
    is_finalizing: Callable[[], bool] = sys.is_finalizing,
    show: Callable[[Any], None] = sys.unraisablehook,
) -> None:
    """Show an error of a destructor, unless the interpreter is shutting down.

    The destructors of a plugin's clients often fail then, as their modules are already gone. So is
    `sys`: its functions are kept as defaults.
    """
    if not is_finalizing():
        show(error)


@contextlib.contextmanager
def first(number: signal.Signals, call: Callable[[], object]) -> Iterator[None]:
    """Call a function at the first signal `number` during the body; the next one acts as before.

    Nothing changes where the signal is ignored, or outside the main thread, which alone gets any.
    """
    handler_before = signal.getsignal(number)
    is_main = threading.current_thread() is threading.main_thread()
    if handler_before is signal.SIG_IGN or not is_main:
        yield
        return

    def once(*_: object) -> None:
        signal.signal(number, handler_before)
        call()

    signal.signal(number, once)
    try:
        yield
    finally:
        signal.signal(number, handler_before)


def nobody_reads() -> bool:
    """Check whether the standard output or error is a pipe whose reader has gone."""
    poll = select.poll()
    for stream in (1, 2):
        poll.register(stream, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def die_with_parent(parent: int, signum: signal.Signals) -> None:
    """Have the kernel send `signum` to this process when its parent ends (Linux).

    Exits at once if the parent has ended already.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signum)
    if os.getppid() != parent:  # it ended before prctl, so that no signal will come
        sys.exit(f"the process that started this one (pid {parent}) is gone")


def without_secrets() -> dict[str, str]:
    """Copy the environment for a user's or a model's code, without what looks like a secret."""
    passed = os.environ.get(PASS_VARIABLE, "").split(",")
    variables = {}
    for name, value in os.environ.items():
        is_secret = SECRET_NAME.search(name) or _SECRET_VALUE.search(value)
        if name in passed or not is_secret:
            variables[name] = value
    return variables


def contained(command: Sequence[str], max_processes: int = 0, max_mib: int = 0) -> list[str]:
    """Make the command line that runs `command` and kills its processes when this one ends.

    The limits, 0 for none, hold for all processes of the command together.
    """
    numbers = (os.getpid(), max_processes, max_mib)
    line = [sys.executable, "-I", "-S", __file__]
    line += map(str, numbers)
    line += command
    return line


def contain(command: Sequence[str], max_processes: int = 0, max_mib: int = 0) -> int:
    """Run a command until it ends, kill all processes that it leaves, and return its status.

    A Ctrl-C gives it GRACE_S seconds. A command over its limits is killed: OVER_LIMIT.
    """
    # A process that loses its parent becomes a child of this one, so that all can be found.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    # A SIGTERM ends this process, and a Ctrl-C does after GRACE_S seconds; sys.exit runs `finally`.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    signal.signal(signal.SIGINT, lambda *_: signal.alarm(GRACE_S))
    signal.signal(signal.SIGALRM, lambda *_: sys.exit(128 + signal.SIGINT))
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})  # sigtimedwait below takes it
    program = os.fork()
    if program == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if max_processes:
            _limit_tasks()
        # Have the kernel kill this process first when memory runs out.
        score = "/proc/self/oom_score_adj"
        with contextlib.suppress(OSError), open(score, "w", encoding="ascii") as file:
            file.write("1000")
        os.execvp(command[0], list(command))
    try:
        while True:
            # Reap every child that has ended, orphans too, until the program itself has.
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == program:
                code = os.waitstatus_to_exitcode(status)
                return code if code >= 0 else 128 - code  # a signal's, as a shell has it
            if pid == 0:
                if max_processes and _is_over(max_processes, max_mib):
                    return OVER_LIMIT
                signal.sigtimedwait([signal.SIGCHLD], LOOK_S)
    finally:
        # No signal may end this process before it has killed all others.
        for signum in (signal.SIGTERM, signal.SIGALRM, signal.SIGINT):
            signal.signal(signum, signal.SIG_IGN)
        _kill_descendants()


def _limit_tasks() -> None:
    """Refuse this user, unless it is root, more than SPARE_TASKS further processes and threads."""
    import resource  # not on Windows

    with open("/proc/loadavg", encoding="ascii") as file:
        # Its fourth field is "RUNNING/ALL": the tasks of all users.
        num_tasks = int(re.split("[ /]", file.read())[4])
    _, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    with contextlib.suppress(ValueError):  # the hard limit is lower already
        resource.setrlimit(resource.RLIMIT_NPROC, (num_tasks + SPARE_TASKS, hard))


def _is_over(max_processes: int, max_mib: int) -> bool:
    """Check whether the descendants of this process are too many, or take too much memory."""
    num_pages = 0
    num_processes = 0
    for pid in _descendants():
        with contextlib.suppress(OSError), open(f"/proc/{pid}/statm", encoding="ascii") as file:
            resident = int(file.read().split()[1])
            num_pages += resident
            # A zombie has no pages: it has ended, and its parent has not waited for it yet.
            num_processes += resident > 0
        if num_processes > max_processes:
            return True
    return num_pages * os.sysconf("SC_PAGE_SIZE") > max_mib << 20


def _descendants() -> Iterator[int]:
    """Yield the ids of all descendants of this process: its children first, then theirs."""
    pids = collections.deque([os.getpid()])
    while pids:
        pid = pids.popleft()
        # A process that has ended meanwhile is skipped: its children are this process's by then.
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{pid}/task"):
                with open(f"/proc/{pid}/task/{thread}/children", encoding="ascii") as file:
                    children = [int(child) for child in file.read().split()]
                pids += children
                yield from children


def _kill_descendants() -> None:
    """Kill and reap until waitpid says that this process has no child any more."""
    with contextlib.suppress(ChildProcessError):
        while True:
            for pid in _descendants():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass
            time.sleep(0.01)


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]), signal.SIGTERM)
    sys.exit(contain(sys.argv[4:], int(sys.argv[2]), int(sys.argv[3])))
