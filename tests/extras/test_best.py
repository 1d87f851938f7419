from pathlib import Path
from typing import Any

import pytest
from tests.test_loop import trained

from hocket.config import BestConfig
from hocket.extras.best import Best
from hocket.types import Metrics


class World:
    """A trainer that exports its number of steps, and checkpoints that note whose step they are asked for."""

    def __init__(self, folder: Path, metric: str = "eval/greedy") -> None:
        self.history: list[dict[str, Any]] = []
        self.copied: list[int] = []
        self.kept = 0
        self.step = 0
        self.best = Best(BestConfig(name=metric), folder, self.history, self, self, print)  # type: ignore[arg-type]

    def export(self, folder: Path) -> None:
        (folder / "weights").write_text(str(self.step))

    def copy(self, step: int, *, last: bool) -> None:
        assert last
        self.copied.append(step)

    def evaluate(self, step: int, value: float, name: str = "eval/greedy") -> float:
        self.step = step
        since = self.best.evaluated(step, {name: value})["eval/since_best"]
        self.history.append({"step": step, name: value})
        return since


def test_the_best_evaluation_keeps_its_weights_and_checkpoint_and_of_equals_the_first_does(tmp_path: Path) -> None:
    world = World(tmp_path)
    since = [world.evaluate(10 * step, value) for step, value in enumerate([0.2, 0.5, 0.4, 0.5, 0.6, 0.6])]
    assert since == [0, 0, 1, 2, 0, 1]
    assert (tmp_path / "best" / "weights").read_text() == "40"
    assert world.copied == [0, 10, 40]
    assert world.kept == 40
    assert world.best.summary() == {"best": {"step": 40, "metric": "eval/greedy", "value": 0.6, "folder": "best"}}


def test_of_errors_the_smallest_share_is_the_best_and_a_resumed_run_goes_on_with_it(tmp_path: Path) -> None:
    name = "eval/reward_errors"
    world = World(tmp_path, name)
    world.history += [{"step": 0, name: 0.3}, {"step": 1}, {"step": 2, name: 0.2}]
    assert [world.evaluate(step, value, name) for step, value in ((3, 0.2), (4, 0.25))] == [1, 2]
    assert world.kept == world.best.summary()["best"]["step"] == 2
    assert not (tmp_path / "best").exists()  # what is there stays
    assert world.evaluate(5, 0.1, name) == 0
    assert (tmp_path / "best" / "weights").read_text() == "5"


def test_an_evaluation_in_which_no_answer_has_a_score_is_passed_over(tmp_path: Path) -> None:
    world = World(tmp_path)
    assert world.best.evaluated(0, {"eval/reward_errors": 1.0}) == {}
    assert world.best.summary() == {}
    assert world.evaluate(1, 0.5) == 0
    assert world.best.evaluated(2, {"eval/reward_errors": 1.0}) == {}
    assert world.best.summary()["best"]["step"] == 1


async def test_a_run_ends_when_its_best_evaluation_is_patience_evaluations_ago(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept: list[int] = []

    class Kept(Best):
        def evaluated(self, step: int, metrics: Metrics) -> Metrics:
            kept.append(step)
            assert metrics["eval/greedy"] == 0.0
            return {"eval/since_best": float(step)}

        def summary(self) -> dict[str, Any]:
            return {"best": {"step": 0}}

    nothing: Any = None
    best = Kept(BestConfig(name="eval/greedy", patience=2), tmp_path, [], nothing, nothing, print)
    settings = ("trainer.steps=9", "eval.every_steps=1", "eval.data.source=task:sort")
    _, metrics, summary = await trained(tmp_path, lambda step, j: float(j), *settings, parts_of_run=[best])
    assert kept == [0, 1, 2]
    assert [row.get("eval/since_best") for row in metrics] == [0.0, 1.0, 2.0]
    assert (summary["steps"], summary["best"]) == (2, {"step": 0})
    assert "checkpoint.best: 2 evaluations without a better one" in " ".join(capsys.readouterr().out.split())
