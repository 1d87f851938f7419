"""Which settings teach a real model, and which ones break it: one factor at a time from a centre.

Each run is `run.py quickstart` on MODEL, the folder of a small instruction-tuned model: sums of two numbers of two
digits (config/sums.py), 8 prompts x 8 completions of 12 tokens, dr_grpo, a learning rate of 1e-5 after a warm-up of 5
steps that falls as a cosine. A group of another size has as many completions a step. A run is a line of
OUTPUT/runs.jsonl as soon as it ends; the same command continues what was interrupted, and runs nothing twice. The table
is made from the lines. Runs at one time divide the cores, so that `s a step` depends on --jobs.

A run has collapsed at the first step where
  - its held-out greedy accuracy is below its best by more than 2 standard errors of the difference, or
  - its entropy is below 0.02 nats with a reward below 0.9: it is certain, and wrong.

    benchmarks/sweep.py MODEL OUTPUT --only rate,lora
    benchmarks/sweep.py MODEL OUTPUT --table
"""

import contextlib
import json
import math
import os
import shutil
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shared import ROOT, parser

from hocket.observe.rows import read_lines, read_metrics, step_of
from support.processes import Process, free_port

ENTROPY, CERTAIN_REWARD, STANDARD_ERRORS = 0.02, 0.9, 2.0
HELD_OUT = 128
EVALUATIONS = 4  # besides that before training
Settings = dict[str, str]

CENTRE: Settings = {
    "plugins": f"[{ROOT}/config/sums.py]",
    "data.source": "task:sums",
    "eval.reward": "last_number",
    "model.max_length": "128",
    "rollout.prompts_per_step": "8",
    "rollout.group_size": "8",
    "rollout.max_tokens": "12",
    "algorithm.preset": "dr_grpo",
    "trainer.learning_rate": "1e-5",
    "trainer.warmup_steps": "5",
    "trainer.schedule": "cosine",
    "eval.num_prompts": str(HELD_OUT),
    "checkpoint.every_steps": "0",
}
LORA = {"model.lora": "{rank: 16, alpha: 32}"}
WITHOUT_KL = {"algorithm.kl": "off", "algorithm.kl_coef": "0", "algorithm.kl_in": "loss"}
RATE = "trainer.learning_rate"
FACTORS: Mapping[str, Mapping[str, Settings]] = {
    "rate": {rate: {RATE: rate} for rate in ("1e-5", "2e-5", "5e-5", "5e-6", "2e-6", "1e-4")},
    "lora": {f"lora {rate}": LORA | {RATE: rate} for rate in ("1e-4", "2e-4", "5e-5", "5e-4", "2e-5")},
    "group": {
        "group 16": {"rollout.prompts_per_step": "4", "rollout.group_size": "16"},
        "group 4": {"rollout.prompts_per_step": "16", "rollout.group_size": "4"},
    },
    "kl": {"kl 0.01": {"algorithm.kl": "k3", "algorithm.kl_coef": "0.01"}},
    "preset": {
        "grpo": {"algorithm.preset": "grpo"},
        # Its penalty of length begins at 10 of 12 tokens, which most right answers have.
        "dapo": {"algorithm.preset": "dapo", "algorithm.overlong_share": "0"},
        "reinforce_pp": {"algorithm.preset": "reinforce_pp"} | WITHOUT_KL,
    },
    "temperature": {
        "temperature 0.7": {"rollout.temperature": "0.7"},
        "temperature 1.3": {"rollout.temperature": "1.3"},
    },
    "schedule": {
        "constant": {"trainer.schedule": "constant"},
        "no warm-up": {"trainer.warmup_steps": "0"},
    },
}
CURVE = {  # in a line of the results: a metric
    "reward": "reward/mean",
    "entropy": "train/entropy",
    "duplicates": "rollout/duplicates",
    "gap": "train/logprob_gap",
    "gradient": "train/grad_norm",
    "greedy": "eval/greedy",
    "greedy_stderr": "eval/greedy_stderr",
    "sampled": "eval/sampled",
}
HEAD = (
    "| run | seeds | greedy before | greedy after | sampled after | entropy first, last | signal | collapsed at step "
    "| s a step |"
)


