"""Weights straight from the trainer's memory into the engines' workers, over NCCL or, on a CPU, gloo.

The receiving half is `/init_weight_group` and `/reload_weights` in server/engine.py and server/worker.py. Each server
has a group of its own with rank 0: one that is lost disturbs no other, and every deadline can name its server. An
update is one HTTP call per server, which may be answered with an error at any time, in the event loop's thread; tensors
are gathered in a second thread and sent in others, so that a bucket travels while the next one is made.
"""

import asyncio
import concurrent.futures
import dataclasses
import functools
import re
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol
from urllib.parse import urlsplit

import torch
from torch import Tensor

from hocket import manifest, weight_group
from hocket.client import ServerClient
from hocket.config import Config
from hocket.errors import HocketError, ServerError, SyncError, SyncTimeout
from hocket.protocol import (
    AdapterConfig,
    CollectiveSource,
    GroupRequest,
    ReloadRequest,
    ReloadResponse,
    TensorLayout,
    TensorSpec,
)
from hocket.sync.delivery import Delivery
from hocket.system import run_in_thread
from hocket.types import InFlight

POLL_S = 0.002
SLOW_JOIN_S = 5.0
"""A server whose joining takes so long and fails is not tried again until it is started again: all wait for it."""
READY_SHARE, BUCKET_SHARE = 0.5, 0.25
"""Shares of sync.timeout_s after which a server is given up that does not begin to receive, or to take a bucket.

The others wait for it meanwhile, and need what is left of the same deadline.
"""
Answer = ReloadResponse | HocketError


class Streamer(Protocol):
    """What publishing needs of the trainer."""

    @property
    def device(self) -> torch.device: ...
    @property
    def adapter(self) -> AdapterConfig | None: ...
    def layout(self, max_bytes: int) -> list[list[TensorLayout]]: ...
    def stream(self, max_bytes: int, sink: Callable[..., None]) -> None: ...


class CollectiveTransport:
    """Broadcasts weight versions to the workers of every server.

    Args:
        config: its sync section is used.
    """

    def __init__(self, config: Config, trainer: Streamer) -> None:
        self._config = config.sync
        self._max_bytes = config.sync.bucket_mib << 20
        self._trainer = trainer
        self._links: dict[ServerClient, _Link] = {}
        self._unreachable: dict[ServerClient, str] = {}  # sessions that could not be joined: each attempt takes long
        self._buckets: list[list[TensorLayout]] = []

    async def deliver(self, version: int, servers: Sequence[ServerClient]) -> Delivery:
        """Connects with the servers that are not connected yet, and sends the version to all."""
        start = time.perf_counter()
        self._buckets = self._buckets or self._trainer.layout(self._max_bytes)
        answers: dict[ServerClient, Answer] = {}
        sendings = []
        for server, link in zip(servers, await asyncio.gather(*map(self._link, servers)), strict=True):
            if isinstance(link, _Link):
                sendings.append(_Sending(server, link, version, len(self._buckets), self._config.timeout_s))
            else:
                answers[server] = link
        requests = [sending.ask(self._buckets, self._trainer.adapter, self._config.in_flight) for sending in sendings]
        for sending, request in zip(sendings, requests, strict=True):
            request.add_done_callback(functools.partial(self._drop_if_failed, sending.server))
        await asyncio.gather(*(sending.wait(request) for sending, request in zip(sendings, requests, strict=True)))
        begun = time.perf_counter()
        try:
            checksum = await run_in_thread(self._send, sendings)
        except BaseException:  # of the trainer: the servers need not wait for what will not come
            self.close()
            for request in requests:
                request.cancel()
            raise
        for sending, request in zip(sendings, requests, strict=True):
            if sending.failure is not None:
                self._drop(sending.server)  # the workers, too, need not wait any longer: their error comes now
            answers[sending.server] = sending.outcome(await request)
            if isinstance(answers[sending.server], HocketError):  # both ends begin again with a new group
                self._drop(sending.server)
        return Delivery(
            checksum=checksum,
            num_bytes=sum(weight_group.num_bytes(bucket) for bucket in self._buckets),
            prepare_s=begun - start,
            transfer_s=time.perf_counter() - begun,
            answers=tuple(answers[server] for server in servers),
        )

    def close(self) -> None:
        """Leaves all groups."""
        for server in list(self._links):
            self._drop(server)

    def _drop(self, server: ServerClient) -> None:
        link = self._links.pop(server, None)
        if link is not None:
            link.group.close()

    def _drop_if_failed(self, server: ServerClient, request: "asyncio.Task[Answer]") -> None:
        # Its workers receive no more: whoever is sending to them must not wait for the deadline.
        if request.cancelled() or isinstance(request.result(), HocketError):
            self._drop(server)

    def _send(self, sendings: "Sequence[_Sending]") -> str:
        """Sends the trainer's weights to all, each bucket while the next one is made. Returns the checksum."""
        specs: dict[str, TensorSpec] = {}
        with concurrent.futures.ThreadPoolExecutor(max(1, len(sendings)), "send weights") as threads:
            running: list[concurrent.futures.Future[None]] = []

            def sink(named: Sequence[tuple[str, Tensor]]) -> None:
                flat, added = weight_group.pack(named, self._trainer.device)
                specs.update(added)
                for bucket in running:
                    bucket.result()
                running[:] = [threads.submit(sending.send, flat) for sending in sendings]

            self._trainer.stream(self._max_bytes, sink)
            for bucket in running:
                bucket.result()
        return manifest.total_checksum(specs)

    async def _link(self, server: ServerClient) -> "_Link | HocketError":
        """Returns the connection to a server: a new one where there was none, or the server was started again."""
        try:
            health = await server.health()
            if self._unreachable.get(server) == health.session:
                return SyncError(f"the workers of {server.url} could not be connected with since they were started")
            link = self._links.get(server)
            if link is None or link.session != health.session:
                if link is not None:
                    self._drop(server)
                start = time.monotonic()
                try:
                    link = self._links[server] = await self._join(server, health.session, health.workers, health.device)
                finally:
                    if time.monotonic() - start > SLOW_JOIN_S and server not in self._links:
                        self._unreachable[server] = health.session
        except HocketError as error:
            return error
        except (OSError, RuntimeError) as error:
            return SyncError(f"can't connect with the workers of {server.url}: {_cause(error)}")
        return link

    async def _join(self, server: ServerClient, session: str, workers: int, device: str) -> "_Link":
        timeout_s, mine = self._config.timeout_s, self._trainer.device
        parts = urlsplit(server.url)
        address = weight_group.address_towards(parts.hostname or "", parts.port or 80)
        store = weight_group.make_store(address, timeout_s)
        backend: weight_group.Backend = "nccl" if device == mine.type == "cuda" else "gloo"
        request = GroupRequest(
            session=secrets.token_hex(8),
            host=address,
            port=store.port,
            backend=backend,
            device=weight_group.gpu_id(mine) if backend == "nccl" else None,
            timeout_s=timeout_s,
        )
        joining = asyncio.create_task(server.init_weight_group(request, timeout_s=READY_SHARE * timeout_s))
        joining.add_done_callback(lambda task: task.cancelled() or task.exception())  # looked at, even if not awaited
        if not await _announced(store, request.session, weight_group.JOINING, workers, joining):
            joining.result()  # raises what the server had to say
        group = await run_in_thread(
            weight_group.WeightGroup,
            store,
            name=request.session,
            rank=0,
            size=1 + workers,
            backend=backend,
            device=mine if backend == "nccl" else torch.device("cpu"),
            address=address,
            timeout_s=BUCKET_SHARE * timeout_s,
        )
        await joining
        return _Link(group=group, store=store, session=session, workers=workers)


