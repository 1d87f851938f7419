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


def test_what_was_registered_is_found_and_stays_what_it_was(rewards: Registry[Callable[[], float]]) -> None:
    def length() -> float:
        return 3.0

    assert rewards.register("length")(length) is length
    assert (rewards.get("exact_match")(), rewards.get("length")()) == (2.0, 3.0)
    with pytest.raises(ConfigError, match="'math' is registered twice"):
        rewards.register("math")(lambda: 9.0)
    assert rewards.get("math")() == 1.0


def test_an_unknown_name_lists_the_known_ones_and_the_nearest(rewards: Registry[Callable[[], float]]) -> None:
    with pytest.raises(ConfigError) as caught:
        rewards.get("exact_mach")
    assert "no reward 'exact_mach' (did you mean 'exact_match'?); known: exact_match, math" in str(caught.value)
    assert "plugins:" in str(caught.value)
    assert nearest("zzz", ["math"]) == ""


def test_a_plugin_runs_once_however_often_it_is_named_and_two_of_one_name_are_two(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.py").write_text(f"from pathlib import Path\nNAME = {name!r}\nCOUNTED = [0]\n")
    files = [str(tmp_path / "a/mine.py"), str(tmp_path / "b/mine.py")]
    for _ in range(2):
        load_plugins([*files, files[0]])
        loaded = [m for n, m in sys.modules.items() if n.startswith("hocket_plugin_mine_") and hasattr(m, "COUNTED")]
        loaded[0].COUNTED[0] += 1
    assert sorted(module.NAME for module in loaded) == ["a", "b"]
    assert [module.COUNTED for module in loaded] == [[2], [0]]  # loaded once


def test_a_plugin_that_failed_is_tried_again_and_one_that_is_not_there_is_named(tmp_path: Path) -> None:
    plugin = tmp_path / "broken.py"
    for words in ("first", "the second time"):
        plugin.write_text(f"raise ValueError({words!r})\n")
        with pytest.raises(ValueError, match=words):
            load_plugins([str(plugin)])
    with pytest.raises(ConfigError, match=r"nowhere\.py' is not a Python file; paths are relative to"):
        load_plugins([str(tmp_path / "nowhere.py")])
