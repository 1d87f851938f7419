"""What every transport answers."""

import dataclasses

from hocket.errors import HocketError
from hocket.protocol import ReloadResponse


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """What became of one version on its way.

    Attributes:
        checksum: of what was sent.
        num_bytes: that each server was sent, on average.
        prepare_s: seconds until the first byte could be sent.
        transfer_s: seconds until the last server had answered.
        answers: server by server; a failure is a value, for the other servers go on.
        changed: share of the elements whose bits differ from the version before, where that is known.
        notes: what a user should know.
    """

    checksum: str
    num_bytes: int
    prepare_s: float
    transfer_s: float
    answers: tuple[ReloadResponse | HocketError, ...]
    changed: float | None = None
    notes: tuple[str, ...] = ()
