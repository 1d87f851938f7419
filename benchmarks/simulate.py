"""SIMULATION of runs: throughput, waits and staleness for other settings, more servers, more GPUs. Nothing is measured.

    .venv/bin/python benchmarks/simulate.py calibrate RUN [RUN ...] > calibration.json  # what runs of yours measured
    # predicted beside measured, other runs
    .venv/bin/python benchmarks/simulate.py check calibration.json RUN [RUN ...]
    .venv/bin/python benchmarks/simulate.py predict calibration.json max_staleness=1 prompts=32
    # the best split of each
    .venv/bin/python benchmarks/simulate.py predict --gpus 8,64,512 [calibration.json] [key=value ...]
    .venv/bin/python benchmarks/simulate.py inputs  # every key, its default and its source

Without a calibration the speeds are public figures of H100s and a 7B model. Calibrate on runs of two or more batch
sizes with pipeline.max_staleness=0: one size can't tell fixed seconds from seconds per rollout, and times that overlap
tell neither. simulated_run.py has the model, simulated_inputs.py its inputs,
docs/explanation/scaling.md the errors of predictions.
check and predict need simpy, of requirements/dev.txt. They print steps per hour, seconds of a step, shares of it that
each side works and waits, and staleness: a column per run.
"""

import dataclasses
import difflib
import heapq
import json
import math
import random
import re
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import yaml
from shared import numbers, parser
from simulated_inputs import COLD_STEPS, Hardware, Lengths, Setup, Speeds, log_normal, public_speeds

from hocket.errors import DataError
from hocket.formats import MetricsRow
from hocket.observe.rows import read_metrics, scan_rollouts, step_of

MARK = "SIMULATION, not a measurement"
MAX_GROUPS = 512  # of lengths, in a calibration
Result = dict[str, float]
SHOWN = (
    ("steps_per_h", "{:,.1f}", "steps per hour"),
    ("step_s", "{:,.2f}", "seconds per step"),
    ("tokens_per_s", "{:,.0f}", "sampled tokens/s"),
    ("wait_for_batch", "{:.0%}", "of the step: trainer waits for rollouts"),
    ("host", "{:.0%}", "of the step: rank 0 prepares the batch"),
    ("train", "{:.0%}", "of the step: update"),
    ("sync", "{:.0%}", "of the step: weights"),
    ("wait_for_policy", "{:.0%}", "of the time: no rollout under way"),
    ("trainer_idle", "{:.0%}", "bubble: GPUs of the trainer idle"),
    ("servers_idle", "{:.0%}", "bubble: GPUs of the servers idle"),
    ("rank0_busy", "{:.0%}", "of the time: rank 0's event loop is busy"),
    ("staleness_mean", "{:.2f}", "staleness, mean"),
    ("staleness_max", "{:.0f}", "staleness, largest"),
)


class Step(NamedTuple):
    """One warm step of a measured run."""

    setup: Setup
    row: MetricsRow
    lengths: Lengths
    prompt_tokens: float  # of all its rollouts

    @property
    def seconds(self) -> float:
        """Seconds without evaluation and checkpoint, which are not simulated."""
        return self.get("time/step") - self.get("time/eval") - self.get("time/checkpoint")

    def get(self, name: str) -> float:
        return self.row.get(name) or 0.0  # null where it was not finite


