"""The trainer's state in files: models made of it, and what is refused."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hocket import config as config_module
from hocket.data import tokenizer as tokenizers
from hocket.errors import ConfigError, TrainerError
from hocket.protocol import manifest
from hocket.trainer import attention
from hocket.trainer.checkpoints import Checkpoints, write_bucket
from hocket.trainer.ranks import Ranks
from hocket.trainer.state import SavedTensors, export
from hocket.trainer.trainer import Trainer
from support import training
from support.training import additions, assert_near, make_samples

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


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        ("tied_model", ("trainer.zero_stage=3",)),
        ("untied_model", ("model.dtype=bfloat16", "trainer.zero_stage=2")),
        ("experts_model", ()),
    ],
)
def test_a_model_made_of_a_checkpoint_is_what_the_trainer_publishes(
    ranks: Ranks, model: str, settings: tuple[str, ...], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    path = request.getfixturevalue(model)
    config = make_config(path, tmp_path, *settings)
    with Trainer(config, ranks=ranks) as trainer:
        for _ in range(2):
            trainer.step(make_samples())
        folder = save(trainer, config)
        trainer.export(tmp_path / "published")
        expected = logprobs(trainer.policy.model)
    export(folder, tmp_path / "model", base=None)
    made, published = (load_file(tmp_path / name / "model.safetensors") for name in ("model", "published"))
    assert made.keys() == published.keys() == load_file(Path(path) / "model.safetensors").keys()
    for name, tensor in published.items():
        assert (made[name].dtype, made[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(made[name], tensor)
    for file in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        contents = [json.loads((tmp_path / name / file).read_text()) for name in ("model", "published")]
        assert contents[0] == contents[1], file
    # With the trainer's attention: transformers' own would round to 16 bits what the trainer computes in 32.
    kernel = {"attn_implementation": attention.NAME}
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="auto", **kernel)
    if loaded.dtype == torch.float32:
        assert_near(logprobs(loaded), expected, additions(path))
    else:
        assert torch.equal(logprobs(loaded), expected)
    assert (logprobs(AutoModelForCausalLM.from_pretrained(path, dtype="auto")) - expected).abs().max() > 0.01
    assert tokenizers.fingerprint(tokenizers.load(str(tmp_path / "model"))) == tokenizers.fingerprint(trainer.tokenizer)
    assert len({file.stat().st_mode for file in (tmp_path / "model").iterdir()}) == 1
    with pytest.raises(ConfigError, match="exists already"):
        export(folder, tmp_path / "model", base=None)
    state = json.loads((folder / "state.json").read_text())
    state["config"]["model"]["path"] = str(tmp_path / "moved")
    (folder / "state.json").write_text(json.dumps(state))
    with pytest.raises(ConfigError, match="something has changed its files"):
        export(folder, tmp_path / "again", base=None)
    checksum = manifest.total_checksum(manifest.specs(manifest.tensors(folder)), json.dumps(state))
    (folder / "COMPLETE").write_text(checksum)
    with pytest.raises(ConfigError, match=r"moved"):
        export(folder, tmp_path / "again", base=None)
    with pytest.raises(TrainerError, match=r"of another model than .*model\.path"):
        export(folder, tmp_path / "again", base="checkpoints/tiny-sort")
    assert not list(tmp_path.glob("*again*"))
    export(folder, tmp_path / "again", base=path)
    assert (tmp_path / "again" / "config.json").exists()


def test_a_checkpoint_of_an_adapter_is_merged_into_its_base(ranks: Ranks, untied_model: str, tmp_path: Path) -> None:
    config = make_config(untied_model, tmp_path, "model.lora={}")
    with Trainer(config, ranks=ranks) as trainer:
        for _ in range(2):
            trainer.step(make_samples())
        folder = save(trainer, config)
        expected = logprobs(trainer.policy.model)
    export(folder, tmp_path / "model", base=None)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="auto")
    assert_near(logprobs(loaded), expected, additions(untied_model))
    assert not list(tmp_path.glob(".*")), "something half written is left"


def test_the_state_of_another_model_is_refused_and_what_was_given_stays_as_it_is(
    ranks: Ranks, tied_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hocket.trainer.trainer.BUCKET_BYTES", 10_000)
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
