"""A whole run of agents with launch.share_gpu; test_runs.py has two ranks that take turns with the server."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]
SIZES = ["trainer.steps=3", "rollout.prompts_per_step=4", "rollout.group_size=4", "eval.num_prompts=0"]


def test_agents_teach_an_adapter_on_a_shared_gpu(tmp_path: Path) -> None:
    folder = tmp_path / "agents"
    settings = ["model.lora={rank: 4}", "launch.share_gpu=true", "sync.canary_every=2", "observe.tensorboard=false"]
    done = subprocess.run(
        [sys.executable, "run.py", "quickstart", "config/agent.yaml", *SIZES, *settings, f"run.dir={folder}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()][1:]
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert "time/turn" in steps[0]
    for step in steps:  # each was played by the adapter of the step before
        assert step["rollout/turns_mean"] > 1
        assert step["rollout/reward_errors"] == step["staleness/max"] == 0
        assert step["train/logprob_gap"] < 1e-5
    adapter = load_file(folder / "weights" / "v000004" / "adapter_model.safetensors")
    assert max(float(tensor.abs().max()) for name, tensor in adapter.items() if "lora_B" in name) > 1e-4
