"""The trainer's state in files: models made of it, and what is refused."""

import dataclasses
from pathlib import Path

import pytest
import torch

from hocket import config as config_module
from hocket.errors import TrainerError
from hocket.trainer.checkpoints import Checkpoints
from hocket.trainer.ranks import Ranks
from hocket.trainer.state import SavedTensors, write_bucket
from hocket.trainer.trainer import Trainer
from support import training
from support.training import make_samples

IDS = torch.arange(12)[None]


def make_config(model: str, tmp_path: Path, *settings: str) -> config_module.Config:
    defaults = ("model.dtype=float32", "trainer.learning_rate=1e-2", "trainer.micro_batch_tokens=40")
    places = (f"run.dir={tmp_path}/runs/a", f"model.path={model}")
    return config_module.load(None, [*defaults, *places, *settings])


def save(trainer: Trainer, config: config_module.Config) -> Path:
    with Checkpoints(config, trainer.state, {}) as kept:
        kept.copy(config.trainer.steps, last=True)
        kept.complete(config.trainer.steps, {})
    return config.run_dir / "checkpoints" / f"step_{config.trainer.steps:06d}"


@torch.no_grad()
def logprobs(model: torch.nn.Module) -> torch.Tensor:
    return torch.log_softmax(model.eval()(IDS).logits.float(), dim=-1)  # type: ignore[no-any-return]


def test_the_state_of_another_model_is_refused_and_what_was_given_stays_as_it_is(
    ranks: Ranks, tied_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hocket.trainer.models.BUCKET_BYTES", 10_000)
    folders = {name: tmp_path / name for name in ("other", "wide")}
    for folder in folders.values():
        folder.mkdir()
    kept: list[dict[str, torch.Tensor]] = []
    with Trainer(make_config(tied_model, tmp_path), ranks=ranks) as trainer:
        rest = trainer.state(lambda bucket: kept.append(dict(bucket)))
        before = [{name: tensor.clone() for name, tensor in bucket.items()} for bucket in kept]
        for bucket in kept:
            write_bucket(folders["wide"], {name: tensor.flatten() for name, tensor in bucket.items()})
            write_bucket(folders["other"], {name.replace("layers.1", "layers.2"): t for name, t in bucket.items()})
        with pytest.raises(TrainerError, match=r"another model: policy/exp_avg/model\.model\.layers\.1\..* is missing"):
            trainer.restore(SavedTensors(folders["other"]), rest)
        with pytest.raises(TrainerError, match=r"another model: .* is \(2048,\) there, \(64, 32\) here"):
            trainer.restore(SavedTensors(folders["wide"]), rest)
        assert not trainer.step(make_samples())["train/skipped"]
        largest = max(p.numel() * 4 for p in trainer.policy.parameters())
    assert len(kept) > 5
    for bucket, expected in zip(kept, before, strict=True):
        assert sum(tensor.nbytes for tensor in bucket.values()) < 10_000 + largest
        assert all(torch.equal(tensor, expected[name]) for name, tensor in bucket.items())


def test_a_schedule_goes_on_with_the_settings_of_now_and_skipped_steps_are_counted_on(
    ranks: Ranks, tied_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Linear decay of 1e-2 over 4 steps, after 3 of them: (4 - 3) / 4 of it. Over 8 steps of 3e-2: (8 - 3) / 8.
    monkeypatch.setattr("hocket.trainer.guards.MAX_SKIPPED_STEPS", 2)
    bad = [dataclasses.replace(make_samples()[0], advantages=(0.0, 0.0, *[float("nan")] * 7))]
    schedule = ("trainer.schedule=linear", "trainer.steps=4")
    with Trainer(make_config(tied_model, tmp_path, *schedule), ranks=ranks) as trainer:
        steps = [trainer.step(samples) for samples in (make_samples(), make_samples(), bad)]
        assert [step["train/skipped"] for step in steps] == [0, 0, 1]
        training.save(trainer, tmp_path / "state")
        assert trainer.step(make_samples())["train/learning_rate"] == pytest.approx(0.25e-2)
    longer = ("trainer.schedule=linear", "trainer.steps=8", "trainer.learning_rate=3e-2")
    with Trainer(make_config(tied_model, tmp_path, *longer), ranks=ranks) as trainer:
        training.load(trainer, tmp_path / "state")
        assert trainer.step(make_samples())["train/learning_rate"] == pytest.approx(0.625 * 3e-2)
        training.load(trainer, tmp_path / "state")
        with pytest.raises(TrainerError, match="2 steps in a row"):
            trainer.step(bad)
