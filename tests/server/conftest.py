"""Servers of tiny models that the tests of this folder share."""

from collections.abc import Iterator

import pytest

from support.tiny_server import Servers, TinyServer


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """The servers of this session, ended with it."""
    servers = Servers(tmp_path_factory)
    yield servers
    for server in servers.running.values():
        server.stop()


@pytest.fixture
def server(servers: Servers) -> TinyServer:
    """The server most tests use: tied head, float32."""
    return servers("tied float32")
