"""Define the errors that hocket raises on purpose, one class per boundary.

Each message names what happened and what to do next.
"""

import enum
import errno
import os
import sys
from pathlib import Path

TRACEBACK = "HOCKET_TRACEBACK"  # variable that has errors show tracebacks; --traceback sets it
_REMEDIES = {  # by number of an error of the operating system
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
    """Advise on an error of the disk; None if it is another error."""
    for number, fix in _REMEDIES.items():
        # By the words, as errors of safetensors have no number.
        if os.strerror(number) in str(error):
            return fix.format(user=os.getuid())
    return None


def cause_of(error: BaseException | None) -> str:
    """Take the first line of an error's message: vLLM appends the traceback of its worker."""
    message = str(error).strip() or type(error).__name__
    return message.splitlines()[0]


def program() -> str:
    """Name the program as the user typed it, for commands in messages."""
    name = Path(sys.argv[0]).name
    if name == "run.py":
        return f"python3 {sys.argv[0]}"
    if name == "hocket" or Path(__file__).with_name("shipped").exists():  # installed from a wheel
        return "hocket"
    return "python3 run.py"


def pip() -> str:
    """Name pip of this environment, for commands in messages."""
    return "pip" if program() == "hocket" else ".venv/bin/pip"


class HocketError(Exception):
    """The root of hocket's own errors; the command line prints them without a traceback."""


class SetupError(HocketError):
    """The environment of packages is missing, and can't be made."""


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
    "protocol": ErrorOutcome.LOST,  # the answer is not a hocket server's
    "other_session": ErrorOutcome.LOST,  # the server was started again
    "engine_dead": ErrorOutcome.LOST,
    "shutting_down": ErrorOutcome.LOST,
    "reload_failed": ErrorOutcome.LOST,
    "not_resumed": ErrorOutcome.LOST,
    "sleep_failed": ErrorOutcome.LOST,
}
"""Code of a ServerError -> its outcome. All others go by the HTTP status: 5xx is LOST."""


class ServerError(HocketError):
    """The generation server refused a request or can't be reached.

    Attributes:
        code: the server's word for it, or one from client/server.py: "unreachable", "cut" ...
        status: the HTTP status; None if there was no answer, or if a stream broke off after it.
    """

    def __init__(self, message: str, *, code: str, status: int | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.status = status

    @property
    def outcome(self) -> ErrorOutcome:
        """What the client does next."""
        if self.code in OUTCOMES:
            return OUTCOMES[self.code]
        if self.status is not None and self.status >= 500:
            return ErrorOutcome.LOST
        return ErrorOutcome.REFUSED

    @property
    def foreign(self) -> bool:
        """Whether the server belongs to another run: it has another model or another token."""
        return self.code == "other_model" or self.status in (401, 403)


def differ(gap: float, bound: float) -> str:
    """Word the error of rollouts whose log-probs on the servers are not the trainer's."""
    return (
        "the servers' log-probs of these rollouts are not the trainer's: mean |Δ log-prob| "
        f"{gap:.3g} is more than {bound:.3g} (sync.max_logprob_gap). Nothing was trained on them. "
        "Likely: a server has other weights, samples with another temperature, top_p or top_k, or "
        "mixes up prompts. Restart it"
    )


class SyncError(HocketError):
    """A published version did not reach a server, or could not be verified there."""


class TrainerError(HocketError):
    """The trainer can't go on: too many steps skipped in a row, or a sample too long."""
