import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from hocket.common.registry import load_plugins
from hocket.server import parts
from support.engines import asking, idle_engine, wrap


@pytest.fixture
def example(tmp_path: Path) -> Iterator[None]:
    """The plugin that the documentation of `server_part` shows."""
    assert parts.__file__ is not None
    shown = re.search(r"    @server_part\(\"served\"\)\n(.*\n)+?(?=\"\"\")", Path(parts.__file__).read_text("utf-8"))
    assert shown is not None
    file = tmp_path / "served.py"
    file.write_text("from hocket.server.parts import Server, server_part\n\n" + textwrap.dedent(shown[0]))
    load_plugins([str(file)])
    yield
    parts.PARTS.forget("served")


async def test_a_user_s_part_adds_a_route_behind_the_token(example: None) -> None:
    async with asking(wrap(idle_engine(), token="t")) as client:
        assert (await client.get("/served")).status_code == 401
        answer = await client.get("/served", headers={"Authorization": "Bearer t"})
    assert answer.json() == {"model": "m"}


def test_parts_are_installed_in_the_order_of_the_table_and_users_last(example: None) -> None:
    names = [install.__module__ for install in parts.PARTS.each()]
    table = [module for module in parts.PARTS._modules.values() if module in names]
    assert names[:-1] == table
    assert names[-1].startswith("hocket_plugin_")
