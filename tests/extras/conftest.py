"""What the tests of extras share with those of the core, whose folders have it, and a clock."""

import pytest
from tests.data.conftest import bos_tokenizer, sighted, tokenizer, window, write_jsonl  # noqa: F401
from tests.rewards.conftest import one_worker, plugin, register, scorer_of, scores_of  # noqa: F401
from tests.server.conftest import server, servers  # noqa: F401
from tests.trainer.conftest import experts_model, ranks, tied_model, untied_model  # noqa: F401

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
