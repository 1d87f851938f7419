"""End processes with the one that started them, and with it all their descendants. Standard library only.

As a program, `processes.py PARENT_PID MAX_PROCESSES MAX_MIB COMMAND ...` runs a command that nothing outlives (Linux).
"""

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

GRACE_S = 30  # after a Ctrl-C
EXIT_S = 10.0  # for a command's threads to end
LOOK_S = 0.1  # between looks at what a command and its descendants take
SPARE_TASKS = 2048
OVER_LIMIT = 100  # exit status where they took too much
PARENT_VARIABLE = "HOCKET_PARENT_PID"  # of a process of hocket that another started
PASS_VARIABLE = "HOCKET_PASS_ENV"  # names, with commas between them, of what is no secret
SECRET_NAME = re.compile(
    r"(TOKEN|KEY|SECRET|PASSWORD|PASSWD|CREDENTIAL|COOKIE)S?(_|$)", re.IGNORECASE
)
_SECRET_VALUE = re.compile(r"://[^/@\s]*:[^/@\s]+@")  # a URL with a password
ABANDONED: list[object] = []
"""What can't be ended, such as event loops whose tasks ignore that they are cancelled: a command exits without it."""
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def exit_with(main: Callable[[list[str]], int]) -> None:
    """Exit with a command line's status; quietly where its output is closed (`| head`)."""
    try:
        status = _status_of(main)
        sys.stdout.flush()
    except BrokenPipeError:
        for stream in (1, 2):  # or Python flushes once more at its end
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        status = 128 + signal.SIGPIPE
    except OSError as error:
        print(
            f"error: the output can't be written: {error.strerror}; free space where it goes",
            file=sys.stderr,
        )
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        status = 1
    # Quickstart may interrupt a command that is ending: libraries' exit handlers would print tracebacks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if ABANDONED:
        sys.stderr.flush()
        os._exit(status)  # or Python would throw GeneratorExit into the code of tasks
    ending = threading.Timer(EXIT_S, os._exit, [status])
    ending.daemon = True  # it counts only while Python waits for threads that hang
    ending.start()
    gc.freeze()  # else Python searches all of torch for garbage once more, for a second
    sys.unraisablehook = _unless_finalizing
    sys.exit(status)


def _status_of(main: Callable[[list[str]], int]) -> int:
    try:
        return main(sys.argv[1:])
    except SystemExit as end:  # of --help, say
        if isinstance(end.code, str):
            raise
        return end.code or 0


def _unless_finalizing(
    error: Any,
    is_finalizing: Callable[[], bool] = sys.is_finalizing,
    show: Callable[[Any], None] = sys.unraisablehook,
) -> None:
    """Show an error of a destructor, unless Python is taking modules apart, which makes a plugin's clients fail."""
    if not is_finalizing():
        show(error)


@contextlib.contextmanager
def first(number: signal.Signals, call: Callable[[], object]) -> Iterator[None]:
    """Have the first of these signals during the body call something; the next one acts as it did before."""
    before = signal.getsignal(number)
    if (
        before is signal.SIG_IGN or threading.current_thread() is not threading.main_thread()
    ):  # others get none
        yield
        return

    def once(*_: object) -> None:
        signal.signal(number, before)
        call()

    signal.signal(number, once)
    try:
        yield
    finally:
        signal.signal(number, before)


def nobody_reads() -> bool:
    """Check whether the standard output or error is a pipe whose reader has gone."""
    poll = select.poll()
    for stream in (1, 2):
        poll.register(stream, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def die_with_parent(parent: int, signum: signal.Signals) -> None:
    """Have the kernel send `signum` to this process when its parent ends; exit if it has (Linux)."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signum)
    if os.getppid() != parent:  # it ended before prctl
        sys.exit(f"the process that started this one (pid {parent}) is gone")


def without_secrets() -> dict[str, str]:
    """Return the environment for code of others, without what looks like a secret."""
    passed = os.environ.get(PASS_VARIABLE, "").split(",")
    variables = os.environ.items()
    return {
        k: v
        for k, v in variables
        if k in passed or not (SECRET_NAME.search(k) or _SECRET_VALUE.search(v))
    }


def kill_with_parent(command: Sequence[str], max_processes: int = 0, max_mib: int = 0) -> list[str]:
    """Return the command line that contains `command` and ends it with this process; 0: no limit."""
    return [
        sys.executable,
        "-I",
        "-S",
        __file__,
        *map(str, (os.getpid(), max_processes, max_mib)),
        *command,
    ]


def contain(command: Sequence[str], max_processes: int = 0, max_mib: int = 0) -> int:
    """Run a command, kill what it leaves, return its status; a Ctrl-C gives it GRACE_S seconds."""
    ctypes.CDLL(None).prctl(
        _PR_SET_CHILD_SUBREAPER, 1
    )  # processes that lose their parent become children of this one
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    signal.signal(signal.SIGALRM, lambda *_: sys.exit(128 + signal.SIGINT))
    signal.signal(signal.SIGINT, lambda *_: signal.alarm(GRACE_S))
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})  # waited for below
    program = os.fork()
    if program == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if max_processes:
            _limit_tasks()
        with (
            contextlib.suppress(OSError),
            open("/proc/self/oom_score_adj", "w", encoding="ascii") as file,
        ):
            file.write("1000")  # where memory runs out, the kernel kills this first
        os.execvp(command[0], list(command))
    try:
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == program:
                code = os.waitstatus_to_exitcode(status)
                return code if code >= 0 else 128 - code
            if pid == 0:
                if max_processes and _is_over(max_processes, max_mib):
                    return OVER_LIMIT
                signal.sigtimedwait([signal.SIGCHLD], LOOK_S)
    finally:
        for signum in (signal.SIGTERM, signal.SIGALRM, signal.SIGINT):
            signal.signal(signum, signal.SIG_IGN)
        _kill_descendants()


def _limit_tasks() -> None:
    """Refuse this user, unless it is root, more than SPARE_TASKS further processes and threads."""
    import resource  # not on Windows

    with (
        open("/proc/loadavg", encoding="ascii") as file,
        contextlib.suppress(ValueError),
    ):  # it is lower already
        tasks = int(re.split("[ /]", file.read())[4])  # of all users
        resource.setrlimit(
            resource.RLIMIT_NPROC,
            (tasks + SPARE_TASKS, resource.getrlimit(resource.RLIMIT_NPROC)[1]),
        )


def _is_over(max_processes: int, max_mib: int) -> bool:
    pages = []
    for pid in _descendants():
        with contextlib.suppress(OSError), open(f"/proc/{pid}/statm", encoding="ascii") as file:
            pages.append(
                int(file.read().split()[1])
            )  # 0: it has ended, and its parent has not asked how
        if sum(map(bool, pages)) > max_processes:
            return True
    return sum(pages) * os.sysconf("SC_PAGE_SIZE") > max_mib << 20


def _descendants() -> Iterator[int]:
    todo = [os.getpid()]
    for pid in todo:  # it grows meanwhile
        with contextlib.suppress(
            OSError
        ):  # that one has ended: what it left is a child of this process
            for thread in os.listdir(f"/proc/{pid}/task"):
                with open(f"/proc/{pid}/task/{thread}/children", encoding="ascii") as file:
                    todo += (children := [int(child) for child in file.read().split()])
                yield from children


def _kill_descendants() -> None:
    with contextlib.suppress(ChildProcessError):  # none is left
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
