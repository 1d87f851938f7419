"""Preference optimization: losses by hand, whole runs on made-up pairs, and the reference that they keep."""

import gc
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.extras.stages.runs import assert_goes_on, make_config, make_pairs, patch_rows, run

import hocket
from hocket.common.files import newest_version
from hocket.errors import ConfigError
from hocket.extras.stages import dpo, pairs
from hocket.trainer.reference import FrozenModel
from hocket.trainer.trainer import Trainer
from support.numbers import rounding
from support.training import additions, logprobs_of, pack, sequence


def pair_rounding(model: str, sums: Sequence[float]) -> float:
    """How far h of a pair may lie apart, made of four sums of log-probs: of chosen and rejected, now and before."""
    return 4 * rounding(additions(model)) * max(map(abs, sums))


def kept_of(run: Path, step: int) -> list[float]:
    state = json.loads((run / "checkpoints" / f"step_{step:06d}" / "state.json").read_text())
    return [one["ref_logprobs"] for one in state["parts"]["dpo"]["measured"]]


def softplus(x: float) -> float:
    return math.log1p(math.exp(x))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # log-probs −1 −2 beside −4 of the reference, and −5 beside −3: ratios 1 and −2, by token .5 and −2
        ({}, softplus(-1.5)),
        ({"length_normalized": True}, softplus(-1.25)),
        ({"loss": "cdpo", "label_smoothing": 0.1}, 0.9 * softplus(-1.5) + 0.1 * softplus(1.5)),
        ({"loss": "robust", "label_smoothing": 0.1}, (0.9 * softplus(-1.5) - 0.1 * softplus(1.5)) / 0.8),
        ({"loss": "ipo"}, (2.5 - 1) ** 2),
        ({"loss": "simpo", "gamma": 0.75}, softplus(-0.5 * (-1.5 + 5) + 0.75)),
    ],
)
def test_losses_by_hand(options: dict[str, Any], expected: float) -> None:
    made = dpo.DpoOptions(beta=0.5, **options)
    reference = {} if made.loss == "simpo" else {"chosen": -4.0, "rejected": -3.0}
    both = {"chosen": sequence((1, 2, 3, 4)), "rejected": sequence((1, 2, 5))}
    columns = {side: {"ref_logprobs": number} for side, number in reference.items()}
    samples = [pairs.sample(both[side], **columns.get(side, {})) for side in both] * 2
    [[batch]] = pack(samples, unit=2, share=True)
    logprobs = torch.tensor([[0.0, -1.0, -2.0, 0.0, -5.0] * 2], requires_grad=True)
    output = dpo.pair_loss(logprobs, logprobs, batch, made)
    assert output.loss.item() == pytest.approx(expected, abs=1e-12)  # a dozen operations in float64
    output.loss.backward()  # type: ignore[no-untyped-call]
    assert logprobs.grad is not None
    beyond = -1.0 if options.get("loss") == "ipo" else 1.0  # whose h is above its aim of 1
    assert beyond * logprobs.grad[0, 1] < 0 < beyond * logprobs.grad[0, 4]
    metrics = {name: float(value) for name, value in output.metrics.items()}
    rewards = (-0.75, -2.5) if made.loss == "simpo" else (0.5, -1.0)
    assert metrics == pytest.approx(
        {
            "rewards/chosen": rewards[0],
            "rewards/rejected": rewards[1],
            "rewards/margins": rewards[0] - rewards[1],
            "rewards/accuracies": 1.0,
            "logps/chosen": -3.0,
            "logps/rejected": -5.0,
        }
    )