class Run:
    """A name of the grid with a seed: its settings and its process."""

    def __init__(self, name: str, seed: int, settings: Settings, folder: Path) -> None:
        self.name = name
        self.seed = seed
        self.settings = settings
        self.folder = folder / f"{name.replace(' ', '_').replace(',', '')}-{seed}"
        self.begun = time.monotonic()
        self.process: Process | None = None
        self.cores: set[int] = set()

    def start(self, stack: contextlib.ExitStack, cores: set[int]) -> None:
        """Start its process on `cores`; it ends with `stack`."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        self.begun = time.monotonic()
        own = {"run.dir": str(self.folder / "run"), "server.port": str(free_port()), "trainer.seed": str(self.seed)}
        words = [f"{key}={value}" for key, value in (self.settings | own).items()]
        self.cores = cores
        every = os.sched_getaffinity(0)
        os.sched_setaffinity(0, cores)  # which its processes inherit, and take as their number of threads
        self.process = stack.enter_context(Process(["quickstart", *words], self.folder / "log"))
        os.sched_setaffinity(0, every)

    def ended(self) -> bool:
        assert self.process is not None
        return self.process.popen.poll() is not None

    def line(self) -> dict[str, Any]:
        """Return its line of the results; removes its weights."""
        assert self.process is not None
        status = self.process.popen.poll()
        line: dict[str, Any] = {"name": self.name, "seed": self.seed, "settings": self.settings}
        line["seconds"] = round(time.monotonic() - self.begun, 1)
        if status:
            return line | {"failed": self.process.output()[-400:]}
        shutil.rmtree(self.folder / "run" / "weights", ignore_errors=True)
        curve = [point(row) for row in read_metrics(self.folder / "run")]
        return line | {"collapsed": collapsed(curve), "curve": curve}


def point(row: dict[str, Any]) -> dict[str, Any]:
    """Choose what a line of the results has of a step."""
    chosen: dict[str, Any] = {"step": step_of(row)}
    for name, metric in CURVE.items():
        if (value := row.get(metric)) is not None:
            chosen[name] = round(value, 6)
    if (silent := row.get("rollout/zero_variance")) is not None:
        chosen["signal"] = 1 - silent
    if "time/step" in row:
        chosen["seconds"] = round(row["time/step"] - row.get("time/eval", 0.0), 3)
    return chosen


def collapsed(curve: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Find the first step where a run has collapsed, and by which curve. None: it has not."""
    best, best_error = -math.inf, 0.0
    for row in curve:
        if row.get("entropy", math.inf) < ENTROPY and row["reward"] < CERTAIN_REWARD:
            return {"step": row["step"], "by": "entropy"}
        greedy = row.get("greedy")
        if greedy is None:
            continue
        error = row["greedy_stderr"]
        if best - greedy > STANDARD_ERRORS * math.hypot(error, best_error):
            return {"step": row["step"], "by": "greedy"}
        if greedy > best:
            best, best_error = greedy, error
    return None


def mean_and_error(values: Sequence[float]) -> str:
    """Write a mean over seeds, with its standard error where there are several."""
    mean = sum(values) / len(values)
    if len(values) == 1:
        return f"{mean:.3f}"
    variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return f"{mean:.3f} ± {math.sqrt(variance / len(values)):.3f}"


def table(lines: Sequence[Mapping[str, Any]]) -> str:
    """Write the lines of all runs as a Markdown table, with a row for each name."""
    by_name: dict[str, list[Mapping[str, Any]]] = {}
    for line in lines:
        by_name.setdefault(line["name"], []).append(line)
    rows = [HEAD, "|---|--:|--:|--:|--:|--:|--:|---|--:|"]
    rows += [row_of(name, by_name[name]) for name in by_name]
    return "\n".join(rows)


