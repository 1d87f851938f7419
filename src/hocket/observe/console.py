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
REPEAT_S = 15.0  # seconds after which an activity that goes on is printed again
QUIET_STEPS = 10  # steps without an alarm after which it is printed again
NO_UPDATE = ": all rewards of each group were equal (too hard? too easy?), or no gradient was finite; see {}/rollouts"
NUM_SAMPLES = 3  # held-out answers that are printed at the end
SHORT = reprlib.Repr()  # quotes the beginning and the end of a text
SHORT.maxstring = 600


class Console(AbstractContextManager["Console"]):
    """Prints what a run of `steps` steps does, for people.

    Example:

        with Console(steps=100) as console:
            console.step(1, {"reward/mean": 0.5, "time/step": 2.0})  # step 1/100  reward 0.500  2.00 s  3:18 left
    """

    def __init__(self, steps: int, *, stderr: bool = False) -> None:
        open_streams()
        self._rich = RichConsole(highlight=False, soft_wrap=True, stderr=stderr)
        self._rich.on_broken_pipe = _raise_again  # type: ignore[method-assign]
        self._is_terminal = self._rich.is_terminal
        self._status = self._rich.status("")  # the line below all others on a terminal
        self._steps = steps
        # The first step of this process: its number once it is finished, and when it began.
        self._first = math.inf
        self._start = 0.0
        self._last_activity = ("", 0.0)  # its text, and when it was printed
        self._alarms = Alarms()
        self._last_alarms: dict[str, int] = {}  # metric → the last step in which it was unhealthy
        self.alarmed: set[str] = set()  # unhealthy metrics of the last step

    def __exit__(self, *exc_info: object) -> None:
        self._status.stop()

    def say(self, text: str) -> None:
        """Print a text without secrets."""
        self._rich.print(escape(redacted(text)))

    def doing(self, text: str, seconds: float = 0.0) -> None:
        """Show the current activity and its duration; without a terminal, print it now and then."""
        line = f"{text} ({seconds:.0f} s)" if seconds >= 1 else text
        if self._is_terminal:
            self._status.start()
            self._status.update(escape(redacted(line)))
            return
        activity = re.sub(r"\d+", "", text)  # a text that counts seconds is one activity
        last_activity, printed = self._last_activity
        if activity != last_activity or time.monotonic() - printed > REPEAT_S:
            self._last_activity = activity, time.monotonic()
            self.say(line)

    def progress(self, step: int, phase: str) -> None:
        """Show the phase of a step; without a terminal only until the first step has its line."""
        if self._is_terminal or self._first == math.inf:
            self.doing(f"step {step}/{self._steps}: {phase}{self._time_left(step - 1)}")

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print the line of a finished step and, below it, its alarms."""
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
        for name, sentence in unhealthy.items():
            # An alarm that stays, or comes and goes, is printed once.
            if step - self._last_alarms.get(name, -math.inf) > QUIET_STEPS:
                self._rich.print(f"[yellow]  ! {escape(sentence)}[/yellow]")
            self._last_alarms[name] = step
        self.alarmed = set(unhealthy)

    def finish(self, run_dir: Path) -> None:
        """Print a run's result: evaluation, samples, paths, and how many steps lacked an update."""
        summary = read_summary(run_dir)
        steps = f"{summary['steps']} steps in {summary['train_seconds']:.0f} s"
        self.say(f"\n{steps}, weight version {summary['final_version']}")

        # The held-out evaluation, and some of its greedy answers.
        evaluations = list(numbered(run_dir / ROLLOUTS, "eval_*.jsonl").values())
        if evaluations:
            for line in _held_out(summary["before"], summary["after"]):
                self._rich.print(f"[bold]{line}[/bold]")
            greedy = [row for row in read_rollouts(evaluations[-1]) if row["id"].endswith("/0")]
            for row in greedy[:NUM_SAMPLES]:
                answer = f"{row['prompt']!r} → {spoken(row)!r}  answer {row['answer']!r}"
                reward = row["error"] or f"{row['reward']:g}"
                self.say(f"  {answer}  reward {reward}")

        # Where everything is.
        if (run_dir / "report.html").exists():
            self.say(f"report {run_dir / 'report.html'}")
        newest = list(numbered(run_dir / "weights", "v*").values())[-1]
        self.say(f"{kind_of(newest):6} {newest}")
        best = summary.get("best")
        if best:
            value = f"{best['metric']} {best['value']:.3f} in step {best['step']}"
            self.say(f"best   {run_dir / best['folder']}: {value}")
        if summary["updated"] < summary["steps"]:
            advice = "" if summary["updated"] else NO_UPDATE.format(run_dir)
            updated = f"{summary['updated']} of {summary['steps']} steps updated the weights"
            self.say(updated + advice)

    def _time_left(self, steps_done: int) -> str:
        """Estimate the rest of the run by the mean of its steps so far; "" before the first."""
        if not self._first <= steps_done < self._steps:
            return ""
        per_step = (time.monotonic() - self._start) / (steps_done - self._first + 1)
        seconds = per_step * (self._steps - steps_done)
        return f"  {int(seconds // 60)}:{int(seconds % 60):02d} left"


def _raise_again() -> None:
    """Raise the BrokenPipeError that is being handled; rich would exit with status 1."""
    raise


def _held_out(before: EvalValues, after: EvalValues) -> Iterator[str]:
    """Yield "held-out accuracy, greedy  0.000 → 0.980 ± 0.009" and the same of samples.

    The last number is the standard error. Rewards that are all 0 or 1 are called an accuracy.
    """
    shares = {before.get("zero_or_one", 1), after.get("zero_or_one")}
    kind = "accuracy" if shares == {1} else "reward"
    for name in ("greedy", "sampled"):
        if name in after:
            change = f"{_rounded(before.get(name))} → {_rounded(after[name])}"
            error = _rounded(after.get(f"{name}_stderr"))
            yield f"held-out {kind}, {name:7} {change} ± {error}"


def _rounded(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
