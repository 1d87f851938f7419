"""What a generation engine can do, which state may follow which, and whose it is."""

import dataclasses
import enum
import time
from typing import NamedTuple

from hocket import protocol
from hocket.server.errors import ApiError

RESTART = "restart the server; its log says more"
ASLEEP = protocol.ErrorBody(
    code="asleep",
    message="the engine is asleep: a trainer is using the GPU",
    hint="send the request again when it is awake; if the trainer is gone, start it again, or restart the server",
)
DEAD = protocol.ErrorBody(code="engine_dead", message="the engine's process ended", hint=RESTART)
STOPPING = protocol.ErrorBody(
    code="shutting_down",
    message="the server is shutting down",
    hint="send the request again when it is back",
)

HOLD_S = 60.0
"""Seconds of silence after which another trainer may have the server: heartbeats come every few seconds."""


class EngineState(enum.Enum):
    READY = "ready"  # it generates; while it changes its weights, /health calls it updating
    ASLEEP = "asleep"  # a trainer has its GPU
    BROKEN = "broken"  # paused, as its weights may be half loaded; a reload mends that
    # Both. A reload brings it back to ASLEEP, and then wakes it.
    BROKEN_ASLEEP = "broken and asleep"
    LOST = "lost"  # its process ended, or it can't come back to its GPU: it must be started again
    STOPPING = "stopping"  # the server is shutting down


# A failure may follow another one, with another reason.
ENDS = {EngineState.LOST, EngineState.STOPPING}
TRANSITIONS = {
    EngineState.READY: ENDS | {EngineState.ASLEEP, EngineState.BROKEN},
    EngineState.ASLEEP: ENDS | {EngineState.READY, EngineState.BROKEN_ASLEEP},
    EngineState.BROKEN: ENDS | {EngineState.READY, EngineState.BROKEN, EngineState.BROKEN_ASLEEP},
    EngineState.BROKEN_ASLEEP: ENDS | {EngineState.ASLEEP, EngineState.BROKEN_ASLEEP},
    EngineState.LOST: ENDS,
    EngineState.STOPPING: {EngineState.STOPPING},
}
FAILED = ENDS | {EngineState.BROKEN, EngineState.BROKEN_ASLEEP}


class Held(NamedTuple):
    """A version that the model holds whole, with the answer to the reload that brought it."""

    source: protocol.Source | None  # None: what it was started with
    answer: protocol.ReloadResponse


@dataclasses.dataclass(eq=False, slots=True)
class Condition:
    """The state of an engine, and what its model holds. Only engine.py changes them.

    No failed engine holds a version: which of its weights are new is not known.
    """

    held: Held | None  # the version that the model holds; None where it holds none whole
    version: int = 0  # of the last load: new tokens are sampled with it
    is_base_replaced: bool = False  # True once the weights that adapters belong to are gone
    state: EngineState = EngineState.READY
    reason: protocol.ErrorBody | None = None  # why it can't generate; None while it is ready

    @property
    def failure(self) -> protocol.ErrorBody | None:
        """The reason of a failed engine; None for one that is ready, or only asleep."""
        return self.reason if self.state in FAILED else None

    @property
    def is_asleep(self) -> bool:
        return self.state in (EngineState.ASLEEP, EngineState.BROKEN_ASLEEP)

    def move(self, state: EngineState, reason: protocol.ErrorBody | None) -> None:
        """Change the state. Raises ValueError where TRANSITIONS does not have that."""
        if state not in TRANSITIONS[self.state]:
            raise ValueError(f"the engine can't go from {self.state.value!r} to {state.value!r}")
        self.state = state
        self.reason = reason
        if state in FAILED:
            self.held = None

    def hold(self, held: Held) -> None:
        """Note that a version was loaded."""
        self.held = held
        self.version = held.answer.version


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
