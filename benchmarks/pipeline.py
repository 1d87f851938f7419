"""Training in step against training while rollouts run ahead: steps per second, waits, and accuracy at equal samples.

    python benchmarks/pipeline.py [config.yaml] [--staleness 0,1,2,4] [--rounds 1] [section.key=value ...]

One real server serves all runs, one real trainer after the other trains the small policy that ships in checkpoints/. On
a machine without a GPU each gets a core of its own, so that in step one of them is always idle: twice as many steps per
second is then the most that overlap can give, where generating takes as long as training. The defaults are chosen so;
"balance" says how well that held (generating / everything else, in step). Warm steps are counted: not the first ones,
in which the pipeline fills, and no time of evaluations.
"""

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch

from hocket import config as configs

ROOT = Path(__file__).resolve().parents[1]
COLD_STEPS = 4
DEFAULTS = (
    "trainer.steps=40",
    "rollout.prompts_per_step=64",
    "rollout.group_size=16",
    "trainer.learning_rate=1e-4",
    "trainer.gradient_checkpointing=true",  # these three: as much work as generating is
    "algorithm.kl=k3",
    "algorithm.kl_coef=1e-3",
    "eval.every_steps=0",
    "checkpoint.every_steps=0",
)


def command(name: str, arguments: Sequence[str], *, core: int, log: Path, **env: str) -> "subprocess.Popen[bytes]":
    """Starts a hocket command, on one core of its own where there is no GPU; its output goes to `log`."""
    cores = sorted(os.sched_getaffinity(0))
    pinned = {cores[core]} if not torch.cuda.is_available() and len(cores) > 1 else set(cores)
    with log.open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "hocket", name, *arguments],
            env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", **env},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=lambda: os.sched_setaffinity(0, pinned),
        )


@contextlib.contextmanager
def serving(arguments: Sequence[str], folder: Path) -> Iterator[None]:
    server = command("serve", arguments, core=0, log=folder / "server.log", VLLM_CPU_OMP_THREADS_BIND="nobind")
    try:
        yield
    finally:
        server.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def train(max_staleness: int, run_dir: Path, arguments: Sequence[str]) -> dict[str, float]:
    """Runs one training and returns its figures."""
    settings = [*arguments, f"pipeline.max_staleness={max_staleness}", f"run.dir={run_dir}"]
    log = run_dir.with_suffix(".log")
    status = command("train", settings, core=1, log=log).wait(3600)
    if status != 0:
        sys.exit(f"the trainer ended with status {status}: {log.read_text()[-2000:]}")
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((run_dir / "summary.json").read_text())
    warm = [record for record in records if record["step"] > COLD_STEPS]
    seconds = [record["time/step"] - record.get("time/eval", 0.0) for record in warm]

    def mean(name: str) -> float:
        return statistics.fmean(record[name] for record in warm if record.get(name) is not None)

    return {
        "steps_per_s": len(seconds) / sum(seconds),
        "trainer_waits": sum(record["time/generate"] + record["time/reward"] for record in warm) / sum(seconds),
        "servers_idle": mean("pipeline/wait_for_policy"),
        "staleness": mean("staleness/mean"),
        "ess": mean("train/ess"),
        "queued_groups": mean("pipeline/queued_groups"),
        "balance": mean("time/generate") / (statistics.fmean(seconds) - mean("time/generate")),
        "reward": statistics.fmean(record["reward/mean"] for record in records[-5:]),
        "before": summary["before"],
        "after": summary["after"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="?", default=str(ROOT / "config" / "quickstart.yaml"))
    parser.add_argument("--staleness", type=lambda text: [int(k) for k in text.split(",")], default=[0, 1, 2, 4])
    parser.add_argument("--rounds", type=int, default=1)
    options, overrides = parser.parse_known_args()
    if "=" in options.config:
        overrides.insert(0, options.config)
        options.config = parser.get_default("config")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        port = configs.load(options.config, overrides).server.port
        arguments = [options.config, *DEFAULTS, *overrides, f"sync.root={folder}", f"server.port={port}"]
        figures: dict[int, list[dict[str, float]]] = {k: [] for k in options.staleness}
        with serving([*arguments, f"run.dir={folder}/server"], folder):
            for number in range(options.rounds):
                for k in options.staleness:
                    start = time.monotonic()
                    figures[k].append(train(k, folder / f"k{k}-{number}", arguments))
                    print(f"round {number + 1}, max_staleness {k}: {time.monotonic() - start:.0f} s", flush=True)
    report(figures)


def report(figures: dict[int, list[dict[str, Any]]]) -> None:
    """Prints the medians over rounds; speeds also as ratios to the first column, round by round."""
    first = next(iter(figures))
    print(f"{'':>16}" + "".join(f"{f'k={k}':>10}" for k in figures))
    for name in figures[first][0]:
        print(f"{name:>16}" + "".join(f"{statistics.median(r[name] for r in rows):10.3f}" for rows in figures.values()))
    print(f"{'speed-up':>16}", end="")
    for rows in figures.values():
        ratios = [row["steps_per_s"] / base["steps_per_s"] for row, base in zip(rows, figures[first], strict=True)]
        print(f"{statistics.median(ratios):10.2f}", end="")
    print()


if __name__ == "__main__":
    main()
