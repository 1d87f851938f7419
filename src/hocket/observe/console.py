"""What a person sees while a run goes on: a line per step and, on a terminal, what is happening right now."""

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console as RichConsole
from rich.markup import escape

from hocket.observe.metrics import alarms

if TYPE_CHECKING:
    from rich.status import Status

COLUMNS = (  # heading, metric, width, format
    ("reward", "reward/mean", 7, "{:.3f}"),
    ("held-out", "eval/accuracy", 8, "{:.3f}"),
    ("length", "rollout/length_mean", 7, "{:.1f}"),
    ("cut", "rollout/truncated", 5, "{:.0%}"),
    ("gap", "train/logprob_gap", 8, "{:.1e}"),
    ("clipped", "clipped", 7, "{:.2%}"),
    ("grad", "train/grad_norm", 7, "{:.3f}"),
    ("gen s", "time/generate", 6, "{:.2f}"),
    ("train s", "time/train", 7, "{:.2f}"),
    ("sync s", "time/sync", 6, "{:.2f}"),
    ("tokens/s", "step/tokens_per_s", 8, "{:,.0f}"),
    ("mfu", "train/mfu", 5, "{:.1%}"),
)
CLIPPED = ("clip_low", "clip_high", "importance_capped")
"""What the column "clipped" adds up: tokens at a clip of the ratio or the cap of the importance weight."""
HEADING_EVERY = 25
REPEAT_S = 15.0
NUM_SAMPLES = 3


class Console:
    """Progress of one run.

    Args:
        mode: "live" shows a status line below the steps, "plain" only prints lines, "auto" asks the terminal.
        steps: how many steps the run has, for the time that is left.
        stderr: leave standard output to the result.
    """

    def __init__(self, mode: str, steps: int, *, stderr: bool = False) -> None:
        self._rich = RichConsole(highlight=False, soft_wrap=True, stderr=stderr)
        self._live = mode == "live" or (mode == "auto" and self._rich.is_terminal)
        self._status: Status | None = None
        self._steps = steps
        self._start: float | None = None
        self._before = 0  # steps that were done before the first one here
        self._lines = 0
        self._said = ("", 0.0)
        self._alarmed: set[str] = set()

    def __enter__(self) -> "Console":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop_status()

    def say(self, text: str) -> None:
        """Prints one line."""
        self._rich.print(escape(text))

    def doing(self, text: str, seconds: float = 0.0) -> None:
        """Shows what is going on now, and for how long already.

        Without a terminal a new activity is a line, the same one at most every REPEAT_S seconds.
        """
        line = f"{text} ({seconds:.0f} s)" if seconds >= 1 else text
        if self._live:
            if self._status is None:
                self._status = self._rich.status("")
                self._status.start()
            self._status.update(escape(line))
            return
        said, at = self._said
        if text != said or time.monotonic() - at > REPEAT_S:
            self._said = (text, time.monotonic())
            self.say(line)

    def progress(self, step: int, phase: str) -> None:
        """Shows the phase of a step on a terminal; says nothing elsewhere, where the step's line follows anyway."""
        if self._live:
            self.doing(f"step {step}/{self._steps}: {phase}{self._eta(step - 1)}")

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Prints the line of a finished step, the heading now and then, and what has become unhealthy."""
        if self._start is None:
            self._start = time.monotonic() - metrics.get("time/step", 0.0)
            self._before = step - 1
        if self._lines % HEADING_EVERY == 0:
            heading = " ".join(f"{name:>{width}}" for name, _, width, _ in COLUMNS)
            self._rich.print(f"[bold]{'step':>9} {heading}[/bold]")
        self._lines += 1
        values = dict(metrics)
        values["clipped"] = sum(metrics.get(f"train/{name}", math.nan) for name in CLIPPED)
        cells = " ".join(f"{_cell(values.get(metric), shape):>{width}}" for _, metric, width, shape in COLUMNS)
        self.say(f"{f'{step}/{self._steps}':>9} {cells}{self._eta(step)}")
        unhealthy = alarms(metrics)
        for name in unhealthy.keys() - self._alarmed:  # said when it begins, not at every step
            self._rich.print(f"[yellow]          ! {escape(unhealthy[name])}[/yellow]")
        self._alarmed = set(unhealthy)

    def finish(self, run_dir: Path) -> None:
        """Prints what came of the run that lies in `run_dir`: before and after, some samples, where everything is."""
        self._stop_status()
        summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
        self.say(
            f"\n{summary['steps']} steps in {summary['train_seconds']:.0f} s, weight version {summary['final_version']}"
        )
        evaluations = sorted((run_dir / "rollouts").glob("eval_*.jsonl"))
        if evaluations:
            self._rich.print(f"[bold]held-out accuracy {summary['before']:.3f} → {summary['after']:.3f}[/bold]")
            for line in evaluations[-1].read_text(encoding="utf-8").splitlines()[:NUM_SAMPLES]:
                row = json.loads(line)
                reward = row["error"] or f"{row['reward']:g}"
                self.say(f"  {row['prompt']!r} → {row['completion']!r}  answer {row['answer']!r}  reward {reward}")
        newest = max((run_dir / "weights").iterdir())
        kind = "adapter" if (newest / "adapter_config.json").is_file() else "model"
        self.say(
            f"report {run_dir / 'report.html'}\n{kind:6} {newest}\n"
            f"files  {run_dir}: config.yaml, metrics.jsonl, rollouts/, summary.json"
        )

    def _eta(self, steps_done: int) -> str:
        if self._start is None or not self._before < steps_done < self._steps:
            return ""
        left = (time.monotonic() - self._start) / (steps_done - self._before) * (self._steps - steps_done)
        return f"  {int(left // 60)}:{int(left % 60):02d} left"

    def _stop_status(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None


def _cell(value: float | None, shape: str) -> str:
    return "-" if value is None or math.isnan(value) else shape.format(value)
