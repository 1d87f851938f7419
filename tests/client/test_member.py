"""A server's states: which may follow which, and who changes them."""

import itertools
import re
from pathlib import Path

import pytest

import hocket
from hocket.client.member import TRANSITIONS, Member, State
from support.servers import FakeServer

PATHS = {
    State.NEW: [],
    State.JOINING: [State.JOINING],
    State.CHECKING: [State.JOINING, State.CHECKING],
    State.UP: [State.JOINING, State.CHECKING, State.UP],
    State.WAITING: [State.JOINING, State.WAITING],
    State.LOST: [State.JOINING, State.CHECKING, State.LOST],
    State.LEFT_OUT: [State.JOINING, State.LEFT_OUT],
}
"""How a server that nobody has looked at gets to each state."""


@pytest.mark.parametrize(("state", "following"), [*itertools.product(State, State)])
def test_a_server_takes_no_other_way_than_the_table_s(state: State, following: State) -> None:
    member = Member(FakeServer())  # type: ignore[arg-type]
    for step in PATHS[state]:
        member.move(step, step.value)
    assert member.state is state
    if following in TRANSITIONS[state]:
        member.move(following, "a reason")
        assert (member.state, member.reason) == (following, "a reason")
        return
    with pytest.raises(ValueError, match=f"from '{state.value}' to '{following.value}'"):
        member.move(following, "a reason")
    assert member.state is state


def test_only_the_pool_moves_servers() -> None:
    package = Path(hocket.__file__).parent
    writes = re.compile(r"\bmember\.(move\(|(session|version|next_look|_state|_reason) = )")
    files = [path for path in package.rglob("*.py") if writes.search(path.read_text(encoding="utf-8"))]
    assert [path.relative_to(package).as_posix() for path in files] == ["client/pool.py"]
