"""Errors, one class per boundary that can be crossed. Each message names what happened and what to do next."""

import errno
import os
import sys
from pathlib import Path

TRACEBACK = "HOCKET_TRACEBACK"  # environment variable that has errors show their tracebacks; --traceback sets it
_REMEDIES = {
    errno.ENOSPC: "free space there",
    errno.EROFS: "mount it writable",
    errno.EACCES: "give user {user} access to it (in Docker: HOCKET_USER)",
    errno.ENOTDIR: "a file is in the way: move it, or name another folder",
    errno.EEXIST: "a file is in the way: move it, or name another folder",
    errno.ENOENT: "something has removed a file or folder there",
}


def remedy(error: BaseException) -> str | None:
    """Return what helps against an error of the disk, also one that safetensors has in words only; None if unknown."""
    found = (fix for number, fix in _REMEDIES.items() if os.strerror(number) in str(error))
    return next((fix.format(user=os.getuid()) for fix in found), None)


def door() -> str:
    """Return how a command of hocket begins where this one was typed."""
    name = Path(sys.argv[0]).name
    return "hocket" if name == "hocket" else f"python3 {sys.argv[0] if name == 'run.py' else 'run.py'}"


class HocketError(Exception):
    """Root of every error that hocket raises on purpose; the command line prints it without a traceback."""


class SetupError(HocketError):
    """The environment of packages is missing and can't be made."""


class ConfigError(HocketError):
    """A setting is unknown, contradictory or impossible on this machine."""


class DataError(HocketError):
    """A data source or row can't be used; the message names the file, the line and what is missing."""


class RewardError(HocketError):
    """Scoring failed so often that training on the remaining rollouts would be misleading."""


class ServerError(HocketError):
    """The generation server refused a request or can't be reached."""

    def __init__(self, message: str, *, code: str, status: int | None = None) -> None:
        super().__init__(message)
        self.code = code  # the server's machine-readable error code, or "unreachable" or "timeout"
        self.status = status  # the HTTP status; None without an answer

    @property
    def refused(self) -> bool:
        """Whether the server is well, and answered that the request is wrong (4xx), not only too slow (408)."""
        return self.status is not None and self.status < 500 and self.status != 408

    @property
    def foreign(self) -> bool:
        """Whether the server is another run's: it has another model, or wants another token."""
        return self.code == "other_model" or self.status in (401, 403)


class SyncError(HocketError):
    """A published weight version did not reach a server, or the proof that it did is missing."""


class TrainerError(HocketError):
    """The trainer can't go on: too many skipped steps in a row, or a sample that fits no micro-batch."""
