"""What a generation engine can do, and which state may follow which."""

import dataclasses
import enum
from typing import NamedTuple

from hocket import protocol

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


class EngineState(enum.Enum):
    READY = "ready"  # it generates; while it changes its weights, /health calls it updating
    ASLEEP = "asleep"  # a trainer has its GPU
    BROKEN = "broken"  # paused, as its weights may be half loaded; a reload mends that
    BROKEN_ASLEEP = (
        "broken and asleep"  # both; a reload brings it back to ASLEEP, and then wakes it
    )
    LOST = "lost"  # its process ended, or it can't come back to its GPU: it must be started again
    STOPPING = "stopping"  # the server is shutting down


# A failure may follow another one, with another reason.
TRANSITIONS = {
    EngineState.READY: {
        EngineState.ASLEEP,
        EngineState.BROKEN,
        EngineState.LOST,
        EngineState.STOPPING,
    },
    EngineState.ASLEEP: {
        EngineState.READY,
        EngineState.BROKEN_ASLEEP,
        EngineState.LOST,
        EngineState.STOPPING,
    },
    EngineState.BROKEN: {
        EngineState.READY,
        EngineState.BROKEN,
        EngineState.BROKEN_ASLEEP,
        EngineState.LOST,
        EngineState.STOPPING,
    },
    EngineState.BROKEN_ASLEEP: {
        EngineState.ASLEEP,
        EngineState.BROKEN_ASLEEP,
        EngineState.LOST,
        EngineState.STOPPING,
    },
    EngineState.LOST: {EngineState.LOST, EngineState.STOPPING},
    EngineState.STOPPING: {EngineState.STOPPING},
}
FAILED = {
    EngineState.BROKEN,
    EngineState.BROKEN_ASLEEP,
    EngineState.LOST,
    EngineState.STOPPING,
}


class Held(NamedTuple):
    """A version that the model holds whole, with the answer to the reload that brought it."""

    source: protocol.Source | None  # None: what it was started with
    answer: protocol.ReloadResponse


@dataclasses.dataclass(eq=False, slots=True)
class Condition:
    """The state of an engine, and what its model holds. The engine alone changes them; others read.

    No failed engine holds a version: which of its weights are new is not known.
    """

    _held: Held | None
    _version: int = 0
    _is_base_replaced: bool = False
    _state: EngineState = EngineState.READY
    _reason: protocol.ErrorBody | None = None

    @property
    def state(self) -> EngineState:
        return self._state

    @property
    def reason(self) -> protocol.ErrorBody | None:
        """Why it can't generate; None while it is ready."""
        return self._reason

    @property
    def failure(self) -> protocol.ErrorBody | None:
        """Why it can't generate, but for sleep."""
        return self._reason if self._state in FAILED else None

    @property
    def is_asleep(self) -> bool:
        return self._state in (EngineState.ASLEEP, EngineState.BROKEN_ASLEEP)

    @property
    def held(self) -> Held | None:
        """The version that the model holds; None where it holds none whole."""
        return self._held

    @property
    def version(self) -> int:
        """The number of the last version that was loaded, with which new tokens are sampled."""
        return self._version

    @property
    def is_base_replaced(self) -> bool:
        """Whether the weights that adapters belong to are gone."""
        return self._is_base_replaced

    def move(self, state: EngineState, reason: protocol.ErrorBody | None) -> None:
        """Change the state. Raises ValueError where TRANSITIONS does not have that."""
        if state not in TRANSITIONS[self._state]:
            raise ValueError(f"the engine can't go from {self._state.value!r} to {state.value!r}")
        self._state = state
        self._reason = reason
        if state in FAILED:
            self._held = None

    def replace_base(self) -> None:
        """Note that a whole version is about to overwrite the first weights."""
        self._is_base_replaced = True

    def drop_weights(self) -> None:
        """Note that the weights were thrown away, as the engine fell asleep."""
        self._held = None
        self._is_base_replaced = True

    def hold(self, held: Held) -> None:
        """Note that a version was loaded."""
        self._held = held
        self._version = held.answer.version
