"""A trainer is killed in the middle of an update, and goes on: its weights are those of one that was not."""

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from support.processes import START_S, Command, Run, Server, free_port, wait_for

pytestmark = pytest.mark.e2e

SLOW = "plugins=[tests/faults/slow_update.py]"


SETTINGS = (
    *("algorithm.epochs=2", "algorithm.minibatches=2"),
    *("trainer.steps=6", "rollout.prompts_per_step=4", "rollout.group_size=4", "checkpoint.every_steps=3"),
    *("eval.num_prompts=4", "eval.every_steps=3"),
)
ALONE = "server.engine.max_num_seqs=1"
"""One sequence at a time: what an engine computes for one depends in its last bits on those beside it."""


def last_weights(run: Run) -> bytes:
    version = json.loads((run.dir / "summary.json").read_text())["final_version"]
    return (run.dir / "weights" / f"v{version:06d}" / "model.safetensors").read_bytes()


def assert_same_steps(one: Run, other: Run) -> None:
    """Asserts that two runs have each step once, and the same rewards, updates and evaluations in it."""
    lines = [(run.dir / "metrics.jsonl").read_text().splitlines() for run in (one, other)]
    for mine, others in zip(*(map(json.loads, rows) for rows in lines), strict=True):
        timed = {name for name in mine if name.endswith("_s") or name == "train/mfu"}
        same = {name for name in mine if name.startswith(("reward/", "train/", "eval/")) or name == "step"} - timed
        assert {name: mine[name] for name in same} == {name: others[name] for name in same}


def test_a_trainer_that_is_killed_and_resumed_ends_with_the_weights_of_one_that_was_not(
    tmp_path: Path, processes: list[Any]
) -> None:
    server = Server(tmp_path, free_port(), ALONE)
    processes.append(server)
    server.wait_ready()
    straight = Run(tmp_path, "straight", [server], *SETTINGS)
    processes.append(straight)
    assert straight.wait_end() == 0, straight.output()

    resumable = ("checkpoint.resume=true", "checkpoint.async=true", *SETTINGS)
    slow = ("sync.backend=nccl", SLOW)
    run = Run(tmp_path, "resumed", [server], *resumable, *slow)
    processes.append(run)
    run.wait_step(4)
    wait_for(lambda: (run.dir / "checkpoints" / "step_000003" / "COMPLETE").exists(), "a checkpoint")
    server.wait_until(lambda health: health["status"] == "updating", "an update after it")
    run.kill()
    run.assert_gone()
    between = Run(tmp_path, "resumed", [server], *resumable, "plugins=[tests/faults/die_between_updates.py]")
    processes.append(between)
    assert between.wait_end() == -signal.SIGKILL
    assert between.steps()[-1]["step"] == 4
    again = Run(tmp_path, "resumed", [server], *resumable)
    processes.append(again)
    assert again.wait_end() == 0, again.output()
    assert re.search(r"going on from .*step_000003; .*sync\.backend was 'nccl' and is 'disk'", again.output())

    folders = [straight.dir, again.dir]
    tensors = [(folder / "checkpoints/step_000006/state_00000.safetensors").read_bytes() for folder in folders]
    assert tensors[0] == tensors[1]
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in folders]
    assert last_weights(straight) == last_weights(again)
    for name in ("before", "after", "steps", "seed"):
        assert summaries[0][name] == summaries[1][name]
    assert_same_steps(straight, again)
    again.assert_whole(6, 4, 4)

    model = tmp_path / "runs" / "model"
    made = Command(["export", f"{again.dir}/checkpoints/step_000006", str(model)], tmp_path / "export.log")
    processes.append(made)
    assert made.popen.wait(START_S) == 0, made.output()
    assert (model / "model.safetensors").read_bytes() == last_weights(again)  # and that, the server has loaded
    server.end()
