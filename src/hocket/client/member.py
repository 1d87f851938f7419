"""One server of a run, as the trainer knows it: its state, and which state may follow which."""

import dataclasses
import enum

from hocket.client.server import ServerClient
from hocket.formats import ServerRow
from hocket.protocol import Health


class State(enum.Enum):
    """The states of a server. Only an UP one gets work."""

    NEW = "new"  # nobody has looked at it yet
    JOINING = "joining"  # a look is under way: if the server is well, it gets the current weights
    CHECKING = "checking"  # it holds the current weights, which the run's parts still check
    UP = "up"  # it holds the current weights, and works
    WAITING = "waiting"  # it does not answer yet, is updating, or another trainer has it
    LOST = "lost"  # it failed at its work
    LEFT_OUT = "left out"  # it is another run's, another program, or can't take the weights


TRANSITIONS = {
    State.NEW: {State.JOINING},
    State.JOINING: {State.CHECKING, State.WAITING, State.LOST, State.LEFT_OUT},
    # JOINING: a check has failed, so each server is brought up alone. WAITING: it was broken off.
    State.CHECKING: {State.UP, State.JOINING, State.WAITING, State.LOST},
    State.UP: {State.LOST},
    State.WAITING: {State.JOINING},
    State.LOST: {State.JOINING},
    State.LEFT_OUT: {State.JOINING},
}


@dataclasses.dataclass(eq=False, slots=True)
class Member:
    """A server of the pool. The pool alone moves it; others read its state and count its load."""

    server: ServerClient
    session: str | None = None  # session of the process that answers there; None if not known
    version: int = 0  # version of its weights when it was last up
    health: Health | None = None  # its last answer to a look or heartbeat
    in_flight: int = 0  # upper bound of the tokens of unfinished turns and sessions
    next_look: float = 0.0  # time of the next look, by time.monotonic
    _state: State = State.NEW
    _reason: str | None = "nobody has looked at it yet"

    @property
    def url(self) -> str:
        """The server's base URL."""
        return self.server.url

    @property
    def state(self) -> State:
        """The server's state."""
        return self._state

    @property
    def reason(self) -> str | None:
        """Why the server gets no work; None while it is up."""
        return self._reason

    @property
    def is_up(self) -> bool:
        """Whether the server may get work."""
        return self._state is State.UP

    @property
    def is_loaded(self) -> bool:
        """Whether the server holds the current weights, checked or not."""
        return self._state in (State.CHECKING, State.UP)

    @property
    def is_joining(self) -> bool:
        """Whether a look at the server is under way, which may bring it up."""
        return self._state in (State.JOINING, State.CHECKING)

    @property
    def is_resting(self) -> bool:
        """Whether the server waits for the next look."""
        return not (self.is_joining or self.is_up)

    @property
    def kv_tokens(self) -> int:
        """Number of tokens that fit into the server's KV cache; 0 before it has answered."""
        return self.health.kv_tokens if self.health else 0

    @property
    def dtype(self) -> str:
        """The data type of the server's weights; "" before it has answered."""
        return self.health.dtype if self.health else ""

    def move(self, state: State, reason: str | None) -> None:
        """Change the state. Raises ValueError if TRANSITIONS does not allow the change."""
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
