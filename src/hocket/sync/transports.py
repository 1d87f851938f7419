"""Transports: how weight versions get to the servers.

A fast transport can have the disk as its fallback for servers that it does not reach.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from hocket.client.server import ServerClient
from hocket.common.registry import Registry
from hocket.config import Config, SyncConfig
from hocket.errors import HocketError
from hocket.protocol import ReloadResponse
from hocket.types import Metrics

if TYPE_CHECKING:
    from hocket.sync.versions import Versions
    from hocket.trainer.trainer import Trainer

Answer = ReloadResponse | HocketError
"""A server's answer to a version. A failure is a value, so that other servers go on."""
NO_WAY = ("unreachable", "engine_dead", "shutting_down", "timeout", "not_held")
"""Codes of failures after which no other transport gets the version to the server either."""


class Delivery(NamedTuple):
    """The outcome of sending a version to servers."""

    answers: dict[ServerClient, tuple[str, Answer]]  # the checksum that was sent, and the answer
    metrics: Metrics  # sync/*, with sync/mebibytes, sync/prepare_s and sync/transfer_s at least


class Transport(Protocol):
    """A way to get weight versions to the servers."""

    async def deliver(
        self, version: int, servers: Sequence[ServerClient], *, compare: bool = False
    ) -> Delivery:
        """Have servers load the trainer's weights as a version; it may be called again.

        With `compare` they compare the weights with their own. Raises SyncError.
        """


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sending:
    """The parts of a run from which a transport is built."""

    config: Config
    trainer: "Trainer"
    versions: "Versions"
    # Makes the transport by files; write=FUNCTION writes what servers are sent first.
    disk: Callable[..., Transport]
    say: Callable[[str], None]  # prints a line
    at_end: Callable[[Callable[[], None]], object]  # has a function called when the run ends


TRANSPORTS: Registry[Callable[[Sending], Transport]] = Registry(
    "transport", disk="hocket.sync.disk", nccl="hocket.sync.nccl", delta="hocket.extras.delta.write"
)
transport = TRANSPORTS.register
"""Register a function that makes a transport (decorator); `sync.backend` names it.

Its other arguments are options. If servers get anything but a whole version in a folder, a part of
the server must add the function that finds it, as `server.engine.sources[KIND]`.

Args:
    name: its name in `sync.backend`.

Example: a plugin file that prints how long each version takes.

    @transport("timed")
    def timed(sending: Sending, *, unit: str = "s") -> Transport:
        return Timed(sending.disk(), unit, sending.say)

    class Timed:
        def __init__(self, way: Transport, unit: str, say: Callable[[str], None]) -> None:
            self._way = way
            self._unit = unit
            self._say = say

        async def deliver(
            self,
            version: int,
            servers: Sequence[ServerClient],
            *,
            compare: bool = False,
        ) -> Delivery:
            start = time.perf_counter()
            delivery = await self._way.deliver(version, servers, compare=compare)
            self._say(f"version {version}: {time.perf_counter() - start:.3f} {self._unit}")
            return delivery
"""


def chosen_transport(sync: SyncConfig) -> Callable[[Sending], Transport]:
    """Look up the function that makes the transport in sync.backend. Raises ConfigError.

    The config must be one whose `auto` has been replaced by a choice.
    """
    return TRANSPORTS.choose(sync.backend, "sync.backend", keys=("sending",))


@dataclasses.dataclass
class WithFallback:
    """A transport that uses a fast one, and the disk for servers that it does not reach."""

    fast: Transport
    disk: Transport
    say: Callable[[str], None] = lambda line: None

    async def deliver(
        self, version: int, servers: Sequence[ServerClient], *, compare: bool = False
    ) -> Delivery:
        """Send the version by the fast transport, then by disk to servers that failed."""
        delivery = await self.fast.deliver(version, servers, compare=compare)
        failed = not_reached(delivery)
        if failed:
            urls = ", ".join(server.url for server in failed)
            reason = delivery.answers[failed[0]][1]
            self.say(f"version {version} goes to {urls} by disk instead: {reason}")
            delivery = combined(delivery, await self.disk.deliver(version, failed, compare=compare))
        return Delivery(delivery.answers, delivery.metrics | {"sync/fallbacks": float(len(failed))})


def not_reached(delivery: Delivery) -> list[ServerClient]:
    """List the servers that failed to load a version, and to which another transport may get it."""
    failed = list[ServerClient]()
    for server, (_, answer) in delivery.answers.items():
        if isinstance(answer, HocketError) and getattr(answer, "code", "") not in NO_WAY:
            failed.append(server)
    return failed


def combined(first: Delivery, second: Delivery) -> Delivery:
    """Combine the outcome of sending to all servers with that of sending to some of them again.

    sync/mebibytes stays a mean per server of the first delivery; all time after the first sending
    began counts as transfer.
    """
    metrics = dict(first.metrics)
    mebibytes_again = second.metrics["sync/mebibytes"] * len(second.answers)
    metrics["sync/mebibytes"] += mebibytes_again / len(first.answers)
    prepare_s = second.metrics.get("sync/prepare_s", 0.0)
    metrics["sync/transfer_s"] += prepare_s + second.metrics["sync/transfer_s"]
    return Delivery(first.answers | second.answers, metrics)