def row_of(name: str, lines: Sequence[Mapping[str, Any]]) -> str:
    curves = [line["curve"] for line in lines if "curve" in line]
    if not curves:
        return f"| {name} | {len(lines)} | failed |||||||"
    before = mean_and_error([curve[0]["greedy"] for curve in curves])
    after = [curve[-1] for curve in curves]
    updates = [[row for row in curve if "entropy" in row] for curve in curves]
    entropy = [sum(rows[at]["entropy"] for rows in updates) / len(updates) for at in (0, -1)]
    steps = [row for curve in curves for row in curve if "signal" in row]
    signal_share = sum(row["signal"] for row in steps) / len(steps)
    seconds = sorted(row["seconds"] for row in steps)
    falls = [f"{line['collapsed']['step']} ({line['collapsed']['by']})" for line in lines if line.get("collapsed")]
    cells = (
        name,
        str(len(curves)),
        before,
        mean_and_error([row["greedy"] for row in after]),
        mean_and_error([row["sampled"] for row in after]),
        f"{entropy[0]:.2f}, {entropy[1]:.2f}",
        f"{signal_share:.2f}",
        ", ".join(falls) or "-",
        f"{seconds[len(seconds) // 2]:.1f}",
    )
    return f"| {' | '.join(cells)} |"


def grid(
    only: Sequence[str], seeds: Sequence[int], model: Path, output: Path, steps: int, reward: str = "last_number"
) -> list[Run]:
    """List the runs in the order in which they are made: all of the first seed come first."""
    runs = []
    shared = {"model.path": str(model), "trainer.steps": str(steps), "rewards.functions": f"{{{reward}: 1}}"}
    shared["eval.every_steps"] = str(max(1, steps // EVALUATIONS))
    for seed in seeds:
        for factor in only or FACTORS:
            for name, changes in FACTORS[factor].items():
                runs.append(Run(name, seed, CENTRE | shared | changes, output))
    return runs


def results(output: Path) -> list[dict[str, Any]]:
    file = output / "runs.jsonl"
    return list(read_lines(file)) if file.exists() else []


def shares(jobs: int) -> list[set[int]]:
    """Divide the cores: threads of two runs that want the same one wait for each other in busy loops."""
    cores = sorted(os.sched_getaffinity(0))
    if jobs > len(cores):
        sys.exit(f"--jobs={jobs} has more runs than this machine has cores, {len(cores)}: lower it")
    return [set(cores[number::jobs]) for number in range(jobs)]


def play(runs: Sequence[Run], output: Path, jobs: int) -> None:
    """Run what has no line yet, at most `jobs` at a time, and write the line of each that ends."""
    done = {(line["name"], line["seed"]) for line in results(output) if "failed" not in line}
    waiting = [run for run in runs if (run.name, run.seed) not in done]
    active: list[Run] = []
    free = shares(jobs)
    with contextlib.ExitStack() as stack:
        while waiting or active:
            while waiting and len(active) < jobs:
                run = waiting.pop(0)
                print(f"{run.name}, seed {run.seed}: begun, {len(waiting)} wait", flush=True)
                run.start(stack, free.pop())
                active.append(run)
            time.sleep(0.5)
            for run in [run for run in active if run.ended()]:
                active.remove(run)
                free.append(run.cores)
                line = run.line()
                with (output / "runs.jsonl").open("a") as file:
                    file.write(json.dumps(line) + "\n")
                print(f"{run.name}, seed {run.seed}: {row_of(run.name, [line])}", flush=True)


def main(options: Any) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends the runs, too
    only = [factor for factor in options.only.split(",") if factor]
    if unknown := set(only) - FACTORS.keys():
        sys.exit(f"--only has no {', '.join(sorted(unknown))}: choose of {', '.join(FACTORS)}")
    if not options.table:
        options.output.mkdir(parents=True, exist_ok=True)
        output = options.output.resolve()
        runs = grid(only, options.seeds, options.model.resolve(), output, options.steps, options.reward)
        play(runs, output, options.jobs)
    print(table([line for line in results(options.output) if "failed" not in line]))


if __name__ == "__main__":
    arguments = parser(
        __doc__,
        only=("", f"of {', '.join(FACTORS)}; default: all"),
        seeds=([0], "seeds of each run"),
        steps=(24, "steps of each run"),
        jobs=(1, "runs at a time"),
        reward=("last_number", "reward that is trained; random: a control that teaches nothing"),
        table=(False, "print the table of the runs so far, and run nothing"),
    )
    arguments.add_argument("model", type=Path, help="its folder")
    arguments.add_argument("output", type=Path, help="folder of runs.jsonl and of the runs' logs")
    main(arguments.parse_args())
