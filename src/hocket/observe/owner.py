"""Give a run folder to one process at a time: a lease of filelock on owner.lock, kept by signs of life."""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from filelock import LeaseCompromise, SoftFileLease, Timeout

from hocket.errors import ConfigError

BEAT_S = 2.0  # between the owner's signs of life
SILENCE_S = 60.0
"""Seconds without a sign of life after which an owner is gone, and that a resumed run waits for one to end."""
LOOK_S = 0.5


@contextlib.contextmanager
def owning(run_dir: Path, say: Callable[[str], None], *, wait: bool) -> Iterator[None]:
    """Own a run folder while the body runs. Raise ConfigError if another process does, with `wait` after SILENCE_S.

    An owner on this machine is also gone when its process is; one that runs on another machine of a shared disk, or in
    a container, is seen by its signs of life alone, and no two clocks are compared.
    """
    path = run_dir / "owner.lock"
    lease = SoftFileLease(path, lease_duration=SILENCE_S, heartbeat_interval=BEAT_S, on_compromise=_lost)
    _take(lease, path, say, patience_s=SILENCE_S if wait else 0.0)
    try:
        yield
    finally:
        lease.release()
        with contextlib.suppress(OSError):  # something has been written
            run_dir.rmdir()


def _take(lease: SoftFileLease, path: Path, say: Callable[[str], None], patience_s: float) -> None:
    """Acquire the lease. Raise ConfigError where its owner gives a sign of life after `patience_s`."""
    start, beat, told = time.monotonic(), 0, False
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)  # its last owner may have removed it
        with contextlib.suppress(Timeout, FileNotFoundError):
            lease.acquire(blocking=False)
            return
        owner, before = lease.owner, beat
        with contextlib.suppress(FileNotFoundError):
            beat = path.stat().st_mtime_ns
        if owner is not None:
            host = owner.hostname.partition("?")[0]  # behind it a container's namespace
            who = f"{path.parent} belongs to process {owner.pid} on {host}"
            if before not in (0, beat) and time.monotonic() - start >= patience_s:
                raise ConfigError(f"{who}, which is running: choose another run.dir, or end that process first")
            if not told:
                say(f"{who}; waiting for its end, or for {SILENCE_S:g} s of silence (Ctrl-C to give up)")
                told = True
        time.sleep(LOOK_S)


def _lost(lost: LeaseCompromise) -> None:
    """End the process, which was silent for too long: the folder may have another owner."""
    print(f"error: {Path(lost.lock_file).parent} was taken over ({lost.reason}); this run ends", file=sys.stderr)
    os.kill(os.getpid(), signal.SIGINT)