def read_run(folder: Path, ranks: int | None = None) -> list[Step]:
    """Return the warm steps of a run folder. `ranks`: where torchrun has started several."""
    try:
        config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
        rows = read_metrics(folder)
    except (OSError, ValueError, DataError) as error:
        sys.exit(f"{folder} can't be read as a run folder: {error}. Name the run.dir of a finished run")
    warm = [row for row in rows if step_of(row) > COLD_STEPS and "rollout/tokens" in row]
    if len(warm) < 2:
        sys.exit(f"{folder} has {len(warm)} warm steps (after step {COLD_STEPS}): a run of 20 or more tells something")
    rollout, most = config["rollout"], config["trainer"]["micro_batch_tokens"]
    setup = Setup(
        servers=max(1, round(max(row.get("sync/servers") or 1 for row in warm))),
        ranks=ranks or config["launch"].get("trainers") or 1,
        gpus_per_server=config["server"]["tensor_parallel_size"],
        prompts=rollout["prompts_per_step"],
        group_size=rollout["group_size"],
        max_tokens=rollout["max_tokens"],
        max_staleness=config["pipeline"]["max_staleness"],
        max_concurrent=config["server"]["engine"].get("max_num_seqs", Setup.max_concurrent),
        micro_batch_tokens=8192 if most == "auto" else most,
        steps=max(map(step_of, warm)),
    )
    steps = []
    for row in warm:
        path = folder / "rollouts" / f"step_{step_of(row):06d}.jsonl"
        progress(f"reading {path}")
        groups, prompt_tokens = dict[str, list[int]](), 0
        for played in scan_rollouts(path, tokens=True):
            groups.setdefault(played["group_id"], []).append(played["num_tokens"])
            prompt_tokens += len(played["mask"]) - played["num_tokens"]
        steps.append(Step(setup, row, list(groups.values()), prompt_tokens))
    return steps


def measured(steps: Sequence[Step]) -> Result:
    """Return what a run measured, under the names of a simulation's result."""
    step_s = statistics.fmean(step.seconds for step in steps)

    def mean(*names: str) -> float:
        return math.fsum(step.get(name) for step in steps for name in names) / len(steps)

    return {
        "steps_per_h": 3600 / step_s,
        "step_s": step_s,
        "tokens_per_s": mean("rollout/tokens") / step_s,
        "wait_for_batch": mean("time/generate", "time/reward") / step_s,
        "train": mean("time/train", "time/measure") / step_s,
        "sync": mean("time/sync") / step_s,
        "wait_for_policy": mean("pipeline/wait_for_policy"),
        "staleness_mean": mean("staleness/mean"),
        "staleness_max": max(step.get("staleness/max") for step in steps),
    }


def of_policy(steps: Sequence[Step]) -> Result:
    """Return the speeds that policy and data decide, not the machine."""
    rollouts = sum(len(group) for step in steps for group in step.lengths)
    return {
        "prompt_tokens": sum(step.prompt_tokens for step in steps) / rollouts,
        "trained_share": sum(step.get("train/sequences") for step in steps) / rollouts,
    }


def decode_work(step: Step) -> tuple[float, float, float]:
    """Return (iterations, sampled tokens, sequences) of the server with the most to do, groups divided evenly."""
    found = []
    for index in range(step.setup.servers):
        mine = [length for group in step.lengths[index :: step.setup.servers] for length in group]
        ends = [0] * min(step.setup.max_concurrent, max(1, len(mine)))  # iteration in which each place is free
        for length in mine:
            heapq.heapreplace(ends, ends[0] + length)
        found.append((float(max(ends)), float(sum(mine)), float(len(mine))))
    return max(found, key=lambda work: work[1])


def fit(columns: Sequence[Sequence[float]], seconds: Sequence[float]) -> tuple[list[float], float]:
    """Return non-negative factors with Σ factor·column ≈ seconds, and the mean relative error.

    Columns that the data does not tell apart share the seconds between them.
    """
    x, y = numpy.array(columns, dtype=float), numpy.array(seconds, dtype=float)
    scale = numpy.maximum(x.mean(axis=0), 1e-12)
    left = list(range(x.shape[1]))
    while (found := numpy.linalg.lstsq(x[:, left] / scale[left], y, rcond=0.01)[0]).min() < 0:
        left.pop(int(found.argmin()))
    factors = numpy.zeros(x.shape[1])
    factors[left] = found / scale[left]
    return [float(factor) for factor in factors], float(numpy.abs(x @ factors / y - 1).mean())


