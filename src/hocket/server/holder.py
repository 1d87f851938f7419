"""Which trainer a server works for: one at a time, as two would train on each other's samples."""

import time

from hocket.server.errors import ApiError

HOLD_S = 60.0
"""Seconds after which a trainer that is not heard of counts as gone, and another one may have its server.

Each of its requests is a sign of life, and so are its heartbeats, which come every few seconds however long its steps
take. A trainer that ends says so; one that was killed and resumes is the same trainer, by the id in its run folder.
"""


class Holder:
    """The trainer that has the server, if there is one."""

    def __init__(self) -> None:
        self._trainer: str | None = None
        self._since = self._heard = 0.0  # by time.monotonic

    def hear(self, trainer: str | None, *, take_over: bool = False) -> None:
        """Give the server to a trainer, or let it keep it; None is no trainer. Raises ApiError if another has it."""
        if trainer is None:
            return
        now = time.monotonic()
        if self._trainer not in (None, trainer) and now - self._heard < HOLD_S and not take_over:
            message = (
                f"this server works for trainer {self._trainer}, for {now - self._since:.0f} s, which was last heard "
                f"of {now - self._heard:.0f} s ago"
            )
            hint = f"wait until it has ended, or was silent for {HOLD_S:g} s; sync.take_over=true takes its server"
            raise ApiError(409, "other_trainer", message, hint)
        if self._trainer != trainer:
            self._trainer = trainer
            self._since = now
        self._heard = now

    def leave(self, trainer: str) -> None:
        if self._trainer == trainer:
            self._trainer = None
