"""Which lies of a generation server are found, after how many versions, and by what.

    lies     A row per lie: "1 parameters" means that the comparison of parameters stopped the run at the first version
             that was a lie. The second entry is of runs in which that comparison lied, too. Then the largest gap of
             log-probs. `sync.check_every` is 5 in place of 20, to save time.
    clean    what --steps steps of training without a lie raise, all versions checked
    real     --steps honest steps of a real model, --model, with no staleness and with one step of it; then lies of its
             server, each in a third of the steps: the step in which it is found, and by what
    cost     seconds of a check at 0.3 M and 100 M parameters, and its share of a step

Starts the lying server of tests/lies.py with the quickstart's model, and trains on it in this process, run after run.
"""

import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from shared import ROOT, make_model, parser

sys.path.insert(0, str(ROOT))

from tests import lies
from tests.lies import Outcome

from hocket.common import environment
from hocket.extras.checks.sampling import SUSPICIOUS
from hocket.observe.metrics import alarms

DTYPES, KINDS, RATES = ("float32", "bfloat16"), ("full", "lora"), ("2e-4", "1e-6")
SETTINGS = (
    "data.source=task:sort",
    "server.kv_cache_mib=64",
    "server.start_timeout_s=1",
    "rollout.max_tokens=16",
    "eval.num_prompts=0",
    "checkpoint.every_steps=0",
)
SMALL = ("model.path=checkpoints/tiny-sort", "rollout.prompts_per_step=8", "rollout.temperature=0.9")
REAL = (  # sums of two numbers
    f"plugins=[{ROOT}/config/sums.py]",
    "data.source=task:sums",
    "rewards.functions={last_number: 1}",
    "model.max_length=128",
    "rollout.prompts_per_step=4",
    "rollout.group_size=4",
    "rollout.max_tokens=12",
    "trainer.learning_rate=5e-6",
    "eval.num_prompts=0",
    "checkpoint.every_steps=0",
)
REAL_LIES = {"one_behind 5": 5, "colder": 1, "top_p_90": 1}  # with the first version that is a lie
LIES = {  # the first version of a run that is a lie
    "one_behind": 2,
    "never_loads": 2,
    "missing_matrix": 1,
    "frozen_matrix": 2,
    "frozen_matrix 4": 4,
    "frozen_norm 4": 4,
    "swapped_norms": 1,
    "swapped_layers": 1,
    "permuted_rows": 1,
    "stale_export": 2,
    "wrong_logprobs": 1,
    "shifted_logprobs": 1,
    "shifted_logprobs 4": 4,
    "no_temperature": 1,
    "no_temperature 4": 4,
}


def cell(outcome: Outcome, begins: int) -> str:
    return f"{outcome.version - begins + 1} {outcome.by}" if outcome.said else "-"


def play_lies(dtypes: Sequence[str], kinds: Sequence[str], rates: Sequence[str], told: Sequence[str]) -> None:
    """Prints the table of lies."""
    for dtype, kind in itertools.product(dtypes, kinds):
        model = (f"model.dtype={dtype}", *(["model.lora.rank=4"] if kind == "lora" else []))
        with (
            tempfile.TemporaryDirectory() as folder,
            lies.LyingServer(Path(folder) / "server", *SMALL, *SETTINGS, *model) as server,
        ):
            for rate, lie in itertools.product(rates, told):
                name, begins = lie.split(" ")[0], LIES[lie]
                if kind == "lora" and name in lies.WHOLE_MODEL:
                    continue
                settings = [*SMALL, *SETTINGS, *model, f"trainer.learning_rate={rate}"]
                settings += ["trainer.steps=9", "sync.check_every=5"]
                found = [server.train(lie, *settings)]
                if name in lies.OF_WEIGHTS and name != "missing_matrix":
                    found.append(server.train(lie, *settings, exact=False))
                cells = " / ".join(cell(one, begins) for one in found)
                gaps = [step.get("train/logprob_gap") or 0.0 for step in found[-1].metrics]
                print(f"| {lie} | {dtype} {kind} {rate} | {cells} | {max(gaps, default=0.0):.1e} |", flush=True)


def play_clean(dtypes: Sequence[str], num_steps: int) -> None:
    """Prints what steps of an honest server raise."""
    for dtype in dtypes:
        settings = [*SMALL, *SETTINGS, f"model.dtype={dtype}", "rollout.temperature=1.0", "trainer.learning_rate=5e-5"]
        settings += [f"trainer.steps={num_steps}", "sync.check_every=1"]
        settings += ["rollout.prompts_per_step=4", "rollout.group_size=4"]
        with (
            tempfile.TemporaryDirectory() as folder,
            lies.LyingServer(Path(folder) / "server", *settings) as server,
        ):
            outcome = server.train("truth", *settings)
        steps = [step for step in outcome.metrics if "train/loss" in step]
        rang = [name for step in outcome.metrics for name in alarms(_without_null(step)).keys() & SUSPICIOUS]
        print(f"{dtype}: {len(steps)} trained steps, stopped by {outcome.said or 'nothing'}, alarms {sorted(rang)}")
        names = ("train/entropy", "reward/mean", "sync/logprob_gap", "train/logprob_gap", "sync/max_gap")
        for name in (*names, "sync/missing_share", "sync/missing_error"):
            values = [step[name] for step in steps if step.get(name) is not None]
            if values:
                spread = f"{values[0]:.2g} at first, {values[-1]:.2g} at last, {min(values):.2g} to {max(values):.2g}"
                print(f"  {name}: {spread} ({len(values)} steps)", flush=True)


