"""Defend a server on a public address against strangers who hold connections without a request.

A connection whose head is late is closed, and of too many from one address the oldest.
"""

import asyncio
import resource
from collections.abc import Collection
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from hocket.common.machine import is_loopback
from hocket.server.main import http_part
from hocket.server.middleware import ADMITTED

HEAD_TIMEOUT_S = 20.0
"""Seconds for request line and headers, or for the rest of a request that is answered already."""
MAX_CONNECTIONS = 4096
"""Connections of one address without an admitted request; a trainer has one for each request."""


@http_part("public")
def install(http: uvicorn.Config) -> None:
    """Use such connections where other machines are let in, and quiet ones everywhere."""
    http.http = QuietConnection if is_loopback(http.host) else Connection


class QuietConnection(H11Protocol):
    """A connection whose requests never make uvicorn write a traceback to the log."""

    def send_400_response(self, msg: str) -> None:
        """Answer a head that is no HTTP; where a body goes on as none, the answer has begun."""
        if self.conn.our_state is h11.IDLE:
            super().send_400_response(msg)
        else:
            self.cycle.disconnected = True
            self.transport.close()


class Connection(QuietConnection):
    """A connection that is closed if a head is late, or as the oldest stranger of too many."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.begun = self.loop.time()
        self.address = self.client and self.client[0]  # None: it has gone
        self._expect_head()
        self._end_oldest_stranger()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        is_next_head = self.is_idle and self.cycle is not self._before
        if is_next_head:  # its first part
            self._expect_head()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._lacks_body:  # it was answered before its body ended
            self._expect_head()

    @property
    def is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    @property
    def is_strange(self) -> bool:
        """Whether it has no request that is whole, admitted and not answered yet."""
        return self.is_idle or self._lacks_body or ADMITTED not in self.cycle.scope["state"]

    @property
    def _lacks_body(self) -> bool:
        return self.conn.their_state is h11.SEND_BODY

    def _end_oldest_stranger(self) -> None:
        most = min(MAX_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
        connections: Collection[Any] = self.connections
        here = [each for each in connections if each.address == self.address]
        strangers = [each for each in here if each.is_strange]
        if len(strangers) > most:
            oldest = min(strangers, key=lambda each: each.begun)
            self.connections.remove(oldest)
            oldest.transport.abort()

    def _expect_head(self) -> None:
        self._before = self.cycle
        self.loop.call_later(HEAD_TIMEOUT_S, self._close_unless_requested, self.cycle)

    def _close_unless_requested(self, before: object) -> None:
        if self.cycle is before:
            self.transport.close()
