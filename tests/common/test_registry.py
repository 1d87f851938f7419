"""One registry for what users add, and plugins as plain files."""

import builtins
import functools
import os
import sys
from pathlib import Path
from typing import Any, Literal, TypedDict

import pytest

from hocket.common import registry
from hocket.common.registry import Registry, load_plugin, load_plugins, options_of
from hocket.data.sources import TASKS
from hocket.errors import ConfigError
from hocket.observe.metrics import METRIC_TABLES
from support.examples import shown


def plugin(answer: str, words: set[str], share: float = 1.0, unit: Literal["tokens", "characters"] = "tokens") -> None:
    """Has an argument that is no option."""


def test_a_name_whose_module_is_not_there_is_unknown_and_all_come_in_the_order_of_the_table() -> None:
    """As where src/hocket/extras is deleted."""
    modules = {"gone": "hocket.extras.no_such", "one": "hocket.errors", "two": "hocket.types"}
    things: Registry[object] = Registry("thing", **modules)
    things.register("three")(3)
    assert things.names == {"one", "two", "three"}
    with pytest.raises(ConfigError, match=r"there is no thing 'gone' .*; known: one, three, two; add your own"):
        things.get("gone")
    things.items |= {"two": 2, "one": 1}
    assert [*things.each()] == [1, 2, 3]


def test_a_folder_without_a_file_of_its_own_is_no_module() -> None:
    """As what is left of a deleted one: __pycache__."""
    assert registry.is_there("hocket.common")
    assert not registry.is_there("hocket.templates")


def test_what_needs_a_module_that_was_deleted_says_which_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "needs_another.py").write_text("from hocket.common.no_such import anything\n")
    monkeypatch.syspath_prepend(tmp_path)
    things: Registry[object] = Registry("thing", judge="needs_another")
    for _ in range(2):  # and again
        with pytest.raises(ConfigError, match=r"thing 'judge' needs hocket\.common\.no_such, which was deleted"):
            things.get("judge")


def test_what_a_name_or_a_mapping_chooses_is_called_with_its_options_and_what_it_is_given() -> None:
    things: Registry[Any] = Registry("thing")
    things.register("sum")(lambda run, left=1, right=2: (run, left + right))
    assert things.choose("sum", "a.b", keys=("run",))("r") == ("r", 3)
    assert things.choose({"name": "sum", "right": 5}, "a.b", keys=("run",))("r") == ("r", 6)
    with pytest.raises(ConfigError, match=r"sum\(run, left, right\) has no option 'up'"):
        things.choose({"name": "sum", "up": 5}, "a.b", keys=("run",))
    with pytest.raises(ConfigError, match=r"a\.b: there is no thing 'product'"):
        things.choose("product", "a.b")


def test_the_registry_that_the_docstring_shows_works_as_it_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Registry, "every", [])
    names: dict[str, Any] = {"__name__": "example"}
    exec(shown(registry, "from hocket.common.registry import Registry"), names)
    assert (names["area"], names["chosen_area"]) == (6.0, 15.0)


def test_a_plugin_that_failed_may_register_again_what_is_no_function(tmp_path: Path) -> None:
    file = tmp_path / "table.py"
    begin = "from hocket.observe.metrics import Metric, metric_table\nmetric_table('mine')([Metric('mine/x', 'x')])\n"
    file.write_text(f"{begin}raise ValueError\n")
    with pytest.raises(ConfigError, match="line 3: ValueError"):
        load_plugin(str(file))
    file.write_text(begin)
    try:
        assert load_plugins([str(file)])[0].registers == ("table of metrics mine",)
    finally:
        METRIC_TABLES.forget("mine")


def test_options_are_read_as_annotations_say_and_each_fault_names_its_key() -> None:
    read = functools.partial(options_of, "reward mine", plugin, section="rewards.functions.mine", keys=("answer",))
    assert read({"words": ["a", "a"], "share": 2}) == {"words": {"a"}, "share": 2.0}
    with pytest.raises(ConfigError) as refused:
        read({"shares": 2, "unit": "token"}, row="; rows have none")
    called = "reward mine(answer, words, share, unit)"
    assert str(refused.value).splitlines() == [
        f"{called} needs the option 'words': set rewards.functions.mine.words; rows have none",
        "rewards.functions.mine.unit: Input should be 'tokens' or 'characters' (did you mean 'tokens'?)",
        f"{called} has no option 'shares' (did you mean 'share'?)",
    ]


