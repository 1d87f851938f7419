"""Broadcast weights from the trainer's memory to the engines' workers, by NCCL or, on a CPU, gloo.

The trainer has a group with the workers of each server, so that a lost server disturbs no other. A
bucket of tensors travels while the next one is made.
"""

import asyncio
import dataclasses
import itertools
import re
import secrets
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
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

POLL_S = 0.002  # seconds between two looks for announcements
SLOW_JOIN_S = 5.0  # a server that fails to join after this long is not tried again until a restart
READY_SHARE = 0.5  # share of sync.timeout_s in which a server must begin to receive
Buckets = list[list[protocol.TensorLayout]]  # the tensors of each bucket


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
    """A transport that broadcasts versions to servers, each of which is connected by a link."""

    trainer: "Trainer"
    sync: SyncConfig
    freezes: bool = False  # some weights never change: each server is sent these only once
    _layouts: dict[bool, Buckets] = dataclasses.field(default_factory=dict)  # `_buckets` keeps them
    _links: "dict[ServerClient, _Link]" = dataclasses.field(default_factory=dict)
    # The specs of all weights as they were sent last; frozen ones stay from an earlier version.
    _specs: dict[str, protocol.TensorSpec] = dataclasses.field(default_factory=dict)

    async def deliver(
        self, version: int, servers: Sequence[ServerClient], *, compare: bool = False
    ) -> Delivery:
        """Send the trainer's weights to all servers at once; see `Transport`.

        Raises errors of the trainer; a server's failure is its answer.
        """
        start = time.perf_counter()

        # Connect with the servers, and drop the links of those that have left the pool.
        for server in [server for server in self._links if server.is_closed]:
            self._links.pop(server).close()
        links_or_errors = await asyncio.gather(*map(self._link, servers))
        links = [link for link in links_or_errors if isinstance(link, _Link)]

        # Announce the buckets, and wait until each server is ready or has answered. Frozen weights
        # are left out if all servers have them, except from a comparison.
        partial = self.freezes and not compare and all(link.holds_frozen for link in links)
        buckets = self._buckets(partial)
        await asyncio.gather(*(link.begin(version, compare, buckets, partial) for link in links))
        prepared = time.perf_counter()

        # Send them to the servers that are ready.
        try:
            checksum = await run_in_thread(self._send, version, links, partial)
        except BaseException:
            # The trainer has failed, so nothing will come: do not let servers wait for it.
            for link in links:
                link.close()
                link.answer.cancel()
            raise

        # Collect the servers' answers.
        answers = dict[ServerClient, tuple[str, Answer]]()
        for server, link_or_error in zip(servers, links_or_errors, strict=True):
            if isinstance(link_or_error, _Link):
                answers[server] = checksum, await link_or_error.outcome()
            else:
                answers[server] = checksum, link_or_error
        metrics = {
            "sync/mebibytes": sum(map(nccl.num_bytes, buckets)) / 2**20,
            "sync/prepare_s": prepared - start,
            "sync/transfer_s": time.perf_counter() - prepared,
        }
        return Delivery(answers, metrics)

    def _buckets(self, partial: bool) -> Buckets:
        """Describe the buckets of all weights or, if `partial`, of the trained ones only."""
        if partial not in self._layouts:
            self._layouts[partial] = self.trainer.layout(nccl.BUCKET_BYTES, trained=partial)
        return self._layouts[partial]

    def close(self) -> None:
        """Leave all groups: the run ends."""
        for link in self._links.values():
            link.close()

    def _send(self, version: int, links: "Sequence[_Link]", partial: bool) -> str:
        """Make the buckets and send them by all links. Returns the checksum of all weights."""
        num_buckets = len(self._buckets(partial))
        numbers = itertools.count(1)
        sends: list[Future[None]] = []  # of the last bucket, by each link
        with ThreadPoolExecutor(max(1, len(links)), "send weights") as threads:

            def send_bucket(named: Sequence[tuple[str, Tensor]]) -> None:
                """Pack a bucket while the one before is on its way, then send it in threads."""
                flat, specs = nccl.pack(named, self.trainer.device)
                self._specs.update(specs)
                for send in sends:
                    send.result()
                name = f"bucket {next(numbers)}/{num_buckets} of version {version}"
                sends[:] = [threads.submit(link.send, name, flat) for link in links]

            self.trainer.stream(nccl.BUCKET_BYTES, send_bucket, trained=partial)
            for send in sends:
                send.result()
        return manifest.total_checksum(self._specs)

    async def _link(self, server: ServerClient) -> "_Link | HocketError":
        """Find or make the link to a server. Returns the error where there is none."""
        try:
            health = await server.health()
            link = self._links.get(server)
            # A server that was started again has workers in no group.
            if link is not None and link.session != health.session:
                link.close()
                link = None
            if link is not None and link.unreachable:
                reason = "could not be connected with since they were started"
                return SyncError(f"the workers of {server.url} {reason}")
            if link is None or link.is_closed:
                link = self._links[server] = _Link(self, server, health)
            return link
        except HocketError as error:
            return error
        except (OSError, RuntimeError) as error:
            return SyncError(f"can't listen for the workers of {server.url}: {why_broken(error)}")


