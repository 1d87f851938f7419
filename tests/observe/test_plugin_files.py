"""A run folder says which plugins took part in the run, and keeps what was in them."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from hocket.common import registry
from hocket.common.registry import load_plugins
from hocket.config import load
from hocket.errors import ConfigError, DataError
from hocket.observe.run_folder import RunFolder
from hocket.rewards.base import REWARDS
from hocket.trainer.trainer import Trainer

ONE = 'from hocket.rewards import reward\n\n@reward("{}")\ndef own(completion):\n    return 1.0\n'


def test_a_run_has_a_copy_of_each_plugin_and_the_next_one_says_which_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, run = tmp_path / "mine.py", tmp_path / "run"
    file.write_text(ONE.format("kept_one"))
    config = load(None, [f"plugins=[{file}]", f"run.dir={run}"])
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    for content in ("{", "[1]", '[{"path": "mine.py"}]'):
        run.mkdir(exist_ok=True)
        (run / "plugins.json").write_text(content)
        with pytest.raises(DataError, match=f"{run}/plugins.json is damaged: .*bring the file back"):
            RunFolder(config)
    (run / "plugins.json").unlink()
    with RunFolder(config) as folder:
        assert folder.changed_plugins == []
        folder.finish(0, {"eval/greedy": 0.5})
        summary = folder.summary(final_version=1)
    copy = f"plugins/mine-{digest[:8]}.py"
    row = {"path": str(file), "sha256": digest, "registers": ["reward kept_one"], "copy": copy}
    assert summary["plugins"] == json.loads((run / "plugins.json").read_text()) == [row]
    assert (run / copy).read_text() == file.read_text()

    monkeypatch.setattr(registry, "_PLUGINS", {})  # another process
    file.write_text(ONE.format("kept_two"))
    with RunFolder(config) as folder:
        (change,) = folder.changed_plugins
    assert {"kept_one", "kept_two"} <= REWARDS.names
    new = hashlib.sha256(file.read_bytes()).hexdigest()
    assert change == f"plugin {file} was {digest[:8]} and is {new[:8]}; the one before: {run / copy}"
    assert len(list((run / "plugins").iterdir())) == 2
    with RunFolder(config) as folder:
        assert folder.changed_plugins == []
    with RunFolder(load(None, [f"run.dir={tmp_path}/without"])):
        pass
    assert not (tmp_path / "without" / "plugins.json").exists()


def test_what_a_plugin_registers_is_told_where_it_is_the_first_to_import_its_registry(tmp_path: Path) -> None:
    file = tmp_path / "first.py"
    file.write_text(ONE.format("first") + "1 / 0\n")
    program = (
        "import sys; from pathlib import Path; from hocket.common.registry import load_plugins\n"
        "from hocket.errors import ConfigError; file = Path(sys.argv[1])\n"
        "try: load_plugins([str(file)])\n"
        "except ConfigError: file.write_text(file.read_text().replace('1 / 0', ''))\n"
        "print(load_plugins([str(file)])[0].registers)\n"
    )
    environment = {"PYTHONPATH": str(Path(registry.__file__).parents[2])}
    said = subprocess.check_output([sys.executable, "-c", program, str(file)], text=True, env=environment)
    assert said == "('reward first',)\n"


def test_ranks_with_other_files_end_the_run_at_its_start(tmp_path: Path) -> None:
    file = tmp_path / "ranks.py"
    file.write_text(ONE.format("of_ranks"))
    (plugin,) = load_plugins([str(file)])

    trainer = Trainer.__new__(Trainer)
    trainer._config = load(None, [f"plugins=[{file}]"])
    trainer.ranks = Mock(gather=lambda hashes: [hashes, [plugin.sha256]])
    trainer._check_plugins()
    trainer.ranks = Mock(gather=lambda hashes: [hashes, ["0" * 64]])
    with pytest.raises(ConfigError, match="a file under plugins is not the same for all ranks: copy that of rank 0"):
        trainer._check_plugins()
