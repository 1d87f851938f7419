"""One registry for what users add, and plugins as plain files."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hocket.errors import ConfigError
from hocket.registry import Registry, load_plugins, nearest


@pytest.fixture
def rewards() -> Registry[Callable[[], float]]:
    registry: Registry[Callable[[], float]] = Registry("reward")
    registry.register("math")(lambda: 1.0)
    registry.register("exact_match")(lambda: 2.0)
    return registry


def test_what_was_registered_is_found(rewards: Registry[Callable[[], float]]) -> None:
    assert rewards.get("exact_match")() == 2.0
    assert rewards.names() == ["exact_match", "math"]


def test_the_decorator_returns_the_function_itself(rewards: Registry[Callable[[], float]]) -> None:
    def length() -> float:
        return 3.0

    assert rewards.register("length")(length) is length


def test_an_unknown_name_lists_the_known_ones_and_the_nearest(rewards: Registry[Callable[[], float]]) -> None:
    with pytest.raises(ConfigError) as caught:
        rewards.get("exact_mach")
    assert "no reward 'exact_mach' (did you mean 'exact_match'?); known: exact_match, math" in str(caught.value)
    assert "plugins:" in str(caught.value)


def test_a_double_name_is_refused_and_the_first_stays(rewards: Registry[Callable[[], float]]) -> None:
    with pytest.raises(ConfigError, match="'math' is registered twice"):
        rewards.register("math")(lambda: 9.0)
    assert rewards.get("math")() == 1.0


def test_nothing_is_suggested_where_nothing_is_near() -> None:
    assert nearest("zzz", ["math"]) == ""


def test_a_plugin_runs_once_however_often_it_is_named(tmp_path: Path) -> None:
    counter = tmp_path / "count"
    plugin = tmp_path / "plugin.py"
    plugin.write_text(f"from pathlib import Path\nwith Path({str(counter)!r}).open('a') as f: f.write('x')\n")
    load_plugins([str(plugin)])
    load_plugins([str(plugin), str(plugin)])
    assert counter.read_text() == "x"


def test_plugins_of_one_name_in_two_folders_are_two(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.py").write_text(f"WHO = {name!r}\n")
    load_plugins([str(tmp_path / "a/mine.py"), str(tmp_path / "b/mine.py")])
    loaded = [m.WHO for n, m in sys.modules.items() if n.startswith("hocket_plugin_mine_") and hasattr(m, "WHO")]
    assert sorted(loaded) == ["a", "b"]


def test_a_plugin_that_failed_is_tried_again(tmp_path: Path) -> None:
    plugin = tmp_path / "broken.py"
    plugin.write_text("raise ValueError('first')\n")
    with pytest.raises(ValueError, match="first"):
        load_plugins([str(plugin)])
    plugin.write_text("raise ValueError('the second time')\n")
    with pytest.raises(ValueError, match="the second time"):
        load_plugins([str(plugin)])


def test_a_plugin_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.py' is not a file; paths are relative to"):
        load_plugins([str(tmp_path / "nowhere.py")])
