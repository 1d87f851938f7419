"""Errors, one class per boundary. Each message names what happened and what to do next."""

import enum
import errno
import os
import sys
from pathlib import Path

TRACEBACK = "HOCKET_TRACEBACK"  # variable that has errors show tracebacks; --traceback sets it
_REMEDIES = {
    errno.ENOSPC: "free space there",
    errno.EDQUOT: "free space there, or have the quota raised",
    errno.EFBIG: "raise the shell's limit of file sizes (ulimit -f)",
    errno.EMFILE: "raise the shell's limit of open files (ulimit -n 4096)",
    errno.EROFS: "mount it writable",
    errno.EACCES: "give user {user} access to it (in Docker: HOCKET_USER)",
    errno.ENOTDIR: "a file is in the way: move it, or name another folder",
    errno.EEXIST: "a file is in the way: move it, or name another folder",
    errno.EISDIR: "a folder is in the way: move it, or name another file",
    errno.ENOENT: "something has removed a file or folder there",
}


def remedy(error: BaseException) -> str | None:
    """Advise on an error of the disk, found by its words: safetensors has no error number."""
    found = (fix for number, fix in _REMEDIES.items() if os.strerror(number) in str(error))
    return next((fix.format(user=os.getuid()) for fix in found), None)


def cause_of(error: BaseException | None) -> str:
    """Return the first line of an error: vLLM appends the traceback of its worker."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def program() -> str:
    """Name the program as the user typed it, for commands in messages."""
    name = Path(sys.argv[0]).name
    return (
        "hocket" if name == "hocket" else f"python3 {sys.argv[0] if name == 'run.py' else 'run.py'}"
    )


class HocketError(Exception):
    """Root of what hocket raises on purpose; the command line prints it without a traceback."""


class SetupError(HocketError):
    """The environment of packages is missing and can't be made."""


class ConfigError(HocketError):
    """A setting is unknown, contradictory or impossible on this machine."""


class DataError(HocketError):
    """A data source or row can't be used; the message names the place and what is missing."""


class RewardError(HocketError):
    """Scoring failed too often to train on what is left."""


class ErrorOutcome(enum.Enum):
    """What a client does after a server's error."""

    REFUSED = "refused"  # stop: the server is well, and no other one would take the request either
    AGAIN = "ask again"  # ask the same server later
    LOST = "lost"  # ask another server; this one gets no work until a look finds it well


OUTCOMES = {
    "not_finite": ErrorOutcome.REFUSED,  # other servers have the same weights
    "generation_failed": ErrorOutcome.REFUSED,
    "too_many_sessions": ErrorOutcome.REFUSED,
    "asleep": ErrorOutcome.AGAIN,  # the trainer has the GPU
    "aborted": ErrorOutcome.AGAIN,  # new weights went first
    "body_timeout": ErrorOutcome.AGAIN,
    "unreachable": ErrorOutcome.LOST,
    "timeout": ErrorOutcome.LOST,
    "cut": ErrorOutcome.LOST,
    "protocol": ErrorOutcome.LOST,  # it answers as no hocket server does
    "other_session": ErrorOutcome.LOST,  # it was started again
    "engine_dead": ErrorOutcome.LOST,
    "shutting_down": ErrorOutcome.LOST,
    "reload_failed": ErrorOutcome.LOST,
    "not_resumed": ErrorOutcome.LOST,
    "sleep_failed": ErrorOutcome.LOST,
}
"""Outcomes that the HTTP status does not say: by it, 5xx is a lost server, and all others are refusals."""


class ServerError(HocketError):
    """The generation server refused a request or can't be reached."""

    def __init__(self, message: str, *, code: str, status: int | None = None) -> None:
        super().__init__(message)
        self.code = code  # the server's, or from client/server.py: "unreachable", "cut" ...
        self.status = status  # of HTTP; None without an answer, or after its head

    @property
    def outcome(self) -> ErrorOutcome:
        by_status = (
            ErrorOutcome.LOST
            if self.status is not None and self.status >= 500
            else ErrorOutcome.REFUSED
        )
        return OUTCOMES.get(self.code, by_status)

    @property
    def foreign(self) -> bool:
        """Whether the server is another run's: it has another model, or wants another token."""
        return self.code == "other_model" or self.status in (401, 403)


def differ(gap: float, bound: float) -> str:
    return (
        f"the servers' log-probs of these rollouts are not the trainer's: mean |Δ log-prob| {gap:.3g} is more than "
        f"{bound:.3g} (sync.max_logprob_gap). Nothing was trained on them. Likely: a server has other weights, samples "
        f"with another temperature, top_p or top_k, or mixes up prompts. Restart it"
    )


class SyncError(HocketError):
    """A published version did not reach a server, or the proof is missing."""


class TrainerError(HocketError):
    """The trainer can't go on: too many steps skipped in a row, or a sample too long."""
