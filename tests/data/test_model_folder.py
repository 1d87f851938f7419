"""A model folder whose parts do not belong together is refused before it is used, with all that is wrong."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from hocket.config import ModelConfig
from hocket.data import model_folder
from hocket.errors import ConfigError
from support.tokenizers import CHECKPOINTS

UP = "model.layers.0.mlp.up_proj.weight"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(CHECKPOINTS / "tiny-sort", tmp_path / "model"))


def configure(folder: Path, file: str = "config.json", **values: Any) -> None:
    path = folder / file
    known = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(known | values))


def without_up(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors.pop(UP)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def examine(folder: Path, *, trains: bool = True, **settings: Any) -> Any:
    return model_folder.examine(ModelConfig(path=str(folder), **settings), trains=trains)


@pytest.mark.parametrize("name", ["tiny-sort", "tiny-shapes", "tiny-tools"])
def test_a_model_that_ships_is_whole_and_its_tokenizer_is_returned(name: str) -> None:
    assert examine(CHECKPOINTS / name).chat_template


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (without_up, f"lack {UP}"),
        (lambda folder: configure(folder, "adapter_config.json"), "adapter_config.json beside config.json"),
        (lambda folder: (folder / "tokenizer.json").write_text(POINTER), "tokenizer.json is a pointer of git-lfs"),
        (lambda folder: (folder / "config.json").write_text(POINTER), "config.json is a pointer of git-lfs"),
        (lambda folder: (folder / "model.safetensors").unlink(), "it has no weights in model.safetensors"),
        (
            lambda folder: (folder / "model.safetensors").rename(folder / "consolidated.safetensors"),
            "pytorch_model.bin, only consolidated.safetensors",
        ),
        (lambda folder: configure(folder, vocab_size=4), "the tokenizer has ids up to"),
        (lambda folder: configure(folder, quantization_config={"quant_method": "awq"}), r"are quantized \(awq\)"),
    ],
)
def test_what_is_wrong_with_a_folder_is_named(folder: Path, how: Callable[[Path], object], words: str) -> None:
    how(folder)
    with pytest.raises(ConfigError, match=words) as refused:
        examine(folder)
    assert f"model.path={folder}" in str(refused.value)


def test_a_head_that_is_tied_in_one_place_alone_is_refused(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(CHECKPOINTS / "tiny-shapes", tmp_path / "model"))
    text = json.loads((folder / "config.json").read_text())["text_config"]
    configure(folder, tie_word_embeddings=True, text_config=text | {"tie_word_embeddings": False})
    with pytest.raises(ConfigError, match="tie_word_embeddings=true, and false in its text_config"):
        examine(folder)


def test_all_findings_are_in_one_message_each_on_a_line(folder: Path) -> None:
    without_up(folder)
    configure(folder, "adapter_config.json")
    with pytest.raises(ConfigError, match="can't be used as it is") as refused:
        examine(folder, max_length=1 << 20)
    first, *lines = str(refused.value).splitlines()
    assert first == f"model.path={folder} can't be used as it is:"
    assert [next(word for word in ("adapter", UP, "positions") if word in line) for line in lines] == [
        "adapter",
        UP,
        "positions",
    ]


def test_a_server_takes_what_only_vllm_reads_and_a_random_model_needs_no_weights(folder: Path) -> None:
    configure(folder, quantization_config={"quant_method": "awq"})
    assert examine(folder, trains=False)
    (folder / "model.safetensors").rename(folder / "consolidated.safetensors")
    assert examine(folder, trains=False)
    (folder / "consolidated.safetensors").unlink()
    with pytest.raises(ConfigError, match="it has no weights"):
        examine(folder, trains=False)
    configure(folder, quantization_config=None)
    assert examine(folder, random_init=True)
    without = folder.with_name("other")
    shutil.copytree(CHECKPOINTS / "tiny-sort", without)
    without_up(without)
    with pytest.raises(ConfigError, match=UP):
        examine(without, trains=False)
