"""Give a run folder to one process at a time: the lock on its owner.json, which the kernel frees with the process."""

import contextlib
import fcntl
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

from hocket.errors import ConfigError

WAIT_S = 60.0  # of a resumed run, for the end of the one before
LOOK_S = 0.5


@contextlib.contextmanager
def owning(run_dir: Path, say: Callable[[str], None], *, wait: bool) -> Iterator[None]:
    """Own a run folder while the body runs. Raise ConfigError if another process does, with `wait` after WAIT_S.

    On a shared disk the file server keeps the lock. One without locks is told: nothing guards a folder there.
    """
    path = run_dir / "owner.json"
    with _locked(path, say, patience_s=WAIT_S if wait else 0.0) as file:
        owner = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%F %T")}
        file.truncate(0)
        file.write(json.dumps(owner))
        file.flush()
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # something has been written
                run_dir.rmdir()


def _locked(path: Path, say: Callable[[str], None], patience_s: float) -> TextIO:
    """Return owner.json with its lock. Raise ConfigError where another process keeps that for `patience_s`."""
    end = time.monotonic() + patience_s
    told = False
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = path.open("a+", encoding="utf-8", errors="replace")
        except (FileNotFoundError, FileExistsError):  # an owner that ends removes the folder meanwhile
            continue
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            who = _owner_in(file, path.parent)
        except OSError as error:
            say(f"{path.parent} is on a disk without locks ({error}): nothing keeps another run out of it")
            return file
        else:
            if _is_at(file, path):
                return file
            file.close()  # of an owner that has removed it at its end
            continue
        file.close()
        if time.monotonic() >= end:
            raise ConfigError(f"{who}, which is running: choose another run.dir, or end that process first")
        if not told:
            say(f"{who}; waiting for its end, at most {patience_s:g} s (Ctrl-C to give up)")
            told = True
        time.sleep(LOOK_S)


def _is_at(file: TextIO, path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    return False


def _owner_in(file: TextIO, folder: Path) -> str:
    file.seek(0)
    with contextlib.suppress(ValueError, TypeError, LookupError):  # it is being written, or the disk is full
        owner = json.load(file)
        return f"{folder} belongs to process {owner['pid']} on {owner['host']} since {owner['since']}"
    return f"{folder} belongs to another process"
