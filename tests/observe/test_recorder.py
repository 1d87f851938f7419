import json
import math
from pathlib import Path

import pytest

from hocket import config as config_module
from hocket.errors import ConfigError
from hocket.observe.recorder import Recorder
from hocket.types import Group, Prompt, Rollout, Score, TokenSequence

PROMPT = Prompt(
    id="task:0", token_ids=(1, 2), messages=({"role": "user", "content": "sort ba"},), answer="ab", text="sort ba"
)
ROLLOUT = Rollout(
    id="step 1/0/0",
    prompt=PROMPT,
    sequences=(
        TokenSequence(
            token_ids=(1, 2, 3),
            mask=(False, False, True),
            logprobs=(0.0, 0.0, -0.5),
            finish_reason="stop",
            version_min=1,
            version_max=2,
            text="ab\u2028",
        ),
    ),
)
GROUP = Group(
    id="step 1/0",
    rollouts=(ROLLOUT,) * 2,
    scores=(Score(total=1.0, parts={"m": 1.0}), Score(total=0.0, error="m: hung")),
)


def test_a_run_leaves_config_metrics_rollouts_and_summary(tmp_path: Path) -> None:
    config = config_module.load(
        None, [f"run.dir={tmp_path}/runs/a", "observe.tensorboard=false", "server.token=12345678"]
    )
    with Recorder(config) as recorder:
        recorder.metrics(0, {"eval/accuracy": 0.25})
        recorder.metrics(1, {"train/loss": 0.5, "train/grad_norm": math.nan})
        recorder.rollouts("step_000001", [GROUP])
        recorder.summary(before=0.25, after=0.5, steps=1, train_seconds=1.0, seed=0, final_version=2)
    run = tmp_path / "runs" / "a"
    assert [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()] == [
        {"step": 0, "eval/accuracy": 0.25},
        {"step": 1, "train/loss": 0.5, "train/grad_norm": None},
    ]
    rows = [json.loads(line) for line in (run / "rollouts" / "step_000001.jsonl").open(encoding="utf-8")]
    assert [(row["reward"], row["error"]) for row in rows] == [(1.0, None), (None, "m: hung")]
    assert rows[0] | {} == {
        "id": "step 1/0/0",
        "group_id": "step 1/0",
        "prompt_id": "task:0",
        "prompt": "sort ba",
        "completion": "ab\u2028",
        "answer": "ab",
        "reward": 1.0,
        "parts": {"m": 1.0},
        "error": None,
        "finish_reason": "stop",
        "turns": 1,
        "num_tokens": 1,
        "version_min": 1,
        "version_max": 2,
        "token_ids": [1, 2, 3],
        "logprobs": [0.0, 0.0, -0.5],
        "mask": [0, 0, 1],
    }
    assert json.loads((run / "summary.json").read_text())["final_version"] == 2
    saved = config_module.load(run / "config.yaml")
    assert saved.run.dir == config.run.dir
    assert "12345678" not in (run / "config.yaml").read_text()


def test_metrics_are_on_disk_as_soon_as_they_are_recorded(tmp_path: Path) -> None:
    config = config_module.load(None, [f"run.dir={tmp_path}/runs/a", "observe.tensorboard=false"])
    with Recorder(config) as recorder:
        recorder.metrics(1, {"x": 1.0})
        assert (tmp_path / "runs/a/metrics.jsonl").read_text() == '{"step": 1, "x": 1.0}\n'


def test_a_run_that_is_interrupted_leaves_a_report_of_what_it_had(tmp_path: Path) -> None:
    config = config_module.load(None, [f"run.dir={tmp_path}/runs/a", "observe.tensorboard=false"])

    def run() -> None:
        with Recorder(config) as recorder:
            recorder.metrics(1, {"reward/mean": 0.5})
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run()
    assert "The run has not finished" in (tmp_path / "runs/a/report.html").read_text()


def test_the_batch_of_a_skipped_step_is_named_after_it(tmp_path: Path) -> None:
    config = config_module.load(None, [f"run.dir={tmp_path}/runs/a", "observe.tensorboard=false"])
    with Recorder(config) as recorder:
        assert recorder.skipped(12) == tmp_path / "runs/a/skipped/step_000012.json"


def test_what_was_recorded_after_a_state_is_taken_back(tmp_path: Path) -> None:
    settings = [f"run.dir={tmp_path}/runs/a", "observe.tensorboard=false"]
    run = tmp_path / "runs/a"
    with Recorder(config_module.load(None, settings)) as recorder:
        assert recorder.history() == []
        for step in range(4):
            recorder.metrics(step, {"x": step + 0.5})
            recorder.rollouts(f"step_{step:06d}", [GROUP])
            recorder.ledger(step, [{"draw": 2 * step, "state": "trained"}, {"draw": 2 * step + 1}] if step else [])
            if step == 1:
                state = json.loads(json.dumps(recorder.state()))
        recorder.rollouts("eval_000001", [GROUP])
        recorder.rollouts("eval_000003", [GROUP])
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "x"')  # the run was killed
    resumed = config_module.load(None, [*settings, "checkpoint.resume=true"])
    with Recorder(resumed) as recorder:
        recorder.restore(state)
        assert [record["step"] for record in recorder.history()] == [0, 1]
        recorder.metrics(2, {"x": 9.0})
        recorder.ledger(2, [{"draw": 9}])
        assert recorder.history() == [{"step": 0, "x": 0.5}, {"step": 1, "x": 1.5}, {"step": 2, "x": 9.0}]
    assert sorted(path.name for path in (run / "rollouts").iterdir()) == [
        "eval_000001.jsonl",
        "step_000000.jsonl",
        "step_000001.jsonl",
    ]
    assert [json.loads(line) for line in (run / "ledger.jsonl").open()] == [
        {"step": 1, "draw": 2, "state": "trained"},
        {"step": 1, "draw": 3},
        {"step": 2, "draw": 9},
    ]
    for name in ("ledger.jsonl", "metrics.jsonl"):
        (run / name).unlink()
        with Recorder(resumed) as recorder, pytest.raises(ConfigError, match=f"{name} has lost records"):
            recorder.restore(state)


def test_a_folder_that_holds_a_run_is_refused(tmp_path: Path) -> None:
    config = config_module.load(None, [f"run.dir={tmp_path}/runs/a", "observe.tensorboard=false"])
    with Recorder(config):
        pass
    with pytest.raises(ConfigError, match=r"holds a run already.*checkpoint\.resume=true"):
        Recorder(config)
