"""Whole runs with launch.share_gpu: taking turns changes nothing but the time it takes, whoever plays the episodes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]
SIZES = ["trainer.steps=3", "rollout.prompts_per_step=4", "rollout.group_size=4", "eval.num_prompts=16"]


def run(folder: Path, *settings: str, name: str = "quickstart") -> list[dict[str, Any]]:
    """Returns the lines of metrics.jsonl, without what depends on the clock."""
    more = ["sync.canary_every=2", "observe.tensorboard=false", f"run.dir={folder}"]
    done = subprocess.run(
        [sys.executable, "run.py", "quickstart", f"config/{name}.yaml", *SIZES, *more, *settings],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert ("time/turn" in lines[1]) == ("launch.share_gpu=true" in settings)
    return [{name: value for name, value in line.items() if not is_timed(name)} for line in lines]


def is_timed(name: str) -> bool:
    return name.startswith(("time/", "share/", "pipeline/")) or name.endswith("_s") or name == "train/mfu"


def test_a_run_that_shares_its_gpu_ends_bit_for_bit_as_one_that_does_not(tmp_path: Path) -> None:
    apart = run(tmp_path / "apart", "launch.trainers=2")
    shared = run(tmp_path / "shared", "launch.trainers=2", "launch.share_gpu=true")
    assert shared == apart
    assert [line["step"] for line in shared] == [0, 1, 2, 3]
    weights = [
        (tmp_path / name / "weights" / "v000004" / "model.safetensors").read_bytes() for name in ("apart", "shared")
    ]
    assert weights[0] == weights[1]
    start = (ROOT / "checkpoints" / "tiny-sort" / "model.safetensors").read_bytes()
    assert weights[0] != start


def test_agents_teach_an_adapter_on_a_shared_gpu(tmp_path: Path) -> None:
    settings = ["model.lora={rank: 4}", "launch.share_gpu=true", "eval.num_prompts=0"]
    steps = run(tmp_path / "agents", *settings, name="agent")[1:]
    assert [step["step"] for step in steps] == [1, 2, 3]
    for step in steps:  # each was played by the adapter of the step before
        assert step["rollout/turns_mean"] > 1
        assert step["rollout/reward_errors"] == step["staleness/max"] == 0
        assert step["train/logprob_gap"] < 1e-5
    adapter = load_file(tmp_path / "agents" / "weights" / "v000004" / "adapter_model.safetensors")
    assert max(float(tensor.abs().max()) for name, tensor in adapter.items() if "lora_B" in name) > 1e-4
