"""Two whole runs, with launch.share_gpu and without: taking turns changes nothing but the time it takes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]
SIZES = ["trainer.steps=3", "rollout.prompts_per_step=4", "rollout.group_size=4", "eval.num_prompts=16"]


def run(folder: Path, *settings: str) -> list[dict[str, Any]]:
    """Returns the lines of metrics.jsonl, without what depends on the clock."""
    more = ["launch.trainers=2", "sync.canary_every=2", "observe.tensorboard=false", f"run.dir={folder}"]
    done = subprocess.run(
        [sys.executable, "run.py", "quickstart", "config/quickstart.yaml", *SIZES, *more, *settings],
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
    apart, shared = run(tmp_path / "apart"), run(tmp_path / "shared", "launch.share_gpu=true")
    assert shared == apart
    assert [line["step"] for line in shared] == [0, 1, 2, 3]
    weights = [
        (tmp_path / name / "weights" / "v000004" / "model.safetensors").read_bytes() for name in ("apart", "shared")
    ]
    assert weights[0] == weights[1]
    start = (ROOT / "checkpoints" / "tiny-sort" / "model.safetensors").read_bytes()
    assert weights[0] != start
