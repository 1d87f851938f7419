"""Which trainer a server works for: who is refused, and when another one may have it."""

import pytest

from hocket.server import holder
from hocket.server.errors import ApiError
from hocket.server.holder import HOLD_S, Holder
from support import fakes


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> fakes.Clock:
    clock = fakes.Clock()
    monkeypatch.setattr(holder, "time", clock)
    return clock


def test_a_trainer_that_is_heard_of_keeps_its_server_for_ever_and_a_silent_one_for_a_minute(clock: fakes.Clock) -> None:
    server = Holder()
    for silent_s in [HOLD_S - 1] * 100 + [7]:
        server.claim("a")
        server.claim(None)  # curl, an OpenAI client, an evaluation
        clock.now += silent_s
        with pytest.raises(ApiError, match=f"trainer a, which was last heard of {silent_s:.0f} s ago") as refused:
            server.claim("b")
    assert (refused.value.status, refused.value.body.code) == (409, "other_trainer")
    assert "sync.take_over=true" in refused.value.body.hint
    clock.now += HOLD_S - 7
    server.claim("b")
    with pytest.raises(ApiError, match="works for trainer b"):
        server.claim("a")


def test_a_trainer_that_ends_leaves_its_server_and_only_its_own_or_another_takes_it_over(clock: fakes.Clock) -> None:
    server = Holder()
    server.claim("a")
    server.release("b")
    with pytest.raises(ApiError):
        server.claim("b")
    server.release("a")
    server.claim("b")
    server.claim("c", take_over=True)
    with pytest.raises(ApiError, match="works for trainer c"):
        server.claim("b")
