"""Give a run folder to one process at a time: it holds a lock on owner.lock, and owner.json names it to people."""

import contextlib
import errno
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from hocket.common.files import write_atomically
from hocket.errors import ConfigError
from hocket.formats import OWNER, Owner
from hocket.observe.rows import read_text, with_format

LOCK = "owner.lock"
PATIENCE_S = 60.0  # that a resumed run waits for the end of the one before
LOOK_S = 0.5  # between looks; `watch` may hold the lock for an instant


@contextlib.contextmanager
def owning(run_dir: Path, say: Callable[[str], None], *, wait: bool) -> Iterator[None]:
    """Own a run folder while the body runs. Raise ConfigError if another process does, with `wait` after PATIENCE_S.

    The operating system frees the lock of a process that has ended, however it ended.
    """
    lock = FileLock(run_dir / LOCK)
    _acquire(lock, run_dir, say, patience_s=PATIENCE_S if wait else 0.0)
    named = run_dir / OWNER
    try:
        owner: Owner = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "since": time.strftime("%F %T"),
        }
        write_atomically(named, json.dumps(with_format(owner)))
        yield
    finally:
        named.unlink(missing_ok=True)
        # Only the owner may remove this: who has it open sees that it has no name any more, and begins anew.
        (run_dir / LOCK).unlink(missing_ok=True)
        lock.release()
        with contextlib.suppress(OSError):  # something has been written
            run_dir.rmdir()


def _acquire(lock: FileLock, run_dir: Path, say: Callable[[str], None], patience_s: float) -> None:
    start = time.monotonic()
    is_waiting = False
    while True:
        try:
            lock.acquire(timeout=LOOK_S)
            return
        except FileNotFoundError:  # the owner has ended, and removed the empty folder
            continue
        except Timeout:
            who = f"{run_dir} belongs to {_owner_of(run_dir)}"
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP):
                raise
            advice = "mount its file system with locks, or choose another run.dir"
            raise ConfigError(f"{run_dir} can't be locked ({error.strerror}): {advice}") from error
        if time.monotonic() - start >= patience_s:
            raise ConfigError(
                f"{who}, which is running: choose another run.dir, or end that process first"
            )
        if not is_waiting:
            say(f"{who}; waiting up to {patience_s:g} s for its end (Ctrl-C to give up)")
            is_waiting = True


def _owner_of(run_dir: Path) -> str:
    try:
        owner: Owner = json.loads(read_text(run_dir / OWNER))  # a newer one is as good
        return f"process {owner['pid']} on {owner['host']} since {owner['since']}"
    except (
        OSError,
        ValueError,
        TypeError,
        LookupError,
    ):  # it is not written yet, or was removed just now
        return "another process"
