"""How weight versions get to the servers: what a transport is, and how one stands in for another that fails."""

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

Answer = ReloadResponse | HocketError  # a failure is a value: others go on


NO_WAY = ("unreachable", "engine_dead", "shutting_down", "timeout", "not_held")
"""Codes after which a version gets there in no other way either."""


class Delivery(NamedTuple):
    answers: dict[ServerClient, tuple[str, Answer]]  # with the checksum that was sent
    metrics: Metrics  # sync/*, with sync/mebibytes, sync/prepare_s and sync/transfer_s at least


class Transport(Protocol):
    """A way of weight versions to the servers."""

    async def deliver(
        self, version: int, servers: Sequence[ServerClient], *, compare: bool = False
    ) -> Delivery:
        """Have servers load the trainer's weights, or compare; can be repeated. Raises SyncError."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sending:
    """What a transport is built from."""

    config: Config
    trainer: "Trainer"
    versions: "Versions"
    disk: Callable[
        ..., Transport
    ]  # makes the transport by files; write=FUNCTION: what servers are sent first
    say: Callable[[str], None]  # prints a line
    at_end: Callable[[Callable[[], None]], object]  # has a function called when the run ends


TRANSPORTS: Registry[Callable[[Sending], Transport]] = Registry(
    "transport", disk="hocket.sync.disk", nccl="hocket.sync.nccl", delta="hocket.extras.delta.write"
)
transport = TRANSPORTS.register
"""Decorator of a function that makes a transport, which `sync.backend` then names; its other arguments are options.

Where servers read something else than a whole version from a folder, a part of the server adds how, as
`server.engine.sources[KIND]` (hocket.server.parts).

Example: a plugin that says how long each version takes.

    @transport("timed")
    def timed(sending: Sending, *, unit: str = "s") -> Transport:
        return Timed(sending.disk(), unit, sending.say)

    class Timed:
        def __init__(self, way: Transport, unit: str, say: Callable[[str], None]) -> None:
            self._way = way
            self._unit = unit
            self._say = say

        async def deliver(
            self, version: int, servers: Sequence[ServerClient], *, compare: bool = False
        ) -> Delivery:
            start = time.perf_counter()
            delivery = await self._way.deliver(version, servers, compare=compare)
            self._say(f"version {version}: {time.perf_counter() - start:.3f} {self._unit}")
            return delivery
"""


def chosen_transport(sync: SyncConfig) -> Callable[[Sending], Transport]:
    """Return the maker of the transport in sync.backend, which is no longer `auto`. Raises ConfigError."""
    return TRANSPORTS.choose(sync.backend, "sync.backend", keys=("sending",))


@dataclasses.dataclass
class WithFallback:
    """Use a fast transport, and the disk for servers that it does not reach."""

    fast: Transport
    disk: Transport
    say: Callable[[str], None] = lambda line: None

    async def deliver(
        self, version: int, servers: Sequence[ServerClient], *, compare: bool = False
    ) -> Delivery:
        delivery = await self.fast.deliver(version, servers, compare=compare)
        failed = not_reached(delivery)
        if failed:
            urls = ", ".join(server.url for server in failed)
            self.say(
                f"version {version} goes to {urls} by disk instead: {delivery.answers[failed[0]][1]}"
            )
            delivery = joined(delivery, await self.disk.deliver(version, failed, compare=compare))
        return Delivery(delivery.answers, delivery.metrics | {"sync/fallbacks": float(len(failed))})


def not_reached(delivery: Delivery) -> list[ServerClient]:
    """Return who may take it in another way."""
    errors = (
        (server, answer)
        for server, (_, answer) in delivery.answers.items()
        if isinstance(answer, HocketError)
    )
    return [server for server, error in errors if getattr(error, "code", "") not in NO_WAY]


def joined(first: Delivery, second: Delivery) -> Delivery:
    """Return the outcome of sending to all, then to some again."""
    metrics = dict(first.metrics)
    metrics["sync/mebibytes"] += (
        second.metrics["sync/mebibytes"] * len(second.answers) / len(first.answers)
    )
    metrics["sync/transfer_s"] += (
        second.metrics.get("sync/prepare_s", 0.0) + second.metrics["sync/transfer_s"]
    )
    return Delivery(first.answers | second.answers, metrics)
