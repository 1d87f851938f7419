"""Training in step against training while rollouts run ahead: steps per second, waits, and accuracy at equal samples.

One real server serves all runs, one real trainer after the other trains the small policy that ships in checkpoints/. On
a machine without a GPU each gets a core of its own, so that in step one of them is always idle: twice as many steps per
second is then the most that overlap can give, where generating takes as long as training. The defaults are chosen so;
"balance" says how well that held (generating / everything else, in step). Warm steps are counted: not the first four,
in which the pipeline fills, and no time of evaluations. Prints a column for each max_staleness, of medians over rounds:
shares of the time where there is no unit, and the ratio of its steps per second to those of the first.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shared import QUICKSTART, parser, serving

from hocket.common.environment import has_cuda
from hocket.config import read_settings
from hocket.observe.rows import read_metrics, read_summary
from support.processes import Process, free_port

COLD_STEPS = 4
CORES = sorted(os.sched_getaffinity(0))
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


def pin(core: int) -> None:
    """Gives what is started from now on one core of its own, where there is no GPU."""
    if not has_cuda() and len(CORES) > 1:
        os.sched_setaffinity(0, {CORES[core]})


def train(max_staleness: int, run_dir: Path, arguments: Sequence[str]) -> dict[str, float]:
    """Runs one training and returns its figures."""
    settings = [*arguments, f"pipeline.max_staleness={max_staleness}", f"run.dir={run_dir}"]
    with Process(["train", *settings], run_dir.with_suffix(".log"), OMP_NUM_THREADS="1") as trainer:
        if status := trainer.popen.wait(3600):
            sys.exit(f"the trainer ended with status {status}: {trainer.output()[-2000:]}")
    summary = read_summary(run_dir)
    records: list[dict[str, Any]] = [*read_metrics(run_dir)]
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
        "before": summary["before"]["sampled"],
        "after": summary["after"]["sampled"],
    }


def main(options: argparse.Namespace) -> None:
    _, given = read_settings(options.settings, default=QUICKSTART)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        arguments = [*DEFAULTS, f"server.port={free_port()}", *given, f"sync.root={folder}"]
        figures: dict[int, list[dict[str, float]]] = {k: [] for k in options.staleness}
        threads = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        pin(0)
        with serving([*arguments, f"run.dir={folder}/server"], folder / "server.log", **threads):
            pin(1)
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
    OPTIONS = parser(
        __doc__,
        "config.yaml and section.key=value; the quickstart's by default",
        staleness=([0, 1, 2, 4], "values of pipeline.max_staleness, the first of which the others are held against"),
        rounds=(1, "runs with each of them"),
    ).parse_args()
    main(OPTIONS)
