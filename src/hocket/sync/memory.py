"""Keep weight versions in memory while only servers on this machine read them.

A disk would write each version, which takes longer than the server needs to load it. Here a version
lies in a folder below /dev/shm, and the run folder has a link to it.
"""

import secrets
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from filelock import FileLock, Timeout

from hocket.common.files import SHARED_MEMORY, VERSIONS_PREFIX
from hocket.common.machine import free_memory

LEAST_BYTES = 64 << 20  # a smaller version is on a disk within milliseconds
SHARE = 0.25  # of the free memory: the most that a version may take, as two exist at a time
LOCK = "lock"  # file in the folder; its lock is held as long as the run lives


class MemoryFolder:
    """A folder of a run in this machine's shared memory.

    Example: where a version of 500 MiB goes.

        memory = MemoryFolder(say=print)
        folder = memory.place("v000002", 500 << 20)  # None: there is no room for it
        ...
        memory.close()
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say = say
        self._folder: Path | None = None  # made for the first version that goes there
        self._lock: FileLock | None = None
        self._is_used = True

    def place(self, name: str, num_bytes: int) -> Path | None:
        """Choose the folder of a version of this size; None where it is to go to the disk."""
        if not self._is_used or num_bytes < LEAST_BYTES:
            return None
        try:
            free = min(shutil.disk_usage(SHARED_MEMORY).free, free_memory())
            if num_bytes > SHARE * free:
                self.give_up(
                    f"a version of {num_bytes >> 20:,} MiB takes more than a quarter of the "
                    f"{free >> 20:,} MiB that {SHARED_MEMORY} and the memory have left"
                )
                return None
            if self._folder is None:
                self._folder = self._make()
        except OSError as error:
            self.give_up(str(error))
            return None
        return self._folder / name

    def _make(self) -> Path:
        """Make this run's folder, which only this user can read; remove those of killed runs."""
        for folder in SHARED_MEMORY.glob(VERSIONS_PREFIX + "*"):
            with suppress(OSError, Timeout), FileLock(folder / LOCK, timeout=0):
                shutil.rmtree(folder)
        folder = SHARED_MEMORY / (VERSIONS_PREFIX + secrets.token_hex(8))
        folder.mkdir(mode=0o700)
        self._lock = FileLock(folder / LOCK)
        self._lock.acquire()
        return folder

    def give_up(self, reason: str) -> None:
        """Send versions through the disk from now on; print why."""
        if self._is_used:
            self._is_used = False
            self.say(f"weights go through the disk, not through memory: {reason}")

    def close(self) -> None:
        """Remove the folder. Versions are gone with it."""
        self._is_used = False
        if self._lock is not None:
            self._lock.release()
            self._lock = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
