"""The run folder: records reach the disk at once and are taken back on resume; rollouts and plugins are kept."""

import hashlib
import json
import math
import subprocess
import sys
from array import array
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from hocket import config as config_module
from hocket.common import registry
from hocket.common.files import partial_of
from hocket.common.registry import load_plugins
from hocket.config import Config, load
from hocket.errors import ConfigError, DataError
from hocket.observe import run_folder
from hocket.observe.rows import groups_of, lines_of, read_lines, read_summary
from hocket.observe.run_folder import RunFolder, trainer_id
from hocket.rewards.base import REWARDS
from hocket.trainer import checkpoints
from hocket.trainer.trainer import Trainer
from hocket.types import Group, Prompt, Rollout, Score, TokenSequence
from support.examples import plugged, shown

BASE = TokenSequence(
    token_ids=array("I", (1, 2, 3, 4, 5)), mask=(False, False, True, False, True),  # the environment spoke in between
    logprobs=(0.0, 0.0, -0.1, 0.0, -0.123456789012345), version_min=3, version_max=4, turns=2, text="ab\u2028\r\n",
    dialogue=({"role": "assistant", "content": "a"}, {"role": "environment", "content": "?"}),
)  # fmt: skip
ONE = 'from hocket.rewards import reward\n\n@reward("{}")\ndef own(completion):\n    return 1.0\n'


def rollout(group: str, index: int, others: tuple[TokenSequence, ...] = (), **changes: Any) -> Rollout:
    asked = None if group == "step 1/0" else ({"role": "user", "content": "sort ba"},)
    prompt = Prompt(
        id=f"task:{group}", token_ids=array("I", (1, 2)), text="sort ba", answer="ab", messages=asked, meta={"level": 2}
    )
    return Rollout(id=f"{group}/{index}", prompt=prompt, sequences=(*others, replace(BASE, **changes)))


GROUP = Group(
    id="step 1/0",
    rollouts=(rollout("step 1/0", 0, dialogue=()), rollout("step 1/0", 1)),
    scores=(Score(total=1.0, parts={"m": 1.0}, note="m: so"), Score(total=0.0, error="m: hung")),
)


def settings(tmp_path: Path, *more: str) -> Config:
    return config_module.load(None, [f"run.dir={tmp_path}/runs/a", *more])


def test_a_run_leaves_config_rollouts_summary_and_its_metrics_at_once(tmp_path: Path) -> None:
    config, run = settings(tmp_path, "server.token=12345678"), tmp_path / "runs" / "a"
    with RunFolder(config) as folder:
        assert folder.last_step == -1
        assert folder.skipped(12) == run / "skipped" / "step_000012.json"
        folder.finish(0, {"eval/greedy": 0.25})
        assert (run / "metrics.jsonl").read_text() == '{"format": 1, "step": 0, "eval/greedy": 0.25}\n'
        folder.finish(1, {"eval/greedy": 0.5, "train/grad_norm": math.nan, "time/step": 1.5})
        folder.finish(2, {"time/step": 2.0, "time/train": 1.0})
        folder.finish(3, {"time/train": 1.0, "train/skipped": 1.0})
        folder.rollouts("step_000001", [GROUP])
        summary = folder.summary(final_version=2)
    assert read_lines(run / "metrics.jsonl") == [
        {"step": 0, "eval/greedy": 0.25},
        {"step": 1, "eval/greedy": 0.5, "train/grad_norm": None, "time/step": 1.5},
        {"step": 2, "time/step": 2.0, "time/train": 1.0},
        {"step": 3, "time/train": 1.0, "train/skipped": 1.0},
    ]
    rows = [json.loads(line) for line in (run / "rollouts" / "step_000001.jsonl").open(encoding="utf-8")]
    assert [(row["reward"], row["error"]) for row in rows] == [(1.0, None), (None, "m: hung")]
    assert rows[0] == {
        "format": 1,
        "id": "step 1/0/0", "group_id": "step 1/0", "prompt_id": "task:step 1/0", "prompt": "sort ba", "answer": "ab",
        "messages": None, "completion": "ab\u2028\r\n", "reward": 1.0, "parts": {"m": 1.0}, "error": None,
        "note": "m: so", "meta": {"level": 2}, "opening": "",
        "finish_reason": "stop", "turns": 2, "num_tokens": 2, "version_min": 3, "version_max": 4,
        "token_ids": [1, 2, 3, 4, 5], "logprobs": [0.0, 0.0, -0.1, 0.0, -0.123456789012345], "mask": [0, 0, 1, 0, 1],
    }  # fmt: skip
    assert {"format": 1, **summary} == json.loads((run / "summary.json").read_text())
    assert read_summary(run) == summary
    timed = {"steps": 3, "updated": 1, "train_seconds": 3.5, "seed": 0, "final_version": 2, "plugins": []}
    assert summary == {"before": {"greedy": 0.25}, "after": {"greedy": 0.5}, **timed}
    assert config_module.load(run / "config.yaml").run.dir == config.run.dir
    assert "12345678" not in (run / "config.yaml").read_text()


