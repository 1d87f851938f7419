"""Loading draws nothing at random, and what is written loads, generates and ends as it was taught to."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig

from hocket.data import tokenizer as tokenizers
from hocket.errors import ConfigError
from hocket.protocol import AdapterConfig
from hocket.trainer import lora
from hocket.trainer.state import export
from hocket.trainer.weights import load_model, write_beside
from support.tokenizers import CHECKPOINTS

CONTRADICTORY = {"temperature": 0.9, "top_p": 0.6}  # without do_sample, as in Llama 2's


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(CHECKPOINTS / "tiny-sort", tmp_path / "model"))


def configure(folder: Path, file: str, **values: Any) -> dict[str, Any]:
    path = folder / file
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    written: dict[str, Any] = json.loads(path.read_text())
    return written


def test_a_tensor_that_lacks_is_refused_where_a_model_is_loaded_but_for_heads_that_are_not_used(folder: Path) -> None:
    configure(folder, "config.json", tie_word_embeddings=False)
    with pytest.raises(ConfigError, match=r"lack lm_head\.weight"):
        load_model(str(folder))
    assert load_model(str(folder), head=False)
    assert load_model(str(folder), scores=True).score.weight.shape[0] == 1
    tensors = load_file(folder / "model.safetensors")
    up = next(name for name in sorted(tensors) if "up_proj" in name)
    narrow = {**tensors, up: tensors[up][1:].clone()}
    save_file(narrow, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=rf"{up} in the shape"):
        load_model(str(folder), scores=True)
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"beside config\.json"):
        load_model(str(folder))


@pytest.mark.parametrize(
    ("settings", "named", "written"),
    [
        (CONTRADICTORY, 1, 1),
        ({"temperature": 0.0, "do_sample": False}, [1, 3], [1, 3]),
        (CONTRADICTORY, 3, [3, 1]),  # the template's end is no end
        ({}, [3, 4], [3, 4, 1]),
        ({}, None, None),  # the tokenizer's own is the template's end
    ],
)
def test_how_a_model_generates_is_written_as_it_was_with_the_end_that_is_taught(
    folder: Path, tmp_path: Path, settings: dict[str, Any], named: Any, written: Any
) -> None:
    configure(folder, "generation_config.json", **settings, eos_token_id=named)
    (tmp_path / "written").mkdir()
    path = str(folder)
    write_beside(tmp_path / "written", load_model(path), tokenizers.load(path), path)
    generation = GenerationConfig.from_pretrained(tmp_path / "written")
    assert generation.eos_token_id == written
    assert {name: getattr(generation, name) for name in settings} == settings


def test_an_exported_model_generates_as_its_base_and_ends_where_turns_end(folder: Path, tmp_path: Path) -> None:
    configure(folder, "generation_config.json", **CONTRADICTORY, eos_token_id=3)
    adapter = AdapterConfig(base_model_name_or_path=str(folder), r=1, lora_alpha=1, target_modules=["q_proj"])
    lora.save(tmp_path / "adapter", adapter, {})
    export(tmp_path / "adapter", tmp_path / "merged", base=None)
    generation = GenerationConfig.from_pretrained(tmp_path / "merged")
    assert (generation.temperature, generation.top_p, generation.eos_token_id) == (0.9, 0.6, [3, 1])
    before, after = (load_file(one / "model.safetensors") for one in (folder, tmp_path / "merged"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
