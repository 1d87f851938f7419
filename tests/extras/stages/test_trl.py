"""The stages beside TRL 1.16's own code: losses and gradients of pairs, and whole trainings of 20 steps."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.extras.stages.record_trl import BATCH, PAIRS, RATE, REWARDS, SMOOTHING, START, STEPS, make_classifier, rows
from tests.extras.stages.runs import run

from hocket.extras.stages import dpo, pairs, rm
from hocket.trainer.batching import TrainBatch
from support.numbers import rounding
from support.parameters import mostly_long
from support.training import assert_near, gradient_additions, pack, sequence

RECORDED = json.loads((Path(__file__).parent / "trl.json").read_text(encoding="utf-8"))  # by record_trl.py
GIVEN = {name: torch.tensor(values, dtype=torch.float64) for name, values in RECORDED["inputs"].items()}
LENGTHS = RECORDED["inputs"]["lengths"]
LOSSES: dict[str, dict[str, Any]] = {
    "dpo": {},
    "dpo_normalised": {"length_normalized": True},
    "ipo": {"loss": "ipo"},
    "robust": {"loss": "robust", "label_smoothing": SMOOTHING},
    "cdpo": {"loss": "cdpo", "label_smoothing": SMOOTHING},
    "simpo": {"loss": "simpo", "beta": 2.0, "gamma": 0.5},
}
TRAININGS = {
    "dpo": ["dpo.beta=0.1"],
    "ipo": ["dpo.beta=0.1", "dpo.loss=ipo"],
    "rm": ["rm.center_coef=0.01"],  # and the margins of the rows
}


def batch_of(**columns: torch.Tensor) -> tuple[TrainBatch, torch.Tensor, torch.Tensor]:
    """Returns the recorded rows in one micro-batch, and row and token of each of its positions."""
    order = [row for place in range(PAIRS) for row in (place, place + PAIRS)]
    samples = [
        pairs.sample(
            sequence([1, *range(2, 2 + LENGTHS[row])], 1),
            **{name: float(values[row % len(values)]) for name, values in columns.items()},
        )
        for row in order
    ]
    [[batch]] = pack(samples, unit=2)
    row_t = torch.tensor([order[place] for place in batch.places]).repeat_interleave(torch.tensor(batch.lengths))
    return batch, row_t, torch.cat([torch.arange(length) for length in batch.lengths])


def assert_recorded(found: float, leaf: torch.Tensor, expected: dict[str, Any]) -> None:
    away = 100 * rounding(100, torch.float64)  # sums of 84 tokens' terms, each below 100
    assert found == pytest.approx(expected["loss"], abs=away)
    assert leaf.grad is not None
    gradient = torch.tensor(expected["gradient"], dtype=torch.float64)
    torch.testing.assert_close(leaf.grad, gradient, rtol=0, atol=away)
    assert gradient.abs().sum() > 0


def test_each_recorded_case_is_compared() -> None:
    assert RECORDED["losses"].keys() == LOSSES.keys()
    assert RECORDED["rewards"].keys() == REWARDS.keys()
    assert RECORDED["trainings"].keys() == TRAININGS.keys()


@pytest.mark.parametrize("name", LOSSES)
def test_loss_gradients_and_metrics_of_pairs_equal_those_of_trl(name: str) -> None:
    batch, row_t, token_t = batch_of(**({} if name == "simpo" else {"ref_logprobs": GIVEN["reference"]}))
    leaf = GIVEN["logprobs"].clone().requires_grad_()
    logprobs_bt = leaf[row_t, token_t][None]
    output = dpo.pair_loss(logprobs_bt, logprobs_bt, batch, dpo.DpoOptions(**LOSSES[name]))
    output.loss.backward()  # type: ignore[no-untyped-call]
    expected = RECORDED["losses"][name]
    assert_recorded(output.loss.item(), leaf, expected)
    told = {key: float(value) for key, value in output.metrics.items()}
    assert told == pytest.approx(told | expected.get("metrics", {}), rel=2**-24)  # TRL's accuracies are float32


@pytest.mark.parametrize("name", REWARDS)
def test_loss_gradients_and_metrics_of_rewards_equal_those_of_trl(name: str) -> None:
    case = REWARDS[name]
    margins = GIVEN["margins"] * ("margin" in case)
    samples = [pairs.sample(sequence([1, 2], 1), margins=float(margin)) for margin in margins for _ in ("w", "l")]
    [[batch]] = pack(samples, unit=2)
    leaf = GIVEN["rewards"].clone().requires_grad_()
    row_t = torch.tensor([place // 2 + place % 2 * PAIRS for place in batch.places])
    output = rm.comparison_loss(leaf[row_t][None], batch, rm.RmOptions(center_coef=case.get("centre", 0.0)))
    output.loss.backward()  # type: ignore[no-untyped-call]
    expected = RECORDED["rewards"][name]
    assert_recorded(output.loss.item(), leaf, expected)
    told = {key: float(value) for key, value in output.metrics.items()}
    assert told["rewards/margins"] == pytest.approx(expected["metrics"]["margin"])
    assert told["rewards/accuracies"] == pytest.approx(expected["metrics"]["accuracy"], rel=2**-24)


@pytest.mark.parametrize("name", mostly_long(TRAININGS, "dpo"))
def test_a_training_has_the_losses_of_trls(name: str, tmp_path: Path) -> None:
    stage = "rm" if name == "rm" else "dpo"
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows()))
    model = make_classifier(tmp_path / "classifier") if stage == "rm" else str(START)
    settings = [
        f"data.source={file}",
        "data.chat_template=true",
        f"{stage}.batch_size={BATCH}",
        f"trainer.steps={STEPS}",
        f"trainer.learning_rate={RATE}",
        *TRAININGS[name],
    ]
    losses = [record["train/loss"] for record in run(stage, model, tmp_path, *settings)]
    assert_near(losses, RECORDED["trainings"][name], STEPS * gradient_additions(model))  # one step after the other
