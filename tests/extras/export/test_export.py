"""Models made of checkpoints and adapters."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.trainer.test_state import logprobs, make_config, save
from tests.trainer.test_weights import CONTRADICTORY, configure
from transformers import AutoModelForCausalLM, GenerationConfig

from hocket.data import tokenizer as tokenizers
from hocket.errors import ConfigError, TrainerError
from hocket.extras.export.export import export
from hocket.protocol import AdapterConfig, manifest
from hocket.trainer import lora
from hocket.trainer.ranks import Ranks
from hocket.trainer.trainer import Trainer
from support.training import additions, assert_near, make_samples


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
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="auto")
    assert_near(logprobs(loaded), expected, additions(path))
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


def test_an_exported_model_generates_as_its_base_and_ends_where_turns_end(folder: Path, tmp_path: Path) -> None:
    configure(folder, "generation_config.json", **CONTRADICTORY, eos_token_id=3)
    adapter = AdapterConfig(base_model_name_or_path=str(folder), r=1, lora_alpha=1, target_modules=["q_proj"])
    lora.save(tmp_path / "adapter", adapter, {})
    export(tmp_path / "adapter", tmp_path / "merged", base=None)
    generation = GenerationConfig.from_pretrained(tmp_path / "merged")
    assert (generation.temperature, generation.top_p, generation.eos_token_id) == (0.9, 0.6, [3, 1])
    with pytest.raises(ConfigError, match="exists already"):
        export(tmp_path / "adapter", tmp_path / "merged", base=None)
    before, after = (load_file(one / "model.safetensors") for one in (folder, tmp_path / "merged"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
