"""Broadcast weights from the trainer's memory to the engines' workers, over NCCL or, on a CPU, gloo.

server/worker.py receives. Each server has a group of its own with rank 0: a lost server disturbs no other. An update is
one HTTP call per server, in the event loop's thread; tensors are gathered in a second thread and sent in others, so
that a bucket travels while the next one is made.
"""

import asyncio
import concurrent.futures
import dataclasses
import itertools
import re
import secrets
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

import torch
from torch import Tensor

from hocket import manifest, weight_group
from hocket.client import ServerClient
from hocket.config import SyncConfig
from hocket.errors import HocketError, ServerError, SyncError
from hocket.protocol import CollectiveSource, GroupRequest, Health, ReloadRequest, TensorLayout, TensorSpec
from hocket.sync.publish import Answer, Delivery
from hocket.system import run_in_thread

if TYPE_CHECKING:
    from hocket.trainer.trainer import Trainer

POLL_S = 0.002
SLOW_JOIN_S = 5.0  # a server that takes longer and fails is not tried again until it is restarted: all wait for it
# Shares of sync.timeout_s after which a server is given up that does not begin to receive, or to take a bucket: the
# others wait for it meanwhile, and need what is left of the same deadline.
READY_SHARE, BUCKET_SHARE = 0.5, 0.25


@dataclasses.dataclass
class CollectiveTransport:
    """Broadcast weight versions to the workers of every server."""

    trainer: "Trainer"
    sync: SyncConfig
    buckets: list[list[TensorLayout]] = dataclasses.field(default_factory=list)
    _links: "dict[ServerClient, _Link]" = dataclasses.field(default_factory=dict)
    _unreachable: dict[ServerClient, str] = dataclasses.field(default_factory=dict)  # sessions slow to join

    async def deliver(self, version: int, servers: Sequence[ServerClient], *, compare: bool = False) -> Delivery:
        """Load the version into the servers, as `Transport.deliver`; connect with new ones first."""
        start = time.perf_counter()
        for left in [server for server in self._links if server.is_closed]:
            self._links.pop(left).group.close()
        self.buckets = self.buckets or self.trainer.layout(self.sync.bucket_mib << 20)
        joined = await asyncio.gather(*map(self._link, servers))
        links = [link for link in joined if isinstance(link, _Link)]
        await asyncio.gather(*(link.begin(version, compare) for link in links))
        prepared = time.perf_counter()
        try:
            checksum = await run_in_thread(self._send, version, links)
        except BaseException:  # of the trainer: the servers need not wait for what will not come
            for link in links:
                link.group.close()
                link.answer.cancel()
            raise
        answers = [(checksum, await link.outcome() if isinstance(link, _Link) else link) for link in joined]
        metrics = {
            "sync/mebibytes": sum(map(weight_group.num_bytes, self.buckets)) / 2**20,
            "sync/prepare_s": prepared - start,
            "sync/transfer_s": time.perf_counter() - prepared,
        }
        return Delivery(dict(zip(servers, answers, strict=True)), metrics)

    def close(self) -> None:
        """Leave all groups."""
        for link in self._links.values():
            link.group.close()

    def _send(self, version: int, links: "Sequence[_Link]") -> str:
        """Send the trainer's weights to all, each bucket while the next is made; return the checksum."""
        specs: dict[str, TensorSpec] = {}
        names = (f"bucket {number}/{len(self.buckets)} of version {version}" for number in itertools.count(1))
        running: list[concurrent.futures.Future[None]] = []
        with concurrent.futures.ThreadPoolExecutor(max(1, len(links)), "send weights") as threads:

            def sink(named: Sequence[tuple[str, Tensor]]) -> None:
                flat, added = weight_group.pack(named, self.trainer.device)
                specs.update(added)
                for bucket in running:
                    bucket.result()
                name = next(names)
                running[:] = [threads.submit(link.send, name, flat) for link in links]

            self.trainer.stream(self.sync.bucket_mib << 20, sink)
            for bucket in running:
                bucket.result()
        return manifest.total_checksum(specs)

    async def _link(self, server: ServerClient) -> "_Link | HocketError":
        """Return the connection to a server: a new one if there was none, or the server was started again."""
        try:
            health = await server.health()
            if self._unreachable.get(server) == health.session:
                return SyncError(f"the workers of {server.url} could not be connected with since they were started")
            link = self._links.get(server)
            if link is None or link.session != health.session or link.group.is_closed:
                if link is not None:
                    link.group.close()
                link = self._links[server] = await self._join(server, health)
            return link
        except HocketError as error:
            return error
        except (OSError, RuntimeError) as error:
            return SyncError(f"can't connect with the workers of {server.url}: {_cause(error)}")

    async def _join(self, server: ServerClient, health: Health) -> "_Link":
        start = time.monotonic()
        timeout_s, name = self.sync.timeout_s, secrets.token_hex(8)
        device = self.trainer.device if health.device == "cuda" else torch.device("cpu")
        url = urlsplit(server.url)
        address = weight_group.address_towards(url.hostname or "", url.port or 80)
        store = weight_group.make_store(address, timeout_s)
        gpu = weight_group.gpu_id(device)
        backend: Literal["nccl", "gloo"] = "nccl" if gpu else "gloo"
        request = GroupRequest(
            session=name, host=address, port=store.port, backend=backend, device=gpu, timeout_s=timeout_s
        )
        joining = asyncio.create_task(server.init_weight_group(request, timeout_s=READY_SHARE * timeout_s))
        joining.add_done_callback(lambda task: task.cancelled() or task.exception())  # seen, even if not awaited
        try:
            if not await _announced(store, name, 0, health.workers, joining):
                joining.result()  # raises the server's reason
            size, bucket_s = 1 + health.workers, BUCKET_SHARE * timeout_s
            group = await run_in_thread(
                weight_group.WeightGroup, store, name, device, address, rank=0, size=size, timeout_s=bucket_s
            )
            await joining
        except BaseException:
            if time.monotonic() - start > SLOW_JOIN_S:
                self._unreachable[server] = health.session
            raise
        return _Link(self, server, group, session=health.session, workers=health.workers)


