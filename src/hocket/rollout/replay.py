"""Batches from the files of an earlier run in the place of new ones: training without a server, to look for a fault.

Gives what the pipeline gave then: the same tokens, log-probs and scores, step by step.
"""

import time
from pathlib import Path
from typing import Self

from hocket.errors import DataError
from hocket.observe.run_folder import groups_of
from hocket.rollout.pipeline import Batch


class Replay:
    """Reads a run's rollouts, in the place of a Pipeline.

    Args:
        run_dir: the run folder that they were written to.
    """

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / "rollouts"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Nothing is being played."""

    async def batch(self, step: int) -> Batch:
        """Returns what was played for a step. Raises DataError where nothing, or what can't be read."""
        start = time.perf_counter()
        path = self._folder / f"step_{step:06d}.jsonl"
        try:
            with path.open(encoding="utf-8") as lines:
                groups = groups_of(lines)
            if not groups:
                raise ValueError("it is empty")
        except (OSError, ValueError, KeyError, TypeError) as error:
            steps = sorted(int(file.stem.rpartition("_")[2]) for file in self._folder.glob("step_*.jsonl"))
            there = f"it has steps {steps[0]} to {steps[-1]}" if steps else "it has none"
            raise DataError(
                f"pipeline.replay: no rollouts of step {step} in {path} ({error!r}); {there}: set trainer.steps "
                "to what is there, or name another run folder"
            ) from error
        return Batch(groups=groups, metrics={"time/generate": time.perf_counter() - start, "time/reward": 0.0})
