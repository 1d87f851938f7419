import sys
from pathlib import Path

import pytest

from hocket.common import openrlhf
from hocket.common.registry import load_plugins
from hocket.errors import ConfigError

BASES = "AgentExecutorBase, AgentInstanceBase, MultiTurnAgentExecutor"


@pytest.fixture(autouse=True)
def anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, openrlhf.BASES, raising=False)


@pytest.mark.parametrize("bases", BASES.split(", "))
def test_each_class_that_such_files_inherit_from_is_there(bases: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(f"from openrlhf.utils.agent import {bases}\nclass Own({bases}): ...\n")
    assert load_plugins([str(tmp_path / "own.py")])


def test_other_modules_of_the_package_are_missing_as_before(tmp_path: Path) -> None:
    (tmp_path / "other.py").write_text("from openrlhf.models import Actor\n")
    with pytest.raises(ConfigError, match="No module named 'openrlhf'"):
        load_plugins([str(tmp_path / "other.py")])


def test_nothing_stands_in_where_the_package_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    openrlhf.stand_in()
    assert openrlhf.BASES not in sys.modules
