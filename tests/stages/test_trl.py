"""The stages beside TRL 1.16's own code: losses and gradients of pairs, and whole trainings of 20 steps."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.stages.record_trl import BATCH, PAIRS, RATE, REWARDS, SMOOTHING, START, STEPS, make_classifier, rows

from hocket import config
from hocket.stages import dpo, driver, pairs, rm
from hocket.trainer.batching import TrainBatch
from support.stages import records_of
from support.training import pack, sequence

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
    assert found == pytest.approx(expected["loss"], rel=1e-9)
    assert leaf.grad is not None
    gradient = torch.tensor(expected["gradient"], dtype=torch.float64)
    torch.testing.assert_close(leaf.grad, gradient, rtol=1e-9, atol=1e-9)
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
    assert told == pytest.approx(told | expected.get("metrics", {}), rel=1e-6)  # TRL's accuracies are float32


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
    assert told["rewards/accuracies"] == pytest.approx(expected["metrics"]["accuracy"], abs=1e-6)


@pytest.mark.parametrize("name", TRAININGS)
def test_a_training_has_the_losses_of_trls(name: str, tmp_path: Path) -> None:
    stage = "rm" if name == "rm" else "dpo"
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows()))
    settings = [
        f"run.dir={tmp_path}/run",
        f"model.path={make_classifier(tmp_path / 'classifier') if stage == 'rm' else START}",
        "model.dtype=float32",
        f"data.source={file}",
        f"{stage}.batch_size={BATCH}",
        f"trainer.steps={STEPS}",
        f"trainer.learning_rate={RATE}",
        *TRAININGS[name],
    ]
    driver.run(config.load(None, settings), stage)
    losses = [record["train/loss"] for record in records_of(tmp_path / "run")]
    assert losses == pytest.approx(RECORDED["trainings"][name], abs=1e-4)