@dataclasses.dataclass(eq=False, slots=True)
class _Link:
    """The connection to one process of a server (`session`): a group, and how many transfers it has seen."""

    group: weight_group.WeightGroup
    store: Any  # the members find each other there for as long as it lives
    session: str
    workers: int
    turns: int = 0


class _Sending:
    """One version on its way to one server; `failure` is what this end knows of a transfer that broke."""

    def __init__(self, server: ServerClient, link: _Link, version: int, num_buckets: int, timeout_s: float) -> None:
        self.server = server
        self._link = link
        self._version = version
        self._num_buckets = num_buckets
        self._timeout_s = timeout_s
        self._sent = 0
        self._ready = False
        self.failure: SyncError | None = None

    def ask(
        self, buckets: list[list[TensorLayout]], adapter: AdapterConfig | None, in_flight: InFlight
    ) -> "asyncio.Task[Answer]":
        """Tells the server what will come. Its answer, or what went wrong, comes when all of it is loaded."""
        self._link.turns += 1
        source = CollectiveSource(
            session=self._link.group.name, turn=self._link.turns, adapter=adapter, buckets=buckets
        )
        request = ReloadRequest(version=self._version, source=source, in_flight=in_flight)

        async def answer() -> Answer:
            try:
                return await self.server.reload_weights(request, timeout_s=self._timeout_s)
            except HocketError as error:
                return error

        return asyncio.create_task(answer())

    async def wait(self, request: "asyncio.Task[Answer]") -> None:
        """Returns once the workers are about to receive, the server has answered already, or it has been too long."""
        what, seconds = weight_group.receiving(self._link.turns), READY_SHARE * self._timeout_s
        try:
            async with asyncio.timeout(seconds):
                self._ready = await _announced(
                    self._link.store, self._link.group.name, what, self._link.workers, request
                )
        except TimeoutError:
            self.failure = SyncTimeout(
                f"server {self.server.url} did not begin to receive version {self._version} in {seconds:g} s; requests "
                f"that it drains first need a higher sync.timeout_s"
            )

    def send(self, flat: Tensor) -> None:
        """Sends one bucket; after a failure, nothing more."""
        if not self._ready or self.failure is not None:
            return
        self._sent += 1
        which = f"bucket {self._sent}/{self._num_buckets} of version {self._version}"
        try:
            self._link.group.broadcast(flat.to(self._link.group.device))
        except RuntimeError as error:
            if "timed out" in str(error).lower() or "timeout" in str(error).lower():
                self.failure = SyncTimeout(
                    f"server {self.server.url} did not finish {which} in {BUCKET_SHARE * self._timeout_s:g} s; is it "
                    f"overloaded, or stopped? A slower network needs a higher sync.timeout_s"
                )
            else:
                self.failure = SyncError(f"the connection to {self.server.url} broke at {which}: {_cause(error)}")

    def outcome(self, answer: Answer) -> Answer:
        """Returns the server's answer, or all that is known of what went wrong: first what the server says itself."""
        if self.failure is None or (isinstance(answer, ServerError) and answer.status is not None):
            return answer
        if isinstance(answer, HocketError):
            return type(self.failure)(f"{self.failure}; {answer}")
        return self.failure


async def _announced(store: Any, name: str, what: str, workers: int, until: "asyncio.Future[Any]") -> bool:
    """Waits until all workers of a group have announced something, or an answer has come; tells whether they have."""
    while not (there := weight_group.announced(store, name, what, range(1, 1 + workers))) and not until.done():
        await asyncio.sleep(POLL_S)
    return there


def _cause(error: Exception) -> str:
    # gloo begins with a place in its source and ends with a joke
    return re.sub(r"^\[.*?\] *|\. .*", "", (str(error) or type(error).__name__).splitlines()[0])
