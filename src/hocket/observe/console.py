"""Print a run's progress: a line per step and, on a terminal, the current activity below it."""

import math
import re
import reprlib
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

from rich.console import Console as RichConsole
from rich.markup import escape

from hocket.common.files import kind_of, numbered
from hocket.common.redaction import redacted
from hocket.common.shell import open_streams
from hocket.formats import ROLLOUTS, EvalValues
from hocket.observe.metrics import Alarms
from hocket.observe.rows import read_rollouts, read_summary, spoken

SHOWN = {  # metric → what a step's line says of it
    "reward/mean": "reward {:.3f}",
    "eval/greedy": "held-out greedy {:.3f}",
    "eval/sampled": "held-out sampled {:.3f}",
    "rollout/length_mean": "length {:.1f}",
    "train/logprob_gap": "gap {:.1e}",
    "step/tokens_per_s": "{:,.0f} tokens/s",
    "time/step": "{:.2f} s",
}
REPEAT_S = 15.0
QUIET_STEPS = 10  # without an alarm, before it is printed again
NO_UPDATE = ": all rewards of each group were equal (too hard? too easy?), or no gradient was finite; see {}/rollouts"
NUM_SAMPLES = 3
SHORT = reprlib.Repr()
SHORT.maxstring = 600  # of a longer text, beginning and end


class Console(AbstractContextManager["Console"]):
    """Prints what a run of `steps` steps does, for people.

    Example:

        with Console(steps=100) as console:
            console.step(1, {"reward/mean": 0.5, "time/step": 2.0})  # step 1/100  reward 0.500  2.00 s  3:18 left
    """

    def __init__(self, steps: int, *, stderr: bool = False) -> None:
        open_streams()
        self._rich = RichConsole(highlight=False, soft_wrap=True, stderr=stderr)
        self._rich.on_broken_pipe = _broken_pipe  # type: ignore[method-assign]
        self._live = self._rich.is_terminal
        self._status = self._rich.status("")
        self._steps = steps
        self._start = 0.0  # when the first step here began
        self._first = math.inf  # number of that step, once it is finished
        self._activity = ("", 0.0)  # the last one printed, and when
        self.alarmed: set[str] = set()  # metrics outside their healthy range in the last step
        self._alarms = Alarms()
        self._rang: dict[str, int] = {}  # by metric the newest step in which it was

    def __exit__(self, *exc_info: object) -> None:
        self._status.stop()

    def say(self, text: str) -> None:
        self._rich.print(escape(redacted(text)))

    def doing(self, text: str, seconds: float = 0.0) -> None:
        """Show the current activity and its duration; without a terminal repeat it every REPEAT_S seconds."""
        line = f"{text} ({seconds:.0f} s)" if seconds >= 1 else text
        words = re.sub(r"\d+", "", text)  # one that counts seconds is the same
        if self._live:
            self._status.start()
            self._status.update(escape(redacted(line)))
        elif words != self._activity[0] or time.monotonic() - self._activity[1] > REPEAT_S:
            self._activity = words, time.monotonic()
            self.say(line)

    def progress(self, step: int, phase: str) -> None:
        """Show the phase of a step on a terminal; elsewhere only until the first step has a line of its own."""
        if self._live or self._first == math.inf:
            self.doing(f"step {step}/{self._steps}: {phase}{self._time_left(step - 1)}")

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print the line of a finished step and, below it, the metrics that are outside their healthy range."""
        if not metrics:
            return
        if 0 < step < self._first:
            self._start = time.monotonic() - metrics.get("time/step", 0.0)
            self._first = step
        columns = [f"step {step}/{self._steps}"]
        for name, shape in SHOWN.items():
            if name in metrics:
                columns.append(shape.format(metrics[name]))
        self.say("  ".join(columns) + self._time_left(step))
        unhealthy = self._alarms.step(metrics)
        for name, text in unhealthy.items():
            if (
                step > self._rang.get(name, -QUIET_STEPS) + QUIET_STEPS
            ):  # not at each step of one that comes and goes
                self._rich.print(f"[yellow]  ! {escape(text)}[/yellow]")
            self._rang[name] = step
        self.alarmed = set(unhealthy)

    def finish(self, run_dir: Path) -> None:
        """Print a run's result: evaluation, samples, paths, and how many steps lacked an update."""
        end = read_summary(run_dir)
        self.say(
            f"\n{end['steps']} steps in {end['train_seconds']:.0f} s, weight version {end['final_version']}"
        )

        # The held-out evaluation, and some of its greedy answers.
        evaluations = [*numbered(run_dir / ROLLOUTS, "eval_*.jsonl").values()]
        if evaluations:
            for line in _held_out(end["before"], end["after"]):
                self._rich.print(f"[bold]{line}[/bold]")
            greedy = [row for row in read_rollouts(evaluations[-1]) if row["id"].endswith("/0")]
            for row in greedy[:NUM_SAMPLES]:
                reward = row["error"] or f"{row['reward']:g}"
                self.say(
                    f"  {row['prompt']!r} → {spoken(row)!r}  answer {row['answer']!r}  reward {reward}"
                )

        # Where everything is.
        *_, newest = numbered(run_dir / "weights", "v*").values()
        if (run_dir / "report.html").exists():
            self.say(f"report {run_dir / 'report.html'}")
        self.say(f"{kind_of(newest):6} {newest}")
        if best := end.get("best"):
            self.say(
                f"best   {run_dir / best['folder']}: {best['metric']} {best['value']:.3f} in step {best['step']}"
            )
        if end["updated"] < end["steps"]:
            why = "" if end["updated"] else NO_UPDATE.format(run_dir)
            self.say(f"{end['updated']} of {end['steps']} steps updated the weights{why}")

    def _time_left(self, steps_done: int) -> str:
        if not self._first <= steps_done < self._steps:
            return ""
        per_step = (time.monotonic() - self._start) / (steps_done - self._first + 1)
        seconds = per_step * (self._steps - steps_done)
        return f"  {int(seconds // 60)}:{int(seconds % 60):02d} left"


def _broken_pipe() -> None:
    raise  # as everywhere else; rich would exit with status 1


def _held_out(before: EvalValues, after: EvalValues) -> Iterator[str]:
    """Yield "held-out accuracy, greedy  0.000 → 0.980 ± 0.009", the standard error; accuracy only of 0 and 1."""
    shares = {before.get("zero_or_one", 1), after.get("zero_or_one")}
    kind = "accuracy" if shares == {1} else "reward"
    for way in ("greedy", "sampled"):
        if way in after:
            start, end, error = map(
                _rounded, (before.get(way), after[way], after.get(f"{way}_stderr"))
            )
            yield f"held-out {kind}, {way:7} {start} → {end} ± {error}"


def _rounded(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