def play_real(model: str, dtypes: Sequence[str], num_steps: int) -> None:
    """Prints what honest steps of a real model raise, and in which step lies of its server are found."""
    for dtype in dtypes:
        settings = [*REAL, f"model.path={model}", f"model.dtype={dtype}", f"trainer.steps={num_steps}"]
        with (
            tempfile.TemporaryDirectory() as folder,
            lies.LyingServer(Path(folder) / "server", *settings) as server,
        ):
            for staleness in (0, 1):
                outcome = server.train("truth", *settings, f"pipeline.max_staleness={staleness}")
                show_real(f"{dtype}, honest, max_staleness {staleness}", outcome, 1)
            for lie, begins in REAL_LIES.items():
                fewer = f"trainer.steps={max(1, num_steps // 3)}"
                show_real(f"{dtype}, {lie}", server.train(lie, *settings, fewer), begins)


def show_real(name: str, outcome: Outcome, begins: int) -> None:
    """Prints the gaps of a run, and what found a lie that begins with this version."""
    steps = [step for step in outcome.metrics if "reward/mean" in step]
    gaps = [step["train/logprob_gap"] for step in steps if step.get("train/logprob_gap") is not None]
    if outcome.said:
        late = outcome.version - begins
        result = f"stopped in step {len(steps) + 1}, {late} versions late, by {outcome.by}"
    else:
        rang: dict[str, int] = {}  # the first step of each alarm
        for step in outcome.metrics:
            for alarm in alarms(_without_null(step)):
                if alarm in SUSPICIOUS or alarm.startswith("sampling/"):
                    rang.setdefault(alarm, int(step["step"]))
        result = f"alarms with their first step: {rang}" if rang else "no alarm of a lie"
    # A step whose groups all have equal rewards trains nothing, and has no gap.
    gap = f"; gap {statistics.mean(gaps):.2g}, at most {max(gaps):.2g}" if gaps else ""
    rewards = [step["reward/mean"] for step in steps[-10:]]
    reward = f"; reward of the last steps {statistics.mean(rewards):.2f}" if rewards else ""
    print(f"{name}: {len(steps)} steps, {len(gaps)} of them trained, {result}{gap}{reward}", flush=True)


def _without_null(step: dict[str, float | None]) -> dict[str, float]:
    return {name: value for name, value in step.items() if value is not None}


def play_cost() -> None:
    """Prints the seconds of a check, and its share of a step with the default schedule, 2 checks in 20 versions."""
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder) / "100M")
        for path, dtype in (("checkpoints/tiny-sort", "float32"), (f"{folder}/100M", "bfloat16")):
            settings = [*SETTINGS, f"model.path={path}", f"model.dtype={dtype}", "rewards.functions={random: 1}"]
            settings += ["trainer.steps=4", "sync.check_every=1"]
            name = Path(path).name
            with lies.LyingServer(Path(folder) / f"server-{name}", *settings) as server:
                steps = server.train("truth", *settings).metrics[1:]
            proof, whole = (statistics.median(s[key] for s in steps) for key in ("sync/proof_s", "time/step"))
            print(
                f"{name} {dtype}: check {proof:.2f} s, step without it {whole - proof:.2f} s; with 2 checks in 20 steps"
            )
            print(f"  {0.1 * proof / (whole - 0.9 * proof):.1%} of the time", flush=True)


if __name__ == "__main__":
    PARSER = parser(
        __doc__, steps=(200, "steps of a run, clean or real"), model=("", "folder of a real model, for `real`")
    )
    PARSER.add_argument(
        "command",
        nargs="?",
        choices=("lies", "clean", "real", "cost"),
        default="lies",
        metavar="command",
        help="as above",
    )
    for option, values in (("dtype", DTYPES), ("kind", KINDS), ("rate", RATES), ("lie", tuple(LIES))):
        PARSER.add_argument(
            f"--{option}", nargs="+", choices=values, default=values, metavar=option.upper(), help="some of them"
        )
    OPTIONS = PARSER.parse_args()
    environment.prepare()
    begin = time.monotonic()
    if OPTIONS.command == "lies":
        play_lies(OPTIONS.dtype, OPTIONS.kind, OPTIONS.rate, OPTIONS.lie)
    elif OPTIONS.command == "clean":
        play_clean(OPTIONS.dtype, OPTIONS.steps)
    elif OPTIONS.command == "real":
        play_real(OPTIONS.model, OPTIONS.dtype, OPTIONS.steps)
    else:
        play_cost()
    print(f"{time.monotonic() - begin:.0f} s")
