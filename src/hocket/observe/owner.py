"""Give a run folder to one process at a time.

The owner holds a lock on owner.lock; owner.json names it to people.
"""

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
PATIENCE_S = 60.0  # seconds that a resumed run waits for the end of the process before it
LOOK_S = 0.5  # seconds of an attempt; `watch` may hold the lock for an instant


@contextlib.contextmanager
def owning(run_dir: Path, say: Callable[[str], None], *, wait: bool) -> Iterator[None]:
    """Own a run folder while the body runs.

    The operating system frees the lock of a process that has ended, however it ended. Raises
    ConfigError if another process owns the folder; with `wait`, only after PATIENCE_S.
    """
    lock = FileLock(run_dir / LOCK)
    _acquire(lock, run_dir, say, patience_s=PATIENCE_S if wait else 0.0)
    owner_file = run_dir / OWNER
    try:
        owner: Owner = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "since": time.strftime("%F %T"),
        }
        write_atomically(owner_file, json.dumps(with_format(owner)))
        yield
    finally:
        owner_file.unlink(missing_ok=True)
        # Removed before it is released: a process that waits for the lock then sees that its file is
        # gone, and makes a new one.
        (run_dir / LOCK).unlink(missing_ok=True)
        lock.release()
        with contextlib.suppress(OSError):  # the run has written something
            run_dir.rmdir()


def _acquire(lock: FileLock, run_dir: Path, say: Callable[[str], None], patience_s: float) -> None:
    start = time.monotonic()
    is_waiting = False
    while True:
        try:
            lock.acquire(timeout=LOOK_S)
            return
        except FileNotFoundError:  # the owner has just removed the empty folder: try again
            continue
        except Timeout:
            belongs = f"{run_dir} belongs to {_owner_of(run_dir)}"
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP):
                raise
            advice = "mount its file system with locks, or choose another run.dir"
            raise ConfigError(f"{run_dir} can't be locked ({error.strerror}): {advice}") from error
        if time.monotonic() - start >= patience_s:
            raise ConfigError(
                f"{belongs}, which is running: choose another run.dir, or end that process first"
            )
        if not is_waiting:
            say(f"{belongs}; waiting up to {patience_s:g} s for its end (Ctrl-C to give up)")
            is_waiting = True


def _owner_of(run_dir: Path) -> str:
    """Name the owner of a run folder, as far as owner.json does."""
    try:
        owner: Owner = json.loads(read_text(run_dir / OWNER))  # the format of a newer one will do
        return f"process {owner['pid']} on {owner['host']} since {owner['since']}"
    except (OSError, ValueError, TypeError, LookupError):  # not written yet, or just removed
        return "another process"
