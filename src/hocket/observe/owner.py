"""Give a run folder to one process at a time: owner.json names it; its modification time is the owner's heartbeat."""

import contextlib
import json
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from hocket.errors import ConfigError

BEAT_S = 5.0  # between the owner's signs of life
SILENCE_S = 60.0  # after which an owner on another machine is gone, and that a resumed run waits
LOOK_S = 0.5


@contextlib.contextmanager
def owning(run_dir: Path, say: Callable[[str], None], *, wait: bool) -> Iterator[None]:
    """Own a run folder while the body runs. Raise ConfigError if another process does, with `wait` after SILENCE_S.

    An owner on this machine is gone when its process is; one on another machine or in a container, where it can't be
    seen, after SILENCE_S by this clock.
    """
    path = run_dir / "owner.json"
    pid = os.getpid()
    ended = threading.Event()
    now = time.strftime("%F %T")
    text = json.dumps({"pid": pid, "host": socket.gethostname(), "since": now, "process": [_machine(), _start_of(pid)]})
    _take(path, text, say, patience_s=SILENCE_S if wait else 0.0)
    beating = threading.Thread(target=_beat, args=(path, text, ended), daemon=True)
    beating.start()
    try:
        yield
    finally:
        ended.set()
        beating.join(BEAT_S)  # it may hang on a disk that is gone
        if _look(path)[0] == text:
            path.unlink()
        with contextlib.suppress(OSError):  # something has been written
            run_dir.rmdir()


def _take(path: Path, text: str, say: Callable[[str], None], patience_s: float) -> None:
    """Create owner.json. Raise ConfigError where another owner is known to live after `patience_s`."""
    start = heard = time.monotonic()
    told = False
    seen = _look(path)
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError, FileNotFoundError), path.open("x", encoding="utf-8") as file:
            file.write(text)
            return
        now = time.monotonic()
        before = seen
        if (seen := _look(path)) != before:
            heard = now
        try:
            owner = json.loads(seen[0])
            machine, started = owner["process"]
            who = f"{path.parent} belongs to process {owner['pid']} on {owner['host']} since {owner['since']}"
        except (ValueError, TypeError, LookupError):  # it is being written, was just removed, or the disk was full
            owner = {}
            machine = ""
            started = ""
            who = f"{path} does not say whose {path.parent} is"
        is_alive = machine == _machine() and _start_of(owner["pid"]) == started
        if not is_alive and (machine == _machine() or now - heard >= SILENCE_S):
            _remove(path, seen[0])
            continue
        was_heard = heard > start and now - heard < 3 * BEAT_S
        if owner and (is_alive or was_heard) and now - start >= patience_s:
            raise ConfigError(f"{who}, which is running: choose another run.dir, or end that process first")
        if not told and (owner or seen == before):
            say(f"{who}; waiting for its end, or for {SILENCE_S:g} s of silence (Ctrl-C to give up)")
            told = True
        time.sleep(LOOK_S)


def _look(path: Path) -> tuple[str, int]:
    """Return the owner's text and last sign of life, of the opened file: NFS then asks the server."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return file.read(), os.fstat(file.fileno()).st_mtime_ns
    except FileNotFoundError:
        return "", 0


def _remove(path: Path, text: str) -> None:
    """Remove what an owner that is gone has left, but not what another process has put in its place."""
    taken = path.with_name(f".{secrets.token_hex(8)}")
    with contextlib.suppress(FileNotFoundError):  # another one was faster
        path.rename(taken)
        if _look(taken)[0] == text:
            taken.unlink()
        else:
            taken.rename(path)


def _beat(path: Path, text: str, ended: threading.Event) -> None:
    """Give signs of life; end the process if it slept until the folder had another owner."""
    while not ended.wait(BEAT_S):
        with contextlib.suppress(OSError):
            if (found := _look(path)[0]) not in ("", text):
                print(f"error: {path.parent} was taken over: {found}; this run ends", file=sys.stderr)
                return os.kill(os.getpid(), signal.SIGINT)
            os.utime(path)


def _machine() -> str:
    """Return what all processes that can see each other share: this boot and container."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")


def _start_of(pid: int) -> str | None:
    """Return a process's start in ticks since the boot; None if it has ended."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if state in "ZX" else fields[18]
