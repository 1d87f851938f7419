"""Runs installation steps with progress, one process at a time; explains failures. Standard library only."""

import contextlib
import fcntl
import functools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, TextIO

from hocket.errors import SetupError
from hocket.system import die_with_parent

LOCK_TIMEOUT_S = 3600.0
STEP_TIMEOUT_S = 3600.0
HEARTBEAT_S = 15.0


class Step(NamedTuple):
    """One step: the commands are tried in turn, the next one only where pip found no such package."""

    label: str
    commands: list[list[str]]


NO_NETWORK = (
    "NewConnectionError",
    "ConnectTimeoutError",
    "ConnectionResetError",
    "Temporary failure in name resolution",
    "Name or service not known",
    "Network is unreachable",
    "Max retries exceeded",
    "Read timed out",
    "ProxyError",
)
NO_WHEEL = ("No matching distribution found", "is not a supported wheel", "requires a different Python")
CAUSES = (
    (("No space left on device", "Errno 28", "Disk quota exceeded"), "the disk is full: make room and run this again"),
    (
        ("CERTIFICATE_VERIFY_FAILED", "SSLError"),
        "the package index's certificate is not trusted: behind a company proxy, name its certificate in PIP_CERT",
    ),
    (
        NO_NETWORK,
        "the package index can't be reached: check the network and HTTPS_PROXY, or name a mirror in PIP_INDEX_URL "
        "(a folder of wheels in PIP_FIND_LINKS); what was downloaded is kept",
    ),
    (("Permission denied", "Read-only file system"), "this folder can't be written: clone into one of your own"),
    (("ResolutionImpossible",), "packages contradict each other: look for constraints in `pip config list`"),
    (
        NO_WHEEL,
        "the package index has no wheel for this Python or system: use Python 3.11, 3.12 or 3.13 on glibc Linux, "
        "and look at `pip config list`: a mirror may lack it",
    ),
)


def explain(log: str, returncode: int) -> str:
    """Returns the cause of a failed pip call and what to do, from its output."""
    if returncode == -signal.SIGKILL:
        return "the installer was killed, most likely for lack of memory: close other programs and run this again"
    for signs, cause in CAUSES:
        if any(sign in log for sign in signs):
            return cause
    return f"pip failed with exit status {returncode}: its last lines follow"


def install(steps: list[Step], log_path: Path, lock_fd: int) -> None:
    """Runs the steps in order.

    Args:
        log_path: gets the full output; it may lie in the folder that the first step makes.
        lock_fd: handed to each child, so that the lock is held as long as any of them lives.

    Raises:
        SetupError: a step failed or took too long; the message has the cause and the last lines of the log.
    """
    started = time.monotonic()
    with log_path.open("w", encoding="utf-8") as log:
        for number, step in enumerate(steps, 1):
            progress = Progress(f"[{number}/{len(steps)}] {step.label}", log_path.parent)
            output, returncode = "", 0
            for command in step.commands:
                returncode = _run(command, log, lock_fd, progress)
                output = _read_from(log_path, progress.offset)
                if returncode == 0 or explain(output, returncode) != explain(NO_WHEEL[0], 1):
                    break
            if returncode != 0:
                progress.end("failed")
                last = "\n".join(f"  | {line[:200]}" for line in output.strip().splitlines()[-8:])
                raise SetupError(f"{step.label}: {explain(output, returncode)}\n{last}\n  full log: {log_path}")
            progress.end("done")
    print(f"run.py: environment ready in {time.monotonic() - started:.0f} s ({log_path.parent})", file=sys.stderr)


class Progress:
    """What one step is doing, on stderr: a line in place on a terminal, else a line every few seconds."""

    def __init__(self, label: str, venv: Path) -> None:
        self.label = label
        self.venv = venv
        self.offset = 0
        self.started = time.monotonic()
        self._terminal = sys.stderr.isatty()
        self._next = self.started + (0.0 if self._terminal else HEARTBEAT_S)
        if not self._terminal:
            print(f"{label} ...", file=sys.stderr, flush=True)

    def show(self, doing: str) -> None:
        """Shows seconds, packages so far and what pip is at."""
        if time.monotonic() < self._next:
            return
        packages = sum(1 for _ in self.venv.glob("lib/python*/site-packages/*.dist-info"))
        text = f"{self.label} · {time.monotonic() - self.started:.0f} s · {packages} packages · {doing}"
        if self._terminal:
            self._next = time.monotonic() + 0.3
            print("\r\033[K" + text[: shutil.get_terminal_size().columns - 1], end="", file=sys.stderr, flush=True)
        else:
            self._next = time.monotonic() + HEARTBEAT_S
            print(text[:160], file=sys.stderr, flush=True)

    def end(self, word: str) -> None:
        """Replaces the line by the result."""
        start = "\r\033[K" if self._terminal else ""
        print(f"{start}{self.label} · {word} in {time.monotonic() - self.started:.0f} s", file=sys.stderr, flush=True)


def _run(command: list[str], log: TextIO, lock_fd: int, progress: Progress) -> int:
    log.write(f"$ {' '.join(command)}\n")
    log.flush()
    progress.offset = log.tell()
    path = Path(log.name)
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PIP_USER", "PIP_TARGET")}
    environment |= {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1", "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        env=environment,
        pass_fds=(lock_fd,),
        # when run.py is killed: an orphan would go on writing into .venv
        preexec_fn=functools.partial(die_with_parent, os.getpid(), signal.SIGKILL),
    )
    deadline = time.monotonic() + STEP_TIMEOUT_S
    try:
        while process.poll() is None:
            if time.monotonic() > deadline:
                raise SetupError(f"{progress.label} took more than {STEP_TIMEOUT_S:.0f} s; run this again to go on")
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.3)
            progress.show(_doing(_read_from(path, max(progress.offset, path.stat().st_size - 20_000))))
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10)
    log.seek(0, os.SEEK_END)
    return process.returncode


def _doing(output: str) -> str:
    for line in reversed(output.splitlines()):
        if line.startswith("Installing collected"):
            return "unpacking"
        if "Retrying (" in line:
            return "the package index does not answer, trying again"
        if line.lstrip().startswith(("Collecting", "Downloading", "Using cached", "Processing", "Building")):
            return line.strip()
    return "..."


def _read_from(path: Path, offset: int) -> str:
    with path.open("rb") as file:
        file.seek(offset)
        return file.read().decode("utf-8", "replace")


@contextlib.contextmanager
def lock(path: Path) -> Iterator[int]:
    """Holds an exclusive lock on a file; yields its descriptor. Waits for another holder, and says for whom.

    Raises:
        SetupError: the other holder did not end in time, or the folder can't be written.
    """
    try:
        file = path.open("a+", encoding="utf-8")
    except OSError as error:
        raise SetupError(f"can't write {path} ({error.strerror}); clone into a folder of your own") from error
    with file:
        _wait_for(file, path)
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield file.fileno()


def _wait_for(file: TextIO, path: Path) -> None:
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    next_word = 0.0
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            holder = path.read_text("utf-8") or "?"
        now = time.monotonic()
        if now > deadline:
            raise SetupError(f"process {holder} has been installing for an hour; end it and run this again")
        if now >= next_word:
            print(f"run.py: waiting for process {holder}, which is installing", file=sys.stderr, flush=True)
            next_word = now + HEARTBEAT_S
        time.sleep(0.3)
