"""Servers of tiny models that the tests of this folder share, and those of extras that take them from here."""

from collections.abc import Iterator

import pytest

from support.tiny_server import SHARED, Servers, TinyServer


@pytest.fixture(scope="session")
def servers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """The servers of this session, ended with it; the same ones in every folder that has this fixture."""
    servers = request.session.stash.setdefault(SHARED, Servers(tmp_path_factory))
    yield servers
    servers.stop()


@pytest.fixture
def server(servers: Servers) -> TinyServer:
    """The server most tests use: tied head, float32."""
    return servers("tied float32")
