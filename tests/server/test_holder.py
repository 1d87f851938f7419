"""Which trainer a server works for: who is refused, and when another one may have it."""

import pytest

import fakes
from hocket.server import engine
from hocket.server.engine import HOLD_S, Holder
from hocket.server.errors import ApiError


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> fakes.Clock:
    clock = fakes.Clock()
    monkeypatch.setattr(engine, "time", clock)
    return clock


def test_a_second_trainer_is_told_who_has_the_server_and_since_when(clock: fakes.Clock) -> None:
    server = Holder()
    server.hear("a")
    clock.now += 30
    server.hear("a")
    clock.now += 7
    with pytest.raises(ApiError, match=r"works for trainer a, which was last heard of 7 s ago") as refused:
        server.hear("b")
    assert (refused.value.status, refused.value.body.code) == (409, "other_trainer")
    assert "sync.take_over=true" in refused.value.body.hint
    server.hear("a")
    server.hear(None)  # curl, an OpenAI client, an evaluation


def test_a_trainer_that_is_heard_of_keeps_its_server_for_ever_and_a_silent_one_for_a_minute(clock: fakes.Clock) -> None:
    server = Holder()
    for _ in range(100):
        server.hear("a")
        clock.now += HOLD_S - 1
        with pytest.raises(ApiError, match="works for trainer a"):
            server.hear("b")
    clock.now += 1
    server.hear("b")
    with pytest.raises(ApiError, match="works for trainer b"):
        server.hear("a")


def test_a_trainer_that_ends_leaves_its_server_and_only_its_own(clock: fakes.Clock) -> None:
    server = Holder()
    server.hear("a")
    server.leave("b")
    with pytest.raises(ApiError):
        server.hear("b")
    server.leave("a")
    server.hear("b")


def test_a_trainer_takes_over_only_if_it_says_so_and_then_the_first_is_refused(clock: fakes.Clock) -> None:
    server = Holder()
    server.hear("a")
    server.hear("b", take_over=True)
    with pytest.raises(ApiError, match="works for trainer b"):
        server.hear("a")
