"""One server of a run, as the trainer knows it: its state, and which state may follow which."""

import dataclasses
import enum

from hocket.client.server import ServerClient
from hocket.formats import ServerRow
from hocket.protocol import Health


class State(enum.Enum):
    NEW = "new"  # nobody has looked at it yet
    JOINING = "joining"  # it is looked at and, if it is well, gets the current weights
    UP = "up"  # it holds the current weights, and works
    WAITING = "waiting"  # it does not answer yet, is updating, or another trainer has it
    LOST = "lost"  # it failed at its work
    LEFT_OUT = "left out"  # it is another run's, another program, or can't take the weights


TRANSITIONS = {
    State.NEW: {State.JOINING},
    State.JOINING: {State.UP, State.WAITING, State.LOST, State.LEFT_OUT},
    State.UP: {State.LOST, State.JOINING},  # joining: it is brought up again, as a check has failed
    State.WAITING: {State.JOINING},
    State.LOST: {State.JOINING},
    State.LEFT_OUT: {State.JOINING},
}


@dataclasses.dataclass(eq=False, slots=True)
class Member:
    """A server of the pool, which alone moves it; others read its state and count its load."""

    server: ServerClient
    session: str | None = None  # of the process that answers there, while it is known
    version: int = 0  # of its weights, when it was last up
    health: Health | None = None  # its last one
    in_flight: int = 0  # tokens of unfinished turns and sessions, at most
    next_look: float = 0.0  # by time.monotonic
    _state: State = State.NEW
    _reason: str | None = "nobody has looked at it yet"

    @property
    def url(self) -> str:
        return self.server.url

    @property
    def state(self) -> State:
        return self._state

    @property
    def reason(self) -> str | None:
        """Why it gets no work; None while it is up."""
        return self._reason

    @property
    def is_up(self) -> bool:
        return self._state is State.UP

    @property
    def is_resting(self) -> bool:
        """Whether it waits for the next look."""
        return self._state not in (State.JOINING, State.UP)

    @property
    def kv_tokens(self) -> int:
        """Tokens that fit into its KV cache; 0 before it has answered."""
        return self.health.kv_tokens if self.health else 0

    @property
    def dtype(self) -> str:
        return self.health.dtype if self.health else ""

    def move(self, state: State, reason: str | None) -> None:
        """Change the state. Raises ValueError where TRANSITIONS does not have that."""
        if state not in TRANSITIONS[self._state]:
            raise ValueError(f"{self.url} can't go from {self._state.value!r} to {state.value!r}")
        self._state = state
        self._reason = reason
        if state in (State.JOINING, State.LOST, State.LEFT_OUT):
            self.session = None  # another process may answer next

    def shown(self) -> ServerRow:
        """Describe the server for people: address, state, version and load."""
        row: ServerRow = {
            "url": self.url,
            "up": self.is_up,
            "state": self._state.value,
            "reason": self._reason,
            "version": self.version,
        }
        if self.health:
            row["status"] = self.health.status
            row["in_flight"] = self.health.in_flight
            row["kv_tokens"] = self.health.kv_tokens
            row["waiting"] = self.health.waiting
            row["kv_use"] = self.health.kv_use
        return row
