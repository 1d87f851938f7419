"""A real run whose reward does its worst: it goes on, says what failed and why, trains the rest, leaves no process."""

import json
import random
import string
import uuid
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from support import hostile
from support.processes import ROOT, START_S, Run, Server, free_port, started

pytestmark = [pytest.mark.e2e, pytest.mark.long]

PLUGIN = """
import ctypes, os, sys, time
import hocket.rewards.workers as workers
from hocket.rewards import reward

workers.MAX_PROCESSES, workers.MAX_MIB = 20, 300  # of a worker

{hostile}
@reward("torture")
def torture(completion, answer, meta):
    right = float(completion == answer)
    return eval(meta["does"])
"""
DOES = {  # what the reward does with all completions of a prompt: the error of each, None: it gets its score
    "{}['gone']": "torture: KeyError: 'gone'",
    "time.sleep(600)": "torture: no result within 10 s; its worker process was ended",
    "ctypes.string_at(0)": "torture: its worker process ended with exit code 139",
    "[bytearray(os.urandom(1 << 20)) * 100 for _ in range(100)]": "torture: its worker process ended: it took more",
    "[fork_and_sleep() for _ in range(1000)]": "torture: its worker process ended: it took more",
    "os.write(answers(), b'[1.0]\\n') and right": "torture: its worker process answered with something else",
    "float('nan')": "torture: returned nan, which is not a finite number",
    "None": "torture: returned None instead of a number",
    "'1.0'": "torture: returned str instead of a number",
    "sys.exit(3)": "torture: SystemExit: 3",
    "os._exit(0)": "torture: its worker process ended with exit code 0",
    "daemonise() or right": None,
    "print('again\\n' * 10**6) or right": None,
}
STEPS, PROMPTS, SIZE = 3, 12, 4  # one epoch: each row is drawn once


def test_a_run_goes_on_without_what_a_hostile_reward_spoils_and_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn, rows = random.Random(0), []
    for does in [*DOES, *["right"] * (STEPS * PROMPTS - len(DOES))]:
        letters = "".join(drawn.sample(string.ascii_lowercase, 4))
        rows.append({"prompt": f"Sort: {letters}", "answer": "".join(sorted(letters)), "does": does})
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "torture.py").write_text(
        PLUGIN.replace("{hostile}", Path(hostile.__file__).read_text(encoding="utf-8"))
    )
    mark = uuid.uuid4().hex
    settings = [f"plugins=[{tmp_path}/torture.py]"]
    settings += ["rewards.functions={torture: 1.0}", "rewards.timeout_s=10", "rewards.max_error_rate=1"]
    settings += [f"data.source={tmp_path}/rows.jsonl", "eval.num_prompts=0", f"trainer.steps={STEPS}"]
    settings += [f"rollout.prompts_per_step={PROMPTS}", f"rollout.group_size={SIZE}"]
    with Server(tmp_path, free_port()) as server:
        server.wait_ready()
        monkeypatch.setenv("HOCKET_TORTURE", mark)
        with Run(tmp_path, "a", [server], *settings) as run:
            assert run.wait_end(START_S + 120) == 0, run.output()
            run.assert_gone()
        server.end()
    monkeypatch.delenv("HOCKET_TORTURE")
    assert started(mark) == set()

    errors = defaultdict[str, list[str | None]](list)
    for step, metrics in enumerate(map(json.loads, (run.dir / "metrics.jsonl").read_text().splitlines()[-STEPS:]), 1):
        lines = (run.dir / "rollouts" / f"step_{step:06d}.jsonl").read_text().splitlines()
        rollouts = list(map(json.loads, lines))
        for rollout in rollouts:
            (does,) = {row["does"] for row in rows if row["prompt"] == rollout["prompt"]}
            errors[does].append(rollout["error"])
            assert (rollout["reward"] is None) == (rollout["error"] is not None) == (not rollout["parts"])
        failed = sum(rollout["error"] is not None for rollout in rollouts)
        assert metrics["rollout/reward_errors"] == pytest.approx(failed / (PROMPTS * SIZE))
        assert 0 < metrics["train/sequences"] <= PROMPTS * SIZE - failed
        assert metrics["train/grad_norm"] > 0
    assert {does: len(of) for does, of in errors.items()} == dict.fromkeys(DOES, SIZE) | {
        "right": SIZE * (STEPS * PROMPTS - len(DOES))
    }
    for does, found in errors.items():
        for error in found:
            assert str(error).startswith(str(DOES.get(does))), does
    before, after = (
        load_file(next(path.glob("*.safetensors")))
        for path in (ROOT / "checkpoints/tiny-sort", run.dir / "weights/v000004")
    )
    assert any(not torch.equal(before[name], after[name]) for name in before)
