"""Keep the weights and the checkpoint of the best evaluation, and count the evaluations since."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hocket.common.files import atomic_folder
from hocket.config import BestConfig
from hocket.formats import BestEvaluation, MetricsRow
from hocket.observe.metrics import Metric, metric_table
from hocket.observe.rows import step_of
from hocket.run_part import Joined, RunPart, run_part
from hocket.trainer.checkpoints import Checkpoints
from hocket.types import Metrics

if TYPE_CHECKING:
    from hocket.trainer.trainer import Trainer

_LESS_IS_BETTER = ("eval/reward_errors", "eval/truncated", "eval/length_mean")
FOLDER = "best"  # in the run folder: a model, or an adapter

metric_table("best")([Metric("eval/since_best", "checkpoint.best: evaluations since the best one")])


@dataclasses.dataclass(frozen=True)
class Best(RunPart):
    """Finds the best evaluation in the history, which a resumed run has, too."""

    settings: BestConfig
    folder: Path  # of the run
    history: Sequence[MetricsRow]  # metrics of the steps so far
    trainer: "Trainer"
    checkpoints: Checkpoints
    say: Callable[[str], None]

    def evaluated(self, step: int, metrics: Metrics) -> Metrics:
        """Keep the weights of the best evaluation; return eval/since_best."""
        if self.settings.name not in metrics:  # no answer has a score
            return {}
        now = self._evaluation(step, metrics[self.settings.name])
        evaluations = self._evaluations()
        evaluations.append(now)
        best = self._best(evaluations)
        if best is now:
            with atomic_folder(self.folder / FOLDER) as partial:
                self.trainer.export(partial)
            self.checkpoints.copy(step, last=True)  # none of step 0, which is the model itself
        self.checkpoints.kept = best["step"]
        return {"eval/since_best": len(evaluations) - 1.0 - evaluations.index(best)}

    def ends(self, step: int, metrics: Metrics) -> bool:
        """End the run where checkpoint.best.patience evaluations in a row were no better."""
        patience = self.settings.patience
        if patience is None or metrics.get("eval/since_best", 0) < patience:
            return False
        self.say(f"checkpoint.best: {patience} evaluations without a better one")
        return True

    def summary(self) -> Mapping[str, Any]:
        evaluations = self._evaluations()
        return {"best": self._best(evaluations)} if evaluations else {}

    def _evaluations(self) -> list[BestEvaluation]:
        evaluations: list[BestEvaluation] = []
        for row in self.history:
            value = row.get(self.settings.name)
            if value is not None:
                evaluations.append(self._evaluation(step_of(row), value))
        return evaluations

    def _evaluation(self, step: int, value: float) -> BestEvaluation:
        return {"step": step, "metric": self.settings.name, "value": value, "folder": FOLDER}

    def _best(self, evaluations: Sequence[BestEvaluation]) -> BestEvaluation:
        """Return the best evaluation; the first of equal ones."""
        best = min if self.settings.name in _LESS_IS_BETTER else max
        return best(evaluations, key=lambda evaluation: evaluation["value"])


@run_part("best")
def best(run: Joined) -> RunPart | None:
    settings = run.config.checkpoint.best
    if settings is None or run.config.pipeline.replay is not None:  # a replay has no evaluations
        return None
    return Best(
        settings, run.folder.path, run.folder.history, run.trainer, run.checkpoints, run.console.say
    )