def test_a_run_has_one_id_on_all_its_ranks_and_after_a_restart_and_another_run_has_another(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "mine"
    with ThreadPoolExecutor(8) as ranks:
        ids = set(ranks.map(lambda _: trainer_id(folder), range(8)))
    assert ids == {trainer_id(folder)}
    assert [path.name for path in folder.iterdir()] == ["trainer_id"]
    assert ids != {trainer_id(tmp_path / "others" / "mine")}


def test_an_id_that_is_damaged_is_said_with_its_place(tmp_path: Path) -> None:
    trainer_id(tmp_path)
    for content in (b"", b"\xff\0", b"a-0123"):
        (tmp_path / "trainer_id").write_bytes(content)
        with pytest.raises(DataError, match=f"{tmp_path}/trainer_id is damaged: remove it"):
            trainer_id(tmp_path)


@pytest.mark.parametrize("row", ["x", "[1]", "null", '{"stop": 1}', '{"step": "one"}', "\0"])
def test_a_row_that_no_run_writes_ends_a_resumed_run_with_its_place(tmp_path: Path, row: str) -> None:
    with RunFolder(settings(tmp_path)) as folder:
        for step in range(3):
            folder.finish(step, {"x": 1.0})
        path = folder.path / "metrics.jsonl"
        path.write_text(path.read_text().replace('{"format": 1, "step": 1, "x": 1.0}', row))
        with pytest.raises(DataError, match=f"{path} is damaged: .*bring the file back"):
            folder.restore({"step": 2, "bytes": {path.name: path.stat().st_size}})
        with pytest.raises(DataError, match=f"{path} is damaged: .*bring the file back"):
            checkpoints.make_room(folder.path, print)


@pytest.mark.parametrize("name", ["metrics.jsonl", "ledger.jsonl", "rollouts/step_000001.jsonl", "summary.json"])
def test_the_first_file_that_a_full_disk_refuses_is_named_and_nothing_half_written_stays(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, real = tmp_path / "runs/a", Path.open
    full = {run / name, partial_of(run / name), partial_of(run / "report.html")}  # the failed run's report, too

    def opened(self: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        file = real(self, mode, *args, **kwargs)
        return real(Path("/dev/full"), "w") if self in full and mode in ("a", "w") else file

    def work() -> None:
        with RunFolder(settings(tmp_path)) as folder:
            monkeypatch.setattr(Path, "open", opened)
            folder.rollouts("step_000001", [GROUP])
            folder.ledger(1, [{"draw": 0}])
            folder.finish(1, {"x": 1.0})
            folder.summary(final_version=1)

    with pytest.raises(OSError, match="No space left") as failed:
        work()
    assert failed.value.filename == str(run / name)
    assert not list(run.rglob(".*"))


def test_what_was_recorded_after_a_state_is_taken_back(tmp_path: Path) -> None:
    run = tmp_path / "runs/a"
    with RunFolder(settings(tmp_path)) as folder:
        for step in range(4):
            entries = [{"draw": 2 * step, "state": "trained"}, {"draw": 2 * step + 1}] if step else []
            folder.ledger(step, entries)
            folder.finish(step, {"x": step + 0.5})
            folder.rollouts(f"step_{step:06d}", [GROUP])
            if step == 1:
                state = json.loads(json.dumps(folder.state()))
        folder.rollouts("eval_000001", [GROUP])
        folder.rollouts("eval_000003", [GROUP])
    for name in ("my_notes", "mine_2", "step_9_notes", "eval_mine"):
        (run / f"rollouts/{name}.jsonl").touch()
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "x"')  # the run was killed
    resumed = settings(tmp_path, "checkpoint.resume=true")
    with RunFolder(resumed) as folder:
        folder.restore(state)
        assert folder.last_step == 1
        folder.ledger(2, [{"draw": 9}])
        folder.finish(2, {"x": 9.0})
        assert folder.history == [{"step": 0, "x": 0.5}, {"step": 1, "x": 1.5}, {"step": 2, "x": 9.0}]
        assert read_lines(run / "metrics.jsonl") == folder.history
    rollouts = sorted(path.stem for path in (run / "rollouts").iterdir())
    assert rollouts == ["eval_000001", "eval_mine", "mine_2", "my_notes", "step_000000", "step_000001", "step_9_notes"]
    assert read_lines(run / "ledger.jsonl") == [
        {"step": 1, "draw": 2, "state": "trained"},
        {"step": 1, "draw": 3},
        {"step": 2, "draw": 9},
    ]
    for name in ("ledger.jsonl", "metrics.jsonl"):
        (run / name).unlink()
        with RunFolder(resumed) as folder, pytest.raises(ConfigError, match=f"{name} has lost records"):
            folder.restore(state)


def test_groups_come_back_as_they_were_and_the_sequences_of_an_agent_s_episode_stay_together() -> None:
    scores = (Score(total=0.1, parts={"math": 0.1}, note="two\nlines"), Score(total=1.0))
    others = (BASE, replace(BASE, turns=1, dialogue=(), text="half a surrogate pair: \ud800"))
    first = Group(id="g", rollouts=(rollout("g", 0, others=others), rollout("g", 1)), scores=scores)
    second = Group(id="step 1/1", rollouts=(rollout("step 1/1", 0),), scores=(Score(total=-2.5),))
    silent = rollout("h", 0, mask=(False,) * 5, logprobs=(0.0,) * 5, turns=0, dialogue=())
    third = Group(id="h", rollouts=(silent,), scores=(Score(total=math.nan, error="math: hung"),))
    lines = lines_of([first, second, third]).split("\n")[:-1]
    rows = [json.loads(line) for line in lines]
    assert [row["num_tokens"] for row in rows] == [6, 2, 2, 0]
    assert [other["id"] for other in rows[0]["others"]] == ["g/0.0", "g/0.1"]
    *read, last = groups_of(lines)
    assert read == [first, second]
    assert (last.scores[0].error, math.isnan(last.scores[0].total)) == ("math: hung", True)  # it stays a failed one
    assert list(last.rollouts[0].prompt.token_ids) == [1, 2, 3, 4, 5]  # all that is there was told
    for total, what in ((None, "nan"), (math.inf, "inf")):  # as an edited row may have
        (edited,) = groups_of([json.dumps(rows[2] | {"reward": total})])
        assert (edited.scores[0].error, edited.scored) == (f"the row has no reward: {what}", [])
    for line, said in (('{"group_id": "g"}', "'completion' must be a text"), ("{", "Expecting")):
        with pytest.raises(ValueError, match=said):
            groups_of([line])


def test_a_state_takes_back_no_other_file_than_a_run_s(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/mine").write_text("mine")
    with RunFolder(settings(tmp_path)) as folder:
        folder.restore({"step": 0, "bytes": {"../mine": 0}})
    assert (tmp_path / "runs/mine").read_text() == "mine"


def test_a_report_of_one_s_own_is_written_when_a_run_has_ended(tmp_path: Path) -> None:
    """The one that the documentation of `report` shows."""
    head = "import json\nfrom pathlib import Path\nfrom hocket.observe.run_folder import report\n"
    code = head + shown(run_folder, '@report("highest")')
    with (
        plugged(tmp_path, code, (run_folder.REPORTS, "highest")),
        RunFolder(config_module.load(None, [f"run.dir={tmp_path}/a"])) as folder,
    ):
        for step, reward in enumerate((0.25, 0.75, 0.5)):
            folder.finish(step, {"reward/mean": reward})
        folder.summary(final_version=3)
    assert (tmp_path / "a" / "highest.txt").read_text() == "step 1"


def test_a_report_that_fails_is_said_and_hides_no_other_error(tmp_path: Path) -> None:
    said: list[str] = []
    code = (
        "from hocket.observe.run_folder import report\n"
        "@report('broken')\ndef write(folder):\n    raise ValueError('nothing to draw')\n"
    )
    with plugged(tmp_path, code, (run_folder.REPORTS, "broken")):
        with RunFolder(config_module.load(None, [f"run.dir={tmp_path}/a"]), said.append) as folder:
            folder.finish(0, {})
            assert folder.summary(final_version=1)["steps"] == 0
        with (
            pytest.raises(KeyError, match="the cause"),
            RunFolder(config_module.load(None, [f"run.dir={tmp_path}/b"]), said.append),
        ):
            raise KeyError("the cause")
    broken = [line for line in said if "was not written: ValueError: nothing to draw" in line]
    assert [line.split(" was not")[0] for line in broken] == [
        f"WARNING: a report of {tmp_path}/{name}" for name in ("a", "b")
    ]


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
    assert summary["plugins"] == [row]
    assert json.loads((run / "plugins.json").read_text()) == [{"format": 1, **row}]
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
