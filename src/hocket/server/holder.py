"""Give a server to one trainer at a time."""

import time

from hocket.server.errors import ApiError

HOLD_S = 60.0
"""Seconds of silence after which another trainer may have the server: heartbeats come every few seconds."""


class Holder:
    """The trainer that has the server: of two, each would sample with the other's weights.

    A trainer that was killed and resumes is the same, by the id in its run folder.
    """

    def __init__(self) -> None:
        self._trainer: str | None = None
        self._heard = 0.0  # by time.monotonic

    def claim(self, trainer: str | None, *, take_over: bool = False) -> None:
        """Let a trainer have the server, or keep it. Raises ApiError if another one has it.

        None is a client that is no trainer, which is always served.
        """
        if trainer is None:
            return
        silent_s = time.monotonic() - self._heard
        if self._trainer not in (None, trainer) and silent_s < HOLD_S and not take_over:
            message = f"this server works for trainer {self._trainer}, which was last heard of {silent_s:.0f} s ago"
            hint = f"wait until it has ended, or was silent for {HOLD_S:g} s; sync.take_over=true takes its server"
            raise ApiError(409, "other_trainer", message, hint)
        self._trainer = trainer
        self._heard = time.monotonic()

    def release(self, trainer: str) -> None:
        if self._trainer == trainer:
            self._trainer = None