class _Link:
    """The connection to a server's workers, until the server ends. A failure closes it.

    A transfer takes three calls: `begin`, `send` for each bucket, `outcome`.
    """

    def __init__(
        self, transport: CollectiveTransport, server: ServerClient, health: protocol.Health
    ) -> None:
        self.session = health.session
        self.is_closed = False
        self.holds_frozen = False  # the server has received a version with its frozen weights
        self.unreachable = False  # the workers did not join, and would take as long again
        self.group: nccl.WeightGroup | None = None  # set once trainer and workers have joined it
        self.answer: asyncio.Task[Answer]  # the server's answer to the last request of `begin`
        self._transport = transport
        self._server = server
        self._workers = health.workers
        self._device = transport.trainer.device if health.device == "cuda" else torch.device("cpu")
        # The group while its workers receive: from the end of `begin` to a bucket that fails.
        self._receiving: nccl.WeightGroup | None = None
        self._transfers = 0  # number of transfers of the group so far
        self._failure: SyncError | None = None  # the failure that the trainer has seen

        # Listen for the workers, which will look for the store at this address.
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

    async def begin(self, version: int, compare: bool, buckets: Buckets, partial: bool) -> None:
        """Announce a version to the server; wait until its workers are ready or it answers.

        `partial`: the buckets are those of the trained weights only.
        """
        start = time.monotonic()
        transport = self._transport
        self._receiving = None
        self._transfers += 1

        # Ask the server to load it. It answers only once it has all of it, or has failed.
        source = protocol.CollectiveSource(
            group=self._address,
            turn=self._transfers,
            adapter=transport.trainer.adapter,
            buckets=buckets,
            partial=partial,
        )
        request = protocol.ReloadRequest(
            version=version, source=source, in_flight=transport.sync.in_flight, compare=compare
        )
        self.answer = asyncio.create_task(self._ask(request))

        # Join the group when the workers do (they announce 0), then wait until they receive.
        seconds = READY_SHARE * transport.sync.timeout_s
        try:
            async with asyncio.timeout(seconds):
                if self.group is None and await self._announced(0):
                    self.group = await run_in_thread(self._join)
                if await self._announced(self._transfers):
                    self._receiving = self.group
        except TimeoutError:
            self._failure = SyncError(
                f"server {self._server.url} did not begin to receive version {version} in "
                f"{seconds:g} s; to drain requests first, raise sync.timeout_s"
            )
        except RuntimeError as error:
            workers = f"the workers of {self._server.url}"
            self._failure = SyncError(f"can't connect with {workers}: {why_broken(error)}")
        # Workers that took long not to join would take as long again.
        self.unreachable = self.group is None and time.monotonic() - start > SLOW_JOIN_S

    async def _announced(self, number: int) -> bool:
        """Wait until all workers have announced a transfer. Returns False if it answers first."""
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
        """Send the request to load, and wait for its answer. A failure closes the link."""
        try:
            return await self._server.ask(request, timeout_s=self._transport.sync.timeout_s)
        except HocketError as error:
            self.close()
            return error

    def send(self, name: str, flat: Tensor) -> None:
        """Send a bucket, unless the server is not ready or an earlier bucket has failed."""
        group = self._receiving
        if group is None:
            return
        try:
            group.broadcast(flat.to(group.device))
        except RuntimeError as error:
            reason = f"the connection broke: {why_broken(error)}"
            if re.search("(?i)timed ?out", str(error)):
                seconds = self._transport.sync.bucket_timeout_s
                advice = "is it stopped? A slower network needs a higher sync.timeout_s"
                reason = f"{seconds:g} s passed; {advice}"
            self._receiving = None
            self._failure = SyncError(f"server {self._server.url} did not take {name}: {reason}")

    async def outcome(self) -> Answer:
        """Wait for the server's answer.

        If the server itself reports no cause, the failure that the trainer has seen comes first.
        """
        if self._failure is not None:
            self.close()  # or the workers would go on waiting
        answer = await self.answer
        if isinstance(answer, protocol.ReloadResponse):
            self.holds_frozen = True
        # An error without an HTTP status is the client's own, such as a timeout.
        if self._failure is not None and isinstance(answer, ServerError) and answer.status is None:
            return SyncError(f"{self._failure}; {answer}")
        return answer
