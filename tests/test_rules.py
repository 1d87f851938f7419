"""The rule of tests that are not marked long, on tests that break it."""

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from support import rules
from support.processes import Command, Process, Server


def helper(folder: Path) -> Server:
    return Server(folder, 1)


def one_engine(server: Any, tmp_path: Path) -> None:
    helper(tmp_path)


def a_second_engine(server: Any, tmp_path: Path) -> None:
    assert [helper(tmp_path), Server(tmp_path, 2)]


def an_engine_by_its_command(tmp_path: Path) -> None:
    Process(["launch", "config/quickstart.yaml"], tmp_path)
    Command(["serve"], tmp_path)


def words_alone(tmp_path: Path) -> None:
    assert "serve" != "launch"


def sleeps() -> None:
    time.sleep(1)


async def sleeps_too() -> None:
    await asyncio.sleep(0.5)


def polls() -> None:
    async def hangs() -> None:
        await asyncio.sleep(3600)

    assert hangs
    time.sleep(0.05)


def engine_fixture(tmp_path: Path) -> Server:
    return Server(tmp_path, 3)


@pytest.mark.parametrize(
    ("function", "fixtures", "found"),
    [
        (one_engine, [], None),
        (one_engine, [engine_fixture], "it starts 2 engines"),
        (a_second_engine, [], "it starts 2 engines"),
        (an_engine_by_its_command, [], "it starts 2 engines"),
        (words_alone, [], None),
        (sleeps, [], "it sleeps"),
        (sleeps_too, [], "it sleeps"),
        (polls, [], None),
    ],
)
def test_a_second_engine_and_a_sleep_are_found_in_a_test_its_fixtures_and_helpers(
    function: Any, fixtures: list[Any], found: str | None
) -> None:
    named = {fixture.__name__: [SimpleNamespace(func=fixture)] for fixture in fixtures}
    item: Any = SimpleNamespace(
        function=function,
        _fixtureinfo=SimpleNamespace(name2fixturedefs=named),
        get_closest_marker=lambda name: None,
        nodeid="tests/test_it.py::test_it",
    )
    assert rules.broken(item) == found
    item.get_closest_marker = lambda name: name == "long"
    assert rules.broken(item) is None
