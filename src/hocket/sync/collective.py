"""Broadcast weights from the trainer's memory to the engines' workers, over NCCL or, on a CPU, gloo.

The receiving half is `/init_weight_group` and `/reload_weights` in server/engine.py and server/worker.py. Each server
has a group of its own with rank 0: a lost server disturbs no other, and every deadline can name its server. An update
is one HTTP call per server, which may be answered with an error at any time, in the event loop's thread; tensors are
gathered in a second thread and sent in others, so that a bucket travels while the next one is made.
"""

import asyncio
import concurrent.futures
import dataclasses
import re
import secrets
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import torch
from torch import Tensor

from hocket import manifest, weight_group
from hocket.client import ServerClient
from hocket.config import SyncConfig
from hocket.errors import HocketError, ServerError, SyncError, SyncTimeout
from hocket.protocol import (
    CollectiveSource,
    GroupRequest,
    Health,
    ReloadRequest,
    ReloadResponse,
    TensorLayout,
    TensorSpec,
)
from hocket.sync.publish import Delivery
from hocket.system import run_in_thread

if TYPE_CHECKING:
    from hocket.trainer.trainer import Trainer

POLL_S = 0.002
SLOW_JOIN_S = 5.0  # a server that takes longer and fails is not tried again until it is restarted: all wait for it
# Shares of sync.timeout_s after which a server is given up that does not begin to receive, or to take a bucket: the
# others wait for it meanwhile, and need what is left of the same deadline.
READY_SHARE, BUCKET_SHARE = 0.5, 0.25
Answer = ReloadResponse | HocketError


class CollectiveTransport:
    """Broadcast weight versions to the workers of every server.

    Args:
        sync: timeout_s, bucket_mib and in_flight are used.
    """

    def __init__(self, trainer: "Trainer", sync: SyncConfig) -> None:
        self._trainer = trainer
        self._sync = sync
        self._max_bytes = sync.bucket_mib << 20
        self._links: dict[ServerClient, _Link] = {}
        self._buckets: list[list[TensorLayout]] = []
        self._unreachable: dict[ServerClient, str] = {}  # sessions that were slow to join, and failed

    async def deliver(self, version: int, servers: Sequence[ServerClient]) -> Delivery:
        """Load the version into the servers, as `Transport.deliver`; connect with them where that is not done yet."""
        start = time.perf_counter()
        self._buckets = self._buckets or self._trainer.layout(self._max_bytes)
        links = await asyncio.gather(*map(self._link, servers))
        answers: dict[ServerClient, Answer] = {}
        transfers = []
        for server, link in zip(servers, links, strict=True):
            if isinstance(link, HocketError):
                answers[server] = link
                continue
            link.transfers += 1
            source = CollectiveSource(
                session=link.group.name, turn=link.transfers, adapter=self._trainer.adapter, buckets=self._buckets
            )
            transfers.append(_Transfer(server, link, version, source, self._sync))
        await asyncio.gather(*(transfer.wait_ready() for transfer in transfers))
        prepared = time.perf_counter()
        try:
            checksum = await run_in_thread(self._send, transfers)
        except BaseException:  # of the trainer: the servers need not wait for what will not come
            for transfer in transfers:
                transfer.cancel()
            raise
        for transfer in transfers:
            answers[transfer.server] = await transfer.outcome()
        metrics = {
            "sync/mebibytes": sum(map(weight_group.num_bytes, self._buckets)) / 2**20,
            "sync/prepare_s": prepared - start,
            "sync/transfer_s": time.perf_counter() - prepared,
        }
        answered = [answers[server] for server in servers]
        return Delivery(checksums=[checksum] * len(servers), answers=answered, metrics=metrics)

    def close(self) -> None:
        """Leave all groups."""
        for link in self._links.values():
            link.group.close()

    def _send(self, transfers: "Sequence[_Transfer]") -> str:
        """Send the trainer's weights to all, each bucket while the next one is made; return the checksum."""
        specs: dict[str, TensorSpec] = {}
        with concurrent.futures.ThreadPoolExecutor(max(1, len(transfers)), "send weights") as threads:
            running: list[concurrent.futures.Future[None]] = []

            def sink(named: Sequence[tuple[str, Tensor]]) -> None:
                flat, added = weight_group.pack(named, self._trainer.device)
                specs.update(added)
                for bucket in running:
                    bucket.result()
                running[:] = [threads.submit(transfer.send, flat) for transfer in transfers]

            self._trainer.stream(self._max_bytes, sink)
            for bucket in running:
                bucket.result()
        return manifest.total_checksum(specs)

    async def _link(self, server: ServerClient) -> "_Link | HocketError":
        """Return the connection to a server: a new one where there was none, or the server was started again."""
        try:
            health = await server.health()
            if self._unreachable.get(server) == health.session:
                return SyncError(f"the workers of {server.url} could not be connected with since they were started")
            link = self._links.get(server)
            if link is None or link.session != health.session or link.group.is_closed:
                if link is not None:
                    link.group.close()
                link = self._links[server] = await self._join(server, health)
        except HocketError as error:
            return error
        except (OSError, RuntimeError) as error:
            return SyncError(f"can't connect with the workers of {server.url}: {_cause(error)}")
        return link

    async def _join(self, server: ServerClient, health: Health) -> "_Link":
        start = time.monotonic()
        timeout_s, mine = self._sync.timeout_s, self._trainer.device
        parts = urlsplit(server.url)
        address = weight_group.address_towards(parts.hostname or "", parts.port or 80)
        store = weight_group.make_store(address, timeout_s)
        backend: weight_group.Backend = "nccl" if health.device == mine.type == "cuda" else "gloo"
        request = GroupRequest(
            session=secrets.token_hex(8),
            host=address,
            port=store.port,
            backend=backend,
            device=weight_group.gpu_id(mine) if backend == "nccl" else None,
            timeout_s=timeout_s,
        )
        joining = asyncio.create_task(server.init_weight_group(request, timeout_s=READY_SHARE * timeout_s))
        joining.add_done_callback(lambda task: task.cancelled() or task.exception())  # seen, even if not awaited
        try:
            if not await _announced(store, request.session, weight_group.JOINING, health.workers, joining):
                joining.result()  # raises the server's reason
            group = await run_in_thread(
                weight_group.WeightGroup,
                store,
                name=request.session,
                rank=0,
                size=1 + health.workers,
                backend=backend,
                device=mine if backend == "nccl" else torch.device("cpu"),
                address=address,
                timeout_s=BUCKET_SHARE * timeout_s,
            )
            await joining
        except BaseException:
            if time.monotonic() - start > SLOW_JOIN_S:
                self._unreachable[server] = health.session
            raise
        return _Link(group=group, store=store, session=health.session, workers=health.workers)


