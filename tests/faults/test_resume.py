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


@pytest.mark.parametrize("forked", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_trainer_that_is_killed_and_resumed_ends_with_the_weights_of_one_that_was_not(
    forked: bool, tmp_path: Path, processes: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Where it is false the server and the first run start as a user starts them: those that are forked must not differ.
    monkeypatch.setattr(Command, "forked", forked)
    # One sequence at a time: what an engine computes for one depends in its last bits on those beside it.
    server = Server(tmp_path, free_port(), "server.engine.max_num_seqs=1")
    processes.append(server)
    server.wait_ready()
    updates = ("algorithm.epochs=2", "algorithm.minibatches=2")
    batches = ("trainer.steps=6", "rollout.prompts_per_step=4", "rollout.group_size=4", "checkpoint.every_steps=3")
    settings = (*updates, *batches)
    held_out = ("eval.num_prompts=4", "eval.every_steps=3")

    straight = Run(tmp_path, "straight", [server], *settings, *held_out)
    processes.append(straight)
    monkeypatch.undo()
    assert straight.wait_end() == 0, straight.output()

    resumable = ("checkpoint.resume=true", "checkpoint.async=true", *settings, *held_out)
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
    weights = [
        folder / "weights" / f"v{summary['final_version']:06d}" / "model.safetensors"
        for folder, summary in zip(folders, summaries, strict=True)
    ]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    for name in ("before", "after", "steps", "seed"):
        assert summaries[0][name] == summaries[1][name]
    lines = [(folder / "metrics.jsonl").read_text().splitlines() for folder in folders]
    for one, other in zip(*(map(json.loads, rows) for rows in lines), strict=True):  # each step once, and the same
        timed = {name for name in one if name.endswith("_s") or name == "train/mfu"}
        same = {name for name in one if name.startswith(("reward/", "train/", "eval/")) or name == "step"} - timed
        assert {name: one[name] for name in same} == {name: other[name] for name in same}
    again.assert_whole(6, 4, 4)

    model = tmp_path / "runs" / "model"
    made = Command(["export", f"{again.dir}/checkpoints/step_000006", str(model)], tmp_path / "export.log")
    processes.append(made)
    assert made.popen.wait(START_S) == 0, made.output()
    assert (model / "model.safetensors").read_bytes() == weights[1].read_bytes()  # and that, the server has loaded
    server.end()
