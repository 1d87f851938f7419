"""Broadcast weights from the trainer's memory to the engines' workers, over NCCL or, on a CPU, gloo.

Each server has a group of its own with rank 0: a lost one disturbs no other. A bucket travels while the next is made.
"""

import asyncio
import concurrent.futures
import dataclasses
import functools
import itertools
import re
import secrets
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import torch
from torch import Tensor

from hocket import protocol
from hocket.client.server import ServerClient
from hocket.common.tasks import run_in_thread
from hocket.config import SyncConfig
from hocket.errors import HocketError, ServerError, SyncError
from hocket.protocol import manifest, nccl
from hocket.protocol.nccl import why_broken
from hocket.sync.transports import Answer, Delivery, Sending, Transport, WithFallback, transport

if TYPE_CHECKING:
    from hocket.trainer.trainer import Trainer

POLL_S = 0.002
SLOW_JOIN_S = 5.0  # one that fails after this is not tried again until it is restarted
READY_SHARE = 0.5  # of sync.timeout_s for a server to begin to receive


@transport("nccl")
def by_broadcast(sending: Sending) -> Transport:
    """Broadcast versions; servers that no broadcast reaches get them by disk."""
    fast = CollectiveTransport(
        sending.trainer, sending.config.sync, freezes=bool(sending.config.model.freeze)
    )
    sending.at_end(fast.close)
    return WithFallback(fast, sending.disk(), sending.say)


@dataclasses.dataclass
class CollectiveTransport:
    trainer: "Trainer"
    sync: SyncConfig
    freezes: bool = False  # some weights stay as they are: each server is sent these once
    _links: "dict[ServerClient, _Link]" = dataclasses.field(default_factory=dict)
    _specs: dict[str, protocol.TensorSpec] = dataclasses.field(
        default_factory=dict
    )  # of what was sent last

    async def deliver(
        self, version: int, servers: Sequence[ServerClient], *, compare: bool = False
    ) -> Delivery:
        start = time.perf_counter()
        for left in [server for server in self._links if server.is_closed]:
            self._links.pop(left).close()
        joined = await asyncio.gather(*map(self._link, servers))
        links = [link for link in joined if isinstance(link, _Link)]
        partial = self.freezes and not compare and all(link.holds_frozen for link in links)
        buckets = self.trained if partial else self.buckets
        await asyncio.gather(*(link.begin(version, compare, buckets) for link in links))
        prepared = time.perf_counter()
        try:
            checksum = await run_in_thread(self._send, version, links, buckets)
        except BaseException:  # of the trainer: nothing will come
            for link in links:
                link.close()
                link.answer.cancel()
            raise
        answers = [
            (checksum, await link.outcome() if isinstance(link, _Link) else link) for link in joined
        ]
        metrics = {
            "sync/mebibytes": sum(map(nccl.num_bytes, buckets)) / 2**20,
            "sync/prepare_s": prepared - start,
            "sync/transfer_s": time.perf_counter() - prepared,
        }
        return Delivery(dict(zip(servers, answers, strict=True)), metrics)

    @functools.cached_property
    def buckets(self) -> list[list[protocol.TensorLayout]]:
        return self.trainer.layout(nccl.BUCKET_BYTES)

    @functools.cached_property
    def trained(self) -> list[list[protocol.TensorLayout]]:
        return self.trainer.layout(nccl.BUCKET_BYTES, trained=True)

    def close(self) -> None:
        for link in self._links.values():
            link.close()

    def _send(
        self, version: int, links: "Sequence[_Link]", buckets: list[list[protocol.TensorLayout]]
    ) -> str:
        specs = self._specs  # of the frozen ones from before
        numbers = itertools.count(1)
        running: Iterator[None] = iter(())  # a bucket on its way to each server
        with concurrent.futures.ThreadPoolExecutor(max(1, len(links)), "send weights") as threads:

            def sink(named: Sequence[tuple[str, Tensor]]) -> None:
                nonlocal running
                flat, added = nccl.pack(named, self.trainer.device)
                specs.update(added)
                list(running)
                name = f"bucket {next(numbers)}/{len(buckets)} of version {version}"
                running = threads.map(lambda link: link.send(name, flat), links)

            only = {} if buckets is self.buckets else {"trained": True}
            self.trainer.stream(nccl.BUCKET_BYTES, sink, **only)
            list(running)
        return manifest.total_checksum(specs)

    async def _link(self, server: ServerClient) -> "_Link | HocketError":
        try:
            health = await server.health()
            link = self._links.get(server)
            if link is not None and link.session != health.session:
                link.close()
                link = None
            if link is None or (link.is_closed and not link.unreachable):
                link = self._links[server] = _Link(self, server, health)
            if link.unreachable:
                return SyncError(
                    f"the workers of {server.url} could not be connected with since they were started"
                )
            return link
        except HocketError as error:
            return error
        except (OSError, RuntimeError) as error:
            return SyncError(f"can't listen for the workers of {server.url}: {why_broken(error)}")


