"""Train on the recorded rollouts of an earlier run (pipeline.replay), without a server."""

import time
from pathlib import Path

from hocket.common.files import numbered
from hocket.errors import DataError
from hocket.formats import ROLLOUTS
from hocket.observe.rows import DAMAGED, groups_of
from hocket.rollout.collect import Batch


class Replay:
    """Gives the recorded batches of an earlier run, to train without a server."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / ROLLOUTS

    def begin_early(self, step: int) -> None:
        """Do nothing: nothing is generated."""

    async def batch(self, step: int, *, version: int | None = None) -> Batch:
        """Read a step's batch. Raises DataError if it can't be read."""
        start = time.perf_counter()
        path = self._folder / f"step_{step:06d}.jsonl"
        try:
            with path.open(encoding="utf-8") as lines:
                groups = groups_of(lines, path)
            if not groups:
                raise ValueError("it is empty")
        except (OSError, *DAMAGED) as error:
            raise self._unreadable(step, path, error) from error
        metrics = {"time/generate": time.perf_counter() - start, "time/reward": 0.0}
        return Batch(groups=groups, metrics=metrics)

    def _unreadable(self, step: int, path: Path, error: Exception) -> DataError:
        steps = list(numbered(self._folder, "step_*.jsonl"))
        recorded = f"it has steps {steps[0]} to {steps[-1]}" if steps else "it has none"
        return DataError(
            f"pipeline.replay: no rollouts of step {step} in {path} ({error!r}); {recorded}: "
            "set trainer.steps to what is there, or name another run folder"
        )
