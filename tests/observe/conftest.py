import pytest

from hocket.common import tasks
from hocket.extras import timeline
from support import fakes


class Clock(fakes.Clock):
    """Unix time is ten seconds ahead of what spans are measured by."""

    def time(self) -> float:
        return self.now + 10.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Time for spans and their files, which passes where a test says so."""
    clock = Clock()
    for module in (tasks, timeline):
        monkeypatch.setattr(module, "time", clock)
    return clock