def calibrate(runs: Mapping[str, Sequence[Step]], speeds: Speeds) -> dict[str, Any]:
    """Return a calibration: speeds as the runs measured them, lengths, and what they can't tell."""
    steps = [step for run in runs.values() for step in run if step.setup.max_staleness == 0]
    if not steps:
        sys.exit("calibrate on a run with pipeline.max_staleness=0: where work overlaps, no time is that of one part")
    trained = [step for step in steps if step.get("train/tokens")]
    decode, decode_error = fit([(1.0, *decode_work(step)) for step in steps], [s.get("time/batch") for s in steps])
    update, update_error = fit(
        [
            (1.0, s.get("train/micro_batches"), s.get("train/positions_per_s") * s.get("time/train") / s.setup.ranks)
            for s in trained
        ],
        [step.get("time/train") + step.get("time/measure") for step in trained],
    )
    phases = [f"time/{name}" for name in ("generate", "reward", "turn", "measure", "train", "sync")]
    host, _ = fit(
        [(1.0, step.get("rollout/tokens") + step.prompt_tokens) for step in steps],
        [max(1e-9, step.seconds - sum(map(step.get, phases))) for step in steps],
    )
    public, sent_bytes = Hardware(), 2**20 * statistics.median(step.get("sync/mebibytes") for step in trained)
    transfer_s = statistics.median(step.get("sync/transfer_s") for step in trained)
    prepare_s = statistics.median(step.get("time/sync") for step in trained) - transfer_s
    per_server_s = sent_bytes / public.nic_bytes_s  # not measured
    found: dict[str, Any] = {
        **dict(zip(("batch_s", "decode_fixed_s", "decode_token_s", "admit_s"), decode, strict=True)),
        **dict(zip(("train_fixed_s", "micro_batch_s", "position_s"), update, strict=True)),
        **dict(zip(("step_s", "step_token_s"), host, strict=True)),
        **of_policy(steps),
        "prepare_s": prepare_s,
        "transfer_s": max(0.0, transfer_s - per_server_s * steps[0].setup.servers),
        "reward_s": statistics.median(step.get("time/reward") for step in steps),
        "reward_workers": 0,  # the wait for all of them was measured
        "rollout_s": 0.0,  # part of what was measured as decoding
        "rollout_token_s": 0.0,
    }
    sizes = {(step.setup.prompts * step.setup.group_size) for step in steps}
    notes = [f"decoding fitted to {decode_error:.0%}, updates to {update_error:.0%} (mean error of a step)"]
    if len(sizes) == 1:
        notes.append("ONE BATCH SIZE ONLY: fixed seconds and seconds per rollout are guessed apart")
    groups = [list(group) for step in steps for group in step.lengths]
    mtbf_s = public.gpu_mtbf_h * 3600 / steps[0].setup.gpus_per_server
    return {
        "what": "calibration of a simulation",
        "runs": list(runs),
        "notes": notes,
        "not_measured": [field.name for field in dataclasses.fields(Speeds) if field.name not in found],
        "setup": dataclasses.asdict(steps[0].setup),
        "speeds": dataclasses.asdict(dataclasses.replace(speeds, **found, per_server_s=per_server_s, mtbf_s=mtbf_s)),
        "measured": {name: measured(run) for name, run in runs.items()},
        "lengths": random.Random(0).sample(groups, min(MAX_GROUPS, len(groups))),
    }


def best_split(gpus: int, setup: Setup, simulate: Callable[[Setup], Result]) -> tuple[Setup, Result]:
    """Return the split of GPUs into servers and ranks with the most steps per hour, and its result.

    Coarse shares first, then finer ones around the best: there is one peak, where both sides are as fast. From 32 GPUs
    on, whole nodes of 8.
    """
    unit = 8 if gpus >= 32 and gpus % 8 == 0 else setup.gpus_per_server
    tried: dict[int, tuple[Setup, Result]] = {}
    best, shares = setup, [0.2, 0.35, 0.5, 0.65, 0.8]
    for width in (0.08, 0.04, 0.02, 0.0):
        for share in shares:
            servers = min(gpus - unit, max(unit, round(gpus * share / unit) * unit)) // setup.gpus_per_server
            ranks = gpus - servers * setup.gpus_per_server
            if servers > 0 and ranks > 0 and servers not in tried:
                split = dataclasses.replace(setup, servers=servers, ranks=ranks)
                tried[servers] = split, simulate(split)
        if not tried:
            sys.exit(f"{gpus} GPUs are too few for a server of {setup.gpus_per_server} and a rank: give one more")
        best = max(tried.values(), key=lambda one: one[1]["steps_per_h"])[0]
        centre = best.servers * best.gpus_per_server / gpus
        shares = [centre - width, centre + width]
    return tried[best.servers]