class _Link:
    """The connection to one process of a server; a failure closes it."""

    def __init__(
        self, transport: CollectiveTransport, server: ServerClient, health: protocol.Health
    ) -> None:
        self.session = health.session
        self.is_closed = False
        self.holds_frozen = False  # it was sent a whole version
        self.unreachable = False
        self.group: nccl.WeightGroup | None = None  # once joined
        self.answer: asyncio.Task[Answer]
        self._transport = transport
        self._server = server
        self._workers = health.workers
        self._device = transport.trainer.device if health.device == "cuda" else torch.device("cpu")
        self._receiving: nccl.WeightGroup | None = None  # the group, once its workers are ready
        self._transfers = 0  # of the group so far
        self._failure: SyncError | None = None  # seen from this end
        url = urlsplit(server.url)
        timeout_s = transport.sync.timeout_s
        host = nccl.address_towards(url.hostname or "", url.port or 80)
        self._store = nccl.make_store(host, timeout_s)
        self._address = protocol.GroupAddress(
            name=secrets.token_hex(8),
            host=host,
            port=self._store.port,
            device=nccl.gpu_id(self._device),
            timeout_s=timeout_s,
        )

    def close(self) -> None:
        """Leave the group, so that neither end waits for the deadline."""
        self.is_closed = True
        if self.group is not None:
            self.group.close()

    async def begin(
        self, version: int, compare: bool, buckets: list[list[protocol.TensorLayout]]
    ) -> None:
        """Tell the server what will come; wait until its workers are ready or it answers."""
        start = time.monotonic()
        transport = self._transport
        self._receiving = None
        self._transfers += 1
        source = protocol.CollectiveSource(
            group=self._address,
            turn=self._transfers,
            adapter=transport.trainer.adapter,
            buckets=buckets,
            partial=buckets is not transport.buckets,
        )
        request = protocol.ReloadRequest(
            version=version, source=source, in_flight=transport.sync.in_flight, compare=compare
        )
        self.answer = asyncio.create_task(self._ask(request))
        seconds = READY_SHARE * transport.sync.timeout_s
        try:
            async with asyncio.timeout(seconds):
                if self.group is None and await self._announced(0):
                    self.group = await run_in_thread(self._join)
                self._receiving = self.group if await self._announced(self._transfers) else None
        except TimeoutError:
            self._failure = SyncError(
                f"server {self._server.url} did not begin to receive version {version} in {seconds:g} s; "
                f"to drain requests first, raise sync.timeout_s"
            )
        except RuntimeError as error:
            self._failure = SyncError(
                f"can't connect with the workers of {self._server.url}: {why_broken(error)}"
            )
        self.unreachable = self.group is None and time.monotonic() - start > SLOW_JOIN_S

    async def _announced(self, number: int) -> bool:
        """Wait until all workers announce a transfer. Returns whether they do before the answer."""
        ranks = range(1, 1 + self._workers)
        while not nccl.announced(self._store, self._address.name, number, ranks):
            if self.answer.done():
                return False
            await asyncio.sleep(POLL_S)
        return True

    def _join(self) -> nccl.WeightGroup:
        address = self._address
        timeout_s = self._transport.sync.bucket_timeout_s
        return nccl.WeightGroup(
            self._store,
            address.name,
            self._device,
            address.host,
            rank=0,
            size=1 + self._workers,
            timeout_s=timeout_s,
        )

    async def _ask(self, request: protocol.ReloadRequest) -> Answer:
        try:
            return await self._server.ask(request, timeout_s=self._transport.sync.timeout_s)
        except HocketError as error:
            self.close()
            return error

    def send(self, name: str, flat: Tensor) -> None:
        """Send one bucket, unless one has failed."""
        group = self._receiving
        if group is None:
            return
        try:
            group.broadcast(flat.to(group.device))
        except RuntimeError as error:
            reason = f"the connection broke: {why_broken(error)}"
            if re.search("(?i)timed ?out", str(error)):
                seconds = self._transport.sync.bucket_timeout_s
                reason = f"{seconds:g} s passed; is it stopped? A slower network needs a higher sync.timeout_s"
            self._receiving = None
            self._failure = SyncError(f"server {self._server.url} did not take {name}: {reason}")

    async def outcome(self) -> Answer:
        """Return the server's answer, where it names no cause with that seen from this end."""
        if self._failure is not None:
            self.close()  # or the workers would go on waiting
        answer = await self.answer
        self.holds_frozen |= isinstance(answer, protocol.ReloadResponse)
        if self._failure is not None and isinstance(answer, ServerError) and answer.status is None:
            return SyncError(f"{self._failure}; {answer}")
        return answer
