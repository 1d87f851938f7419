"""Servers that drills share, and processes that are gone when a drill ends."""

from collections.abc import Iterator

import pytest

from support.processes import Process, Server, free_port


class Spares:
    """Servers that drills have left ready for those that come after, as starting one takes long.

    Whatever they have been through, they must answer as new ones do. Runs against one are in its `folder`.
    """

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        self._factory = factory
        self.left: list[Server] = []

    def take(self) -> Server:
        """Returns one that was left, or a new one, which has to load."""
        return self.left.pop() if self.left else Server(self._factory.mktemp("server"), free_port())


@pytest.fixture(scope="module")
def spares(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Spares]:
    spares = Spares(tmp_path_factory)
    yield spares
    for server in spares.left:
        server.end()


@pytest.fixture
def processes() -> Iterator[list[Process]]:
    """Whatever a drill puts here is gone when it ends, however it ends."""
    started: list[Process] = []
    yield started
    for process in started:
        process.__exit__()