def test_a_plugin_that_takes_any_option_gets_all_as_they_are() -> None:
    def takes_all(known: "no_such_type", **others: object) -> None: ...  # type: ignore[name-defined]  # noqa: F821

    given = {"known": 1, "other": ["a"]}
    assert options_of("task", takes_all, given, section="task") == given


def test_an_annotation_that_can_not_be_checked_is_refused_in_words() -> None:
    def odd(bounds: TypedDict("Bounds", {"low": int})) -> None: ...  # type: ignore[valid-type]

    with pytest.raises(ConfigError, match=r"task\(bounds\) has an annotation that pydantic can't check: "):
        options_of("task", odd, {}, section="task")


def test_an_unknown_name_lists_the_known_ones_and_modules_are_imported_when_one_of_theirs_is_used_or_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry: Registry[object] = Registry("reward", lazy="lazy_of_tests", lazier="lazy_of_tests")
    monkeypatch.setitem(vars(builtins), "registry_of_tests", registry)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "lazy_of_tests.py").write_text("for name in 'lazy', 'lazier': registry_of_tests.register(name)(name)")
    with pytest.raises(ConfigError, match=r"no reward 'laz' \(did you mean 'lazy'\?\); known: lazier, lazy; add your"):
        registry.get("laz")
    with pytest.raises(ConfigError, match="no reward 'zzz'; known"):
        registry.get("zzz")
    assert "lazy_of_tests" not in sys.modules
    with pytest.raises(ConfigError, match="'lazy' is registered twice"):
        registry.register("lazy")(object())
    own = object()
    assert registry.register("own")(own) is own
    assert [registry.get(name) for name in ("lazy", "lazier", "own")] == ["lazy", "lazier", own]


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


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("x = 1\nimport no_such_package", r"line 2: ModuleNotFoundError: No module named 'no_such_package'"),
        ("\n\nx = = 1", r"line 3: SyntaxError: invalid syntax"),
        ("def broken():\n    return 1 / 0\nbroken()", r"line 2: ZeroDivisionError: division by zero"),
        ("import json\njson.loads('[')", r"line 2: JSONDecodeError"),  # where the plugin called it
        ("import sys\nsys.exit()", r"line 2: SystemExit"),
        (
            "from hocket.rewards import reward\nreward('math')(len)",
            r"line 2: reward 'math' is registered twice; choose",
        ),
        ("x = '\0'", "line 1: "),
    ],
)
def test_a_plugin_that_fails_is_named_with_its_line_and_tried_again(lines: str, said: str, tmp_path: Path) -> None:
    plugin = tmp_path / "broken.py"
    plugin.write_text(lines)
    with pytest.raises(ConfigError, match=rf"plugin '{plugin}' can't be imported: {plugin}, {said}"):
        load_plugins([str(plugin)])
    plugin.write_text("fine = True")
    load_plugins([str(plugin)])


def test_what_is_hashed_is_what_runs_also_where_a_file_has_the_time_and_size_of_an_older_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    plugin = tmp_path / "mine.py"
    for value in (1, 2):  # which Python's own loader would take from the bytecode of the first one
        plugin.write_text(f"value = {value}")
        os.utime(plugin, (1e9, 1e9))
        monkeypatch.setattr(registry, "_PLUGINS", {})  # another process
        module = load_plugin(str(plugin))
        assert module.value == value
    assert [path.name for path in tmp_path.iterdir()] == ["mine.py"]


def test_a_plugin_that_failed_may_register_its_names_again_and_no_other_one_may(tmp_path: Path) -> None:
    register = "from hocket.data.sources import TASKS\n@TASKS.register('mine')\ndef mine(): ...\n"
    plugin, other = tmp_path / "mine.py", tmp_path / "other.py"
    plugin.write_text(f"{register}1 / 0")
    with pytest.raises(ConfigError, match="line 4: ZeroDivisionError"):
        load_plugins([str(plugin)])
    plugin.write_text(register)
    load_plugins([str(plugin)])
    other.write_text(register)
    with pytest.raises(ConfigError, match="line 2: task 'mine' is registered twice"):
        load_plugins([str(other)])
    TASKS.forget("mine")
