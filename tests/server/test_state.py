"""The engine's states: which may follow which, and who changes them; and which trainer it works for."""

import itertools
import re
from pathlib import Path

import pytest

import hocket
from hocket import protocol
from hocket.server.errors import ApiError
from hocket.server.state import FAILED, HOLD_S, TRANSITIONS, Condition, EngineState, Held, Holder
from support import fakes

REASON = protocol.ErrorBody(code="a_code", message="a reason", hint="a fix")
PATHS = {
    EngineState.READY: [],
    EngineState.ASLEEP: [EngineState.ASLEEP],
    EngineState.BROKEN: [EngineState.BROKEN],
    EngineState.BROKEN_ASLEEP: [EngineState.ASLEEP, EngineState.BROKEN_ASLEEP],
    EngineState.LOST: [EngineState.LOST],
    EngineState.STOPPING: [EngineState.STOPPING],
}
"""How an engine that was just started gets to each state."""


def held(version: int) -> Held:
    answer = protocol.ReloadResponse(version=version, seconds=1, num_tensors=1, checksum="c", session="s")
    return Held(None, answer)


@pytest.mark.parametrize(("state", "following"), [*itertools.product(EngineState, EngineState)])
def test_an_engine_takes_no_other_way_than_the_table_s(state: EngineState, following: EngineState) -> None:
    engine = Condition(held(0))
    for step in PATHS[state]:
        engine.move(step, REASON)
    assert engine.state is state
    if following in TRANSITIONS[state]:
        engine.move(following, REASON)
        assert (engine.state, engine.reason) == (following, REASON)
        return
    with pytest.raises(ValueError, match=f"from '{state.value}' to '{following.value}'"):
        engine.move(following, REASON)
    assert engine.state is state


@pytest.mark.parametrize("state", EngineState)
def test_an_engine_that_failed_holds_no_version_and_one_asleep_has_not_failed(state: EngineState) -> None:
    engine = Condition(held(0))
    engine.hold(held(3))
    for step in PATHS[state]:
        engine.move(step, REASON)
    assert engine.version == 3
    assert (engine.held is None, engine.failure is REASON) == (state in FAILED, state in FAILED)
    assert engine.is_asleep == (state in (EngineState.ASLEEP, EngineState.BROKEN_ASLEEP))


def test_only_the_engine_moves_its_state() -> None:
    package = Path(hocket.__file__).parent
    changes = r"move\(|hold\(|\w+ = "
    writes = re.compile(
        rf"\b_condition\.({changes})"
        r"|engine\.(_\w+|version|held|lock|asleep|is_asleep|base_replaced|holder|session) \|?= "
    )
    files = [path for path in package.rglob("*.py") if writes.search(path.read_text(encoding="utf-8"))]
    assert [path.relative_to(package).as_posix() for path in files] == ["server/engine.py"]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> fakes.Clock:
    clock = fakes.Clock()
    monkeypatch.setattr("hocket.server.state.time", clock)
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