@dataclasses.dataclass(eq=False)
class _Link:
    """The connection to one process of a server. A failure closes the group; both ends begin again with a new one."""

    transport: CollectiveTransport
    server: ServerClient
    group: weight_group.WeightGroup
    session: str  # of the server's process
    workers: int
    transfers: int = 0  # that the group has seen, this one included
    ready: bool = False  # its workers are about to receive
    failure: SyncError | None = None  # what this end knows of a transfer that broke
    answer: "asyncio.Task[Answer]" = dataclasses.field(init=False)

    async def begin(self, version: int, compare: bool) -> None:
        """Tell the server what will come; wait until its workers are about to receive, or it has answered."""
        self.transfers += 1
        sync, buckets, adapter = self.transport.sync, self.transport.buckets, self.transport.trainer.adapter
        source = CollectiveSource(session=self.group.name, turn=self.transfers, adapter=adapter, buckets=buckets)
        request = ReloadRequest(version=version, source=source, in_flight=sync.in_flight, compare=compare)
        self.answer = asyncio.create_task(self._ask(request))
        seconds, group = READY_SHARE * sync.timeout_s, self.group
        try:
            async with asyncio.timeout(seconds):
                self.ready = await _announced(group.store, group.name, self.transfers, self.workers, self.answer)
        except TimeoutError:
            self.failure = SyncError(
                f"server {self.server.url} did not begin to receive version {version} in {seconds:g} s; "
                f"requests that it drains first need a higher sync.timeout_s"
            )

    async def _ask(self, request: ReloadRequest) -> Answer:
        try:
            return await self.server.reload_weights(request, timeout_s=self.transport.sync.timeout_s)
        except HocketError as error:
            self.group.close()  # its workers receive no more: no sender must wait for the deadline
            return error

    def send(self, name: str, flat: Tensor) -> None:
        """Send one bucket; after a failure, nothing more."""
        if not self.ready or self.failure is not None:
            return
        try:
            self.group.broadcast(flat.to(self.group.device))
        except RuntimeError as error:
            reason = f"the connection broke: {_cause(error)}"
            if re.search("(?i)timed ?out", str(error)):
                seconds = BUCKET_SHARE * self.transport.sync.timeout_s
                reason = f"{seconds:g} s passed; is it stopped? A slower network needs a higher sync.timeout_s"
            self.failure = SyncError(f"server {self.server.url} did not take {name}: {reason}")

    async def outcome(self) -> Answer:
        """Return the server's answer; if it names no cause itself, join it to the failure seen from this end."""
        if self.failure is not None:
            self.group.close()  # the workers stop waiting, too: their error comes now
        answer = await self.answer
        if self.failure is None or (isinstance(answer, ServerError) and answer.status is not None):
            return answer
        return SyncError(f"{self.failure}; {answer}") if isinstance(answer, HocketError) else self.failure


async def _announced(store: Any, name: str, number: int, workers: int, until: "asyncio.Future[Any]") -> bool:
    """Wait until all workers have announced a transfer, or `until` is done; return whether they have."""
    while not (there := weight_group.announced(store, name, number, range(1, 1 + workers))) and not until.done():
        await asyncio.sleep(POLL_S)
    return there


def _cause(error: Exception) -> str:
    # gloo begins with a place in its source and ends with a joke
    return re.sub(r"^\[.*?\] *|\. .*", "", (str(error) or type(error).__name__).splitlines()[0])