@dataclasses.dataclass(eq=False, slots=True)
class _Link:
    """The connection to one process of a server."""

    group: weight_group.WeightGroup
    store: Any  # the members find each other there for as long as it lives
    session: str  # of the server's process
    workers: int
    transfers: int = 0  # that the group has seen


class _Transfer:
    """One version on its way to one server. A failed one closes the group, and both ends begin again with a new one."""

    def __init__(
        self, server: ServerClient, link: _Link, version: int, source: CollectiveSource, sync: SyncConfig
    ) -> None:
        self.server = server
        self._link = link
        self._version = version
        self._num_buckets = len(source.buckets)
        self._timeout_s = sync.timeout_s
        self._sent = 0
        self._ready = False
        self._failure: SyncError | None = None  # what this end knows of a transfer that broke
        self._answer = asyncio.create_task(
            self._ask(ReloadRequest(version=version, source=source, in_flight=sync.in_flight))
        )

    async def _ask(self, request: ReloadRequest) -> Answer:
        """Tell the server what will come; return its answer when all of it is loaded, or what went wrong."""
        try:
            return await self.server.reload_weights(request, timeout_s=self._timeout_s)
        except HocketError as error:
            self._link.group.close()  # its workers receive no more: no sender must wait for the deadline
            return error

    async def wait_ready(self) -> None:
        """Return once the workers are about to receive, the server has answered already, or it has been too long."""
        link, seconds = self._link, READY_SHARE * self._timeout_s
        what = weight_group.receiving(link.transfers)
        try:
            async with asyncio.timeout(seconds):
                self._ready = await _announced(link.store, link.group.name, what, link.workers, self._answer)
        except TimeoutError:
            self._failure = SyncTimeout(
                f"server {self.server.url} did not begin to receive version {self._version} in {seconds:g} s; "
                f"requests that it drains first need a higher sync.timeout_s"
            )

    def send(self, flat: Tensor) -> None:
        """Send one bucket; after a failure, nothing more."""
        if not self._ready or self._failure is not None:
            return
        self._sent += 1
        which = f"bucket {self._sent}/{self._num_buckets} of version {self._version}"
        try:
            self._link.group.broadcast(flat.to(self._link.group.device))
        except RuntimeError as error:
            if "timed out" in str(error).lower() or "timeout" in str(error).lower():
                self._failure = SyncTimeout(
                    f"server {self.server.url} did not finish {which} in {BUCKET_SHARE * self._timeout_s:g} s; is it "
                    f"overloaded, or stopped? A slower network needs a higher sync.timeout_s"
                )
            else:
                self._failure = SyncError(f"the connection to {self.server.url} broke at {which}: {_cause(error)}")

    async def outcome(self) -> Answer:
        """Return the server's answer, or all that is known of what went wrong: first what the server says itself."""
        if self._failure is not None:
            self._link.group.close()  # the workers need not wait any longer either: their error comes now
        answer = await self._answer
        if self._failure is None or (isinstance(answer, ServerError) and answer.status is not None):
            return answer
        if isinstance(answer, HocketError):
            return type(self._failure)(f"{self._failure}; {answer}")
        return self._failure

    def cancel(self) -> None:
        """Leave the group, and do not wait for the server's answer."""
        self._link.group.close()
        self._answer.cancel()


async def _announced(store: Any, name: str, what: str, workers: int, until: "asyncio.Future[Any]") -> bool:
    """Wait until all workers of a group have announced `what`, or `until` is done; return whether they have."""
    while not (there := weight_group.announced(store, name, what, range(1, 1 + workers))) and not until.done():
        await asyncio.sleep(POLL_S)
    return there


def _cause(error: Exception) -> str:
    # gloo begins with a place in its source and ends with a joke
    return re.sub(r"^\[.*?\] *|\. .*", "", (str(error) or type(error).__name__).splitlines()[0])