_started, _told = time.monotonic(), 0.0


def progress(text: str) -> None:
    """Say on stderr what is being done, from the third second on, about once a second."""
    global _told
    now = time.monotonic()
    if now - _started > 2 and now - _told > 1:
        _told = now
        print(f"  {now - _started:4.0f} s  {text}", file=sys.stderr, flush=True)


def changed(sections: Sequence[Any], overrides: Mapping[str, str]) -> list[Any]:
    """Return the dataclasses with the overrides applied; an unknown key ends the program with the nearest known one."""
    kinds: dict[str, Any] = {field.name: type(field.default) for one in sections for field in dataclasses.fields(one)}
    for key, value in overrides.items():
        if key not in kinds:
            near = difflib.get_close_matches(key, kinds, 1)
            sys.exit(f"no input is called {key!r}" + (f"; did you mean {near[0]}?" if near else "; see `inputs`"))
        if not re.fullmatch(r"[-+.\de]+", value):
            sys.exit(f"{key}={value}: not a number")
    values = {key: kinds[key](float(value)) for key, value in overrides.items()}
    fields = [[field.name for field in dataclasses.fields(one)] for one in sections]
    return [
        dataclasses.replace(one, **{name: values[name] for name in names if name in values})
        for one, names in zip(sections, fields, strict=True)
    ]