@pytest.mark.parametrize("loss", ["dpo", "ipo", "cdpo", "robust"])
def test_a_policy_that_is_the_reference_but_for_rounding_orders_no_pair_and_learns_all_the_same(loss: str) -> None:
    sums = {"chosen": [-0.1, -0.2, -3.3], "rejected": [-7.7, -0.3]}  # float32 has none of them, nor their sums
    both = {"chosen": sequence((1, 2, 3, 4)), "rejected": sequence((1, 2, 5))}
    [[batch]] = pack([pairs.sample(both[side], ref_logprobs=math.fsum(sums[side])) for side in both], unit=2)
    logprobs = torch.tensor([[*sums["chosen"], *sums["rejected"]]], dtype=torch.float64, requires_grad=True)
    output = dpo.pair_loss(logprobs, logprobs, batch, dpo.DpoOptions(loss=loss))  # type: ignore[arg-type]
    told = [float(output.metrics[f"rewards/{name}"]) for name in ("accuracies", "margins", "chosen", "rejected")]
    assert told == [0.0] * 4
    output.loss.backward()  # type: ignore[no-untyped-call]
    assert logprobs.grad is not None
    assert logprobs.grad[0, 0] < 0 < logprobs.grad[0, 3]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ["dpo.label_smoothing=0.1"],
            "dpo refuses .*: label_smoothing has no effect with loss=dpo, only with cdpo or rob",
        ),
        (["dpo.gamma=1"], "gamma has no effect with loss=dpo, only with simpo"),
        (["dpo.loss=simpo", "dpo.reference=x"], "reference has no effect with loss=simpo, only with dpo or ipo or"),
        (["dpo.loss=dop"], r"dpo.loss: .*did you mean 'dpo'"),
        (["dpo.beta=0"], "dpo.beta: Input should be greater than 0"),
        (["dpo.bta=0.2"], r"has no option 'bta' \(did you mean 'beta'\?\)"),
    ],
)
def test_wrong_settings_are_refused(model: str, tmp_path: Path, settings: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run("dpo", model, tmp_path, *settings)


def test_a_run_prefers_what_is_chosen_and_keeps_its_reference(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = make_pairs(12)
    patch_rows(monkeypatch, made)
    held_out = ("eval.data.source=held.jsonl", "eval.num_prompts=4", "eval.every_steps=10")
    lasts = ("trainer.steps=20", "checkpoint.every_steps=20")
    before, first, *_, last = run("dpo", model, tmp_path, *held_out, *lasts)
    kept = kept_of(tmp_path / "run", 20)
    sequences = [side for pair in made for side in (pair.chosen, pair.rejected)]
    assert kept == pytest.approx([sum(own) for own in logprobs_of(model, sequences)], rel=rounding(additions(model)))
    slope = 0.1 / 2  # of −log σ(beta h) where h is 0
    assert before["eval/loss"] == pytest.approx(math.log(2), abs=slope * pair_rounding(model, kept))
    assert first["train/loss"] == pytest.approx(math.log(2), abs=slope * pair_rounding(model, kept))
    # The policy is the reference yet: rounding orders no pair.
    assert (before["eval/rewards/accuracies"], before["eval/rewards/margins"]) == (0.0, 0.0)
    assert last["train/loss"] < 0.5
    assert last["rewards/accuracies"] == last["eval/rewards/accuracies"] == 1.0
    after = [sum(own) for own in logprobs_of(tmp_path / "run" / "model", sequences[:8])]
    rewards = [0.1 * (now - then) for now, then in zip(after, kept[:8], strict=True)]
    margins = [chosen - rejected for chosen, rejected in zip(rewards[::2], rewards[1::2], strict=True)]
    away = 0.1 * pair_rounding(model, [*kept, *after])
    assert last["eval/rewards/margins"] == pytest.approx(sum(margins) / 4, abs=away)
    assert 0 < last["train/shared"] < 0.5
    said = capsys.readouterr().out
    assert "12 preferences, " in said
    assert "<eos>]] / t" in said
    assert "held-out loss 0.6931  held-out accuracy " in said


@pytest.mark.long
@pytest.mark.parametrize("loss", ["ipo", "simpo"])
def test_a_run_that_was_stopped_ends_as_one_that_was_not_and_measures_its_reference_once(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loss: str
) -> None:
    patch_rows(monkeypatch, make_pairs(12))
    settings = (f"dpo.loss={loss}", "dpo.epochs=2", "dpo.batch_size=5", "checkpoint.every_steps=2", "model.lora={}")
    settings += ("eval.data.source=held.jsonl", "eval.num_prompts=2", "eval.every_steps=2")
    asked: list[int] = []
    measure = Trainer.measure

    def noting(self: Trainer, sequences: Sequence[Any]) -> Any:
        asked.append(len(sequences))
        return measure(self, sequences)

    monkeypatch.setattr(Trainer, "measure", noting)
    assert_goes_on("dpo", model, tmp_path, monkeypatch, *settings, at=3)
    # Both runs all pairs and those held out; again these alone, by the policy as it was before the first step.
    assert asked == [24, 4, 24, 4, 4] * (loss == "ipo")
    with pytest.raises(ConfigError, match=r"dpo.batch_size was 5, 6 is another run"):
        run("dpo", model, tmp_path, *settings, "checkpoint.resume=true", "dpo.batch_size=6")
    with pytest.raises(ConfigError, match=r"it is of dpo"):
        run("sft", model, tmp_path, "model.lora={}", "checkpoint.resume=true")


@pytest.mark.long
def test_another_model_can_be_the_reference(
    model: str, tied_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make_pairs(6)
    patch_rows(monkeypatch, made)
    there: list[bool] = []
    monkeypatch.setattr(Trainer, "plan", lambda *_: there.append(any(type(o) is FrozenModel for o in gc.get_objects())))
    settings = (f"dpo.reference={tied_model}", "trainer.steps=1", "checkpoint.every_steps=1")
    (record,) = run("dpo", model, tmp_path, *settings)
    assert there == [False], "no one measures anything by it any more"
    kept = kept_of(tmp_path / "run", 1)
    sequences = [side for pair in made for side in (pair.chosen, pair.rejected)]
    theirs = [sum(own) for own in logprobs_of(tied_model, sequences)]
    assert kept == pytest.approx(theirs, rel=rounding(additions(tied_model)))
    ours = [sum(own) for own in logprobs_of(model, sequences)]
    ratios = [mine - theirs for mine, theirs in zip(ours, kept, strict=True)]
    expected = [
        softplus(-0.1 * (chosen - rejected)) for chosen, rejected in zip(ratios[::2], ratios[1::2], strict=True)
    ]
    away = 0.1 * pair_rounding(model, [*kept, *ours])  # the slope of −log σ(beta h) is at most beta
    assert record["train/loss"] == pytest.approx(sum(expected) / 6, abs=away)


def test_python_runs_a_stage_with_overrides(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    patch_rows(monkeypatch, make_pairs(6))
    monkeypatch.setattr("hocket.common.environment.prepare", lambda: None)
    config = make_config("dpo", model, tmp_path, "trainer.steps=9")
    result = hocket.dpo(config, {"trainer.steps": 2, "dpo.beta": 0.2})
    assert [record["step"] for record in result["history"]] == [1, 2]
    assert result["model"] == tmp_path / "run" / "model" == Path(newest_version(str(result["run_dir"])))
    assert "beta: 0.2" in (tmp_path / "run" / "config.yaml").read_text()
