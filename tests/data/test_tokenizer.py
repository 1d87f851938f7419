"""What is known of a model before its weights: where it is, its context, and the tokens that end its answers."""

import json
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import RepositoryNotFoundError

from hocket.config import ModelConfig
from hocket.data import tokenizer as tokenizers
from hocket.errors import ConfigError
from support.tokenizers import CHECKPOINTS


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(CHECKPOINTS / "tiny-sort", tmp_path / "model"))


def configure(folder: Path, file: str = "config.json", **values: Any) -> None:
    path = folder / file
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256, "rope_theta": 10000.0}
LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
DYNAMIC = LINEAR | {"rope_type": "dynamic"}
DYNAMIC_OF_SCALED = DYNAMIC | {"original_max_position_embeddings": 256}


@pytest.mark.parametrize(
    ("config", "most", "advice"),
    [
        ({"max_position_embeddings": 256}, 256, "rope_type: yarn, factor: 5, original_max_position_embeddings: 256"),
        ({"max_position_embeddings": 256, "rope_parameters": LINEAR}, 512, "rope_type: yarn"),
        ({"max_position_embeddings": 256, "rope_parameters": DYNAMIC}, 256, "rope_type: yarn, factor: 5"),
        ({"max_position_embeddings": 256, "rope_parameters": DYNAMIC_OF_SCALED}, 256, "rope_type: yarn, factor: 5"),
        ({"max_position_embeddings": 256, "rope_parameters": YARN}, 1024, "rope_type: yarn"),
        ({"max_position_embeddings": 1024, "rope_parameters": YARN}, 1024, "rope_type: yarn"),  # scaled already
    ],
)
def test_a_length_beyond_the_positions_is_refused_and_scaled_ones_reach_further(
    folder: Path, config: dict[str, Any], most: int, advice: str
) -> None:
    configure(folder, **config)
    assert tokenizers.context_length(ModelConfig(path=str(folder), max_length=most)) == most
    with pytest.raises(ConfigError, match=f"max_length={most + 1} is beyond the {most} positions.*{advice[:15]}"):
        tokenizers.context_length(ModelConfig(path=str(folder), max_length=most + 1))
    with pytest.raises(ConfigError, match=advice):
        tokenizers.context_length(ModelConfig(path=str(folder), max_length=1025))
    assert tokenizers.context_length(ModelConfig(path=str(folder))) == config["max_position_embeddings"]


@pytest.mark.parametrize(
    ("config", "refused"),
    [
        ({"model_type": "gpt2", "n_positions": 256}, True),
        ({"model_type": "bloom"}, False),  # it names no positions, as attention to far tokens fades
    ],
)
def test_learned_positions_end_and_have_no_scaling(folder: Path, config: dict[str, Any], refused: bool) -> None:
    (folder / "config.json").write_text(json.dumps({"vocab_size": 128, **config}))
    model = ModelConfig(path=str(folder), max_length=400)
    if not refused:
        assert tokenizers.context_length(model) == 400
        return
    with pytest.raises(ConfigError) as error:
        tokenizers.context_length(model)
    assert str(error.value).endswith("; lower model.max_length to 256 or less")


def test_the_end_of_a_turn_is_an_end_of_the_model_and_is_said_where_it_was_none(folder: Path) -> None:
    path = str(folder)
    tokenizer = tokenizers.load(path)
    own = tokenizer.eos_token_id
    assert (tokenizers.end_ids(path, tokenizer), tokenizers.said_end(path, tokenizer)) == ({own}, "")
    other = tokenizer.convert_ids_to_tokens(own + 2)
    configure(folder, "tokenizer_config.json", eos_token=other)
    configure(folder, eos_token_id=own + 2)
    configure(folder, "generation_config.json", eos_token_id=own + 2)
    tokenizer = tokenizers.load(path)
    assert tokenizers.end_ids(path, tokenizer) == {own, own + 2}
    assert f"ends turns with '<|end|>', which is no end of {path} (its eos is {other!r})" in tokenizers.said_end(
        path, tokenizer
    )
    configure(folder, "generation_config.json", eos_token_id=[own + 2, own])
    assert tokenizers.said_end(path, tokenizer) == ""


@pytest.mark.parametrize(
    ("path", "error", "words"),
    [
        ("../no/such/folder", None, "name the folder that has the model's config.json"),
        ("no-such/model", RepositoryNotFoundError, "the hub shows no such model; correct the path or the name"),
        ("no-such/model", ConnectionError, r"the hub is out of reach, if a model there is meant \(ConnectionError\)"),
    ],
)
def test_a_wrong_path_is_answered_without_the_hubs_own_words(
    monkeypatch: pytest.MonkeyPatch, path: str, error: type[Exception] | None, words: str
) -> None:
    def model_info(*_: object, **__: object) -> None:
        assert error is not None
        raise error.__new__(error, "404 Client Error: https://huggingface.co/api/models")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
    with pytest.raises(ConfigError, match=words) as refused:
        tokenizers.check_is_model(path, "model.path")
    assert "there is no such folder" in str(refused.value)
    assert "huggingface.co" not in str(refused.value)