class Inputs:
    """What a prediction starts from: a calibration or public figures, and what the command line changes."""

    def __init__(self, calibration: str | None, overrides: Mapping[str, str]) -> None:
        self.hardware: Hardware | None = None
        self.chosen = overrides
        if calibration is None:
            self.setup, self.speeds, self.hardware = changed([Setup(), Speeds(), Hardware()], overrides)
            self.lengths, self.what = log_normal(self.hardware, self.setup), "not calibrated: public figures of GPUs"
            return
        try:
            saved = json.loads(Path(calibration).read_text(encoding="utf-8"))
            setup, speeds, self.lengths = Setup(**saved["setup"]), Speeds(**saved["speeds"]), saved["lengths"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            sys.exit(f"{calibration} is no calibration ({error!r}): make one with `calibrate RUN > {calibration}`")
        self.setup, self.speeds = changed([setup, speeds], overrides)
        self.what = f"calibrated on {', '.join(saved['runs'])}; {'; '.join(saved['notes'])}"

    def simulate(self, setup: Setup, lengths: Lengths | None = None, **speeds: float) -> Result:
        """Return the result of a run with this setup."""
        from simulated_run import Simulation  # needs simpy

        used, lengths = dataclasses.replace(self.speeds, **speeds), lengths or self.lengths
        if self.hardware is not None:
            used = public_speeds(self.hardware, setup, lengths, used, self.chosen)
        simulation, name = Simulation(setup, used, lengths), f"{setup.servers:,} servers, {setup.ranks:,} ranks"
        result = simulation.run(lambda text: progress(f"simulating {name}: {text}"))
        gpus = setup.servers * setup.gpus_per_server + setup.ranks
        failures_per_h = 3600 * gpus / (used.mtbf_s * setup.gpus_per_server) if used.mtbf_s else 0.0
        return result | {"start_s": simulation.bring_up_s(setup.servers), "failures_per_h": failures_per_h}


def predict(inputs: Inputs, numbers: Sequence[int], rollouts_per_gpu: float | None) -> dict[str, Any]:
    """Return predictions for the setup, or for the best split of each number of GPUs."""
    results = {}
    for gpus in numbers:
        setup = inputs.setup
        if rollouts_per_gpu:
            setup = dataclasses.replace(setup, prompts=max(1, round(rollouts_per_gpu * gpus / setup.group_size)))
        split, result = best_split(gpus, setup, inputs.simulate)
        results[f"{gpus:,} GPUs"] = {"setup": dataclasses.asdict(split), **result}
    if not numbers:
        results["run"] = {"setup": dataclasses.asdict(inputs.setup), **inputs.simulate(inputs.setup)}
    return {"what": f"{MARK}; {inputs.what}", "results": results}


def check(inputs: Inputs, runs: Mapping[str, Sequence[Step]]) -> dict[str, Any]:
    """Return what is predicted and what was measured for runs; lengths and signal are the run's own."""
    results = {}
    for name, steps in runs.items():
        lengths = [group for step in steps for group in step.lengths]
        predicted, found = inputs.simulate(steps[0].setup, lengths, **of_policy(steps)), measured(steps)
        error = predicted["steps_per_h"] / found["steps_per_h"] - 1
        results[name] = {"predicted": predicted, "measured": found, "error": error}
    return {"what": f"{MARK}, beside what was measured; {inputs.what}", "results": results}


def table(found: Mapping[str, Any]) -> str:
    """Format predictions, or predictions beside measurements, a column each."""
    columns, ends = list[tuple[str, Mapping[str, float]]](), []
    for name, result in found["results"].items():
        if "measured" in result:
            columns += [(name, result["predicted"]), ("measured", result["measured"])]
            ends.append(f"{name}: steps per hour predicted {result['error']:+.0%}")
        else:
            columns.append((name, result))
            setup = Setup(**result["setup"])
            ends.append(
                f"{name}: {setup.servers:,} servers of {setup.gpus_per_server}, {setup.ranks:,} ranks; "
                f"{setup.prompts * setup.group_size:,} rollouts a step; {result['start_s']:,.0f} s until all servers "
                f"hold the first weights; {result['failures_per_h']:.2g} GPU failures per hour"
            )
    width = max(12, *(len(name) + 2 for name, _ in columns))
    lines = [found["what"], "", "".join(f"{name:>{width}}" for name, _ in columns)]
    for name, form, meaning in SHOWN:
        cells = [form.format(figures[name]) if name in figures else "" for _, figures in columns]
        lines.append("".join(f"{cell:>{width}}" for cell in cells) + f"  {meaning}")
    return "\n".join([*lines, "", *ends])


def inputs_table() -> str:
    """Return every input with its default and its source, as Markdown."""
    rows = ["| key | default | what | source |", "|---|--:|---|---|"]
    for section in (Setup, Speeds, Hardware):
        for field in dataclasses.fields(section):
            known = field.metadata
            rows.append(f"| `{field.name}` | {field.default:g} | {known['meaning']} | {known['source']} |")
    return "\n".join(rows)


def main() -> None:
    made = parser(__doc__, json=(False, "all figures as JSON"))
    made.add_argument(
        "command", metavar="command", choices=("calibrate", "check", "predict", "inputs"), help="as above"
    )
    made.add_argument("arguments", nargs="*", default=[], help="RUN, calibration.json or key=value, as above")
    made.add_argument("--gpus", type=numbers, default=[], metavar="N,N", help="predict: numbers of GPUs, 8,64,512")
    made.add_argument("--rollouts-per-gpu", type=float, help="with --gpus: a batch that grows; default: fixed")
    made.add_argument("--ranks", type=int, help="trainer processes of the runs, where torchrun has started several")
    made.add_argument(
        "--cores",
        nargs=3,
        type=float,
        metavar=("ALL", "SERVER", "TRAINER"),
        default=(0.0, 1.0, 1.0),
        help="calibrate, no GPUs: cores of the machine, and how many a busy server and a training trainer use (top)",
    )
    options = made.parse_intermixed_args()
    if options.command == "inputs":
        print(f"Inputs of a simulation; `key=value` changes one.\n\n{inputs_table()}")
        return
    overrides = dict(text.split("=", 1) for text in options.arguments if "=" in text)
    paths = [Path(text) for text in options.arguments if "=" not in text]
    calibration = None if options.command == "calibrate" or not paths else str(paths.pop(0))
    runs = {path.name: read_run(path, options.ranks) for path in paths}
    if options.command != "predict" and not runs:
        made.error(f"{options.command} needs run folders")
    if options.command == "calibrate":
        cores = dict(zip(("cores", "server_cores", "trainer_cores"), options.cores, strict=True))
        print(json.dumps(calibrate(runs, Speeds(**cores))))
        return
    inputs = Inputs(calibration, overrides)
    predicts = options.command == "predict"
    found = predict(inputs, options.gpus, options.rollouts_per_gpu) if predicts else check(inputs, runs)
    print(json.dumps(found) if options.json else table(found))


if __name__ == "__main__":
    main()
