"""What weight files hold, by their headers, and how it differs from what config.json describes."""

import json
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from hocket.protocol import model_files

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
EXPERTS = {"moe_intermediate_size": 40, "num_experts": 4, "num_experts_per_tok": 2}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "qk_nope_head_dim": 8}
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
UP = "model.layers.1.mlp.up_proj.weight"
Tensors = dict[str, torch.Tensor]


def make(folder: Path, family: str = "Llama", **more: Any) -> Path:
    sharded = {"max_shard_size": more.pop("max_shard_size", "1GB")}
    config = getattr(transformers, f"{family}Config")(**SIZES, **more)
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder, **sharded)
    return folder


def change(folder: Path, how: Callable[[Tensors], object]) -> Path:
    """Changes the tensors of a folder's only file."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    how(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
    return folder


def problems_of(folder: Path, **options: Any) -> list[str]:
    files, problems = model_files.weight_files(str(folder))
    shapes, damaged = model_files.read_headers(files)
    loaded = model_files.load_on_meta(str(folder), shapes)
    assert all(parameter.is_meta for parameter in loaded.model.parameters())
    differ = model_files.differences(loaded.report, **options)
    return [*problems, *damaged, *differ, *model_files.untied(loaded, files, shapes)]


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("Llama", {"tie_word_embeddings": True}),
        ("Llama", {"tie_word_embeddings": False, "max_shard_size": "20KB"}),
        ("Qwen3Moe", EXPERTS),
        ("Mixtral", {"num_local_experts": 4}),
        ("DeepseekV3", {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 16, **LATENT}),
        ("OPT", {"word_embed_proj_dim": 32, "ffn_dim": 64}),
        ("GPTNeoX", {}),
    ],
)
def test_what_transformers_saves_is_whole(tmp_path: Path, family: str, more: dict[str, Any]) -> None:
    assert problems_of(make(tmp_path, family, **more)) == []


def test_old_names_old_buffers_and_layers_that_an_architecture_ignores_are_no_findings(tmp_path: Path) -> None:
    gpt2 = transformers.GPT2Config(vocab_size=96, n_embd=32, n_layer=1, n_head=2, n_positions=64)
    transformers.AutoModel.from_config(gpt2).save_pretrained(tmp_path / "gpt2")  # without the prefix and the head
    change(tmp_path / "gpt2", lambda tensors: tensors.update({"h.0.attn.bias": torch.ones(1, 1, 64, 64)}))
    assert problems_of(tmp_path / "gpt2") == []
    make(tmp_path / "llama")
    inverse = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    assert problems_of(change(tmp_path / "llama", lambda tensors: tensors.update(inverse))) == []
    shallow = {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 16, **LATENT}
    make(tmp_path / "deepseek", "DeepseekV3", **shallow)
    predicted = {"model.layers.61.eh_proj.weight": torch.ones(32, 64)}  # DeepSeek's layer that predicts further tokens
    assert problems_of(change(tmp_path / "deepseek", lambda tensors: tensors.update(predicted))) == []


@pytest.mark.parametrize(
    ("family", "more", "how", "words"),
    [
        ("Llama", {}, lambda t: t.pop(UP), f"lack {UP}, which transformers would draw at random"),
        ("Llama", {"tie_word_embeddings": False}, lambda t: t.pop(HEAD), "set tie_word_embeddings to true"),
        ("Llama", {"tie_word_embeddings": True}, lambda t: t.pop(EMBEDDING), f"lack .*{EMBEDDING}"),
        ("Llama", {}, lambda t: t.update({"v_head.weight": torch.ones(1, 32)}), "have v_head.weight, which the model"),
        ("Llama", {}, lambda t: t.update({UP: torch.ones(60, 32)}), rf"{UP} in the shape \[60, 32\].*says \[64, 32\]"),
        ("Qwen3Moe", EXPERTS, lambda t: t.pop(UP.replace("up_", "experts.2.up_")), r"lack .*1\.mlp\.experts\.2\.up"),
        (
            "Llama",
            {"tie_word_embeddings": True},
            lambda t: t.update({HEAD: t[EMBEDDING] + 1}),
            f"ties {HEAD} to {EMBEDDING}, but its files have different ones",
        ),
    ],
)
def test_a_tensor_that_lacks_is_too_many_or_differs_is_named(
    tmp_path: Path, family: str, more: dict[str, Any], how: Callable[[Tensors], object], words: str
) -> None:
    (problem,) = problems_of(change(make(tmp_path, family, **more), how))
    assert re.search(words, problem), problem


def test_a_head_that_is_not_used_may_lack_or_be_another(tmp_path: Path) -> None:
    folder = change(make(tmp_path, tie_word_embeddings=False), lambda tensors: tensors.pop(HEAD))
    assert problems_of(folder, head=False) == []
    change(folder, lambda tensors: tensors.update({"score.weight": torch.ones(1, 32)}))
    assert problems_of(folder, head=False) == []
    assert len(problems_of(folder)) == 2


def test_a_tied_head_that_equals_the_embedding_is_right_also_in_a_pickled_file(tmp_path: Path) -> None:
    folder = change(make(tmp_path, tie_word_embeddings=True), lambda t: t.update({HEAD: t[EMBEDDING].clone()}))
    assert problems_of(folder) == []
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    assert problems_of(folder) == []
    torch.save({**tensors, HEAD: tensors[HEAD] * 2}, folder / "pytorch_model.bin")
    (problem,) = problems_of(folder)
    assert "different ones" in problem
    tensors.pop(UP)
    torch.save(tensors, folder / "pytorch_model.bin")
    (problem,) = problems_of(folder)
    assert UP in problem


def rewrite(folder: Path, content: Callable[[bytes], bytes]) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(content(path.read_bytes()))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (lambda whole: whole[:-100], "model.safetensors is cut off or damaged (its header promises"),
        (lambda whole: whole[:20], "its header takes"),
        (lambda whole: b"", "is cut off or damaged"),
        (lambda whole: struct.pack("<Q", 4) + b"oops" + whole, "is cut off or damaged"),
        (lambda whole: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "a pointer of git-lfs"),
    ],
)
def test_a_file_that_is_not_whole_is_named(tmp_path: Path, content: Callable[[bytes], bytes], words: str) -> None:
    rewrite(make(tmp_path), content)
    files, _ = model_files.weight_files(str(tmp_path))
    shapes, (problem,) = model_files.read_headers(files)
    assert shapes == {}
    assert words in problem


def test_shards_that_lack_and_two_sets_of_weights_are_named(tmp_path: Path) -> None:
    make(tmp_path / "sharded", max_shard_size="20KB")
    first = tmp_path / "sharded" / "model-00001-of-00007.safetensors"
    first.rename(tmp_path / "model.safetensors")
    assert model_files.weight_files(str(tmp_path / "sharded"))[1] == [
        f"model.safetensors.index.json names {first.name}, which the folder lacks; copy or download it again"
    ]
    (tmp_path / "model.safetensors").rename(first)
    make(tmp_path / "whole")
    (tmp_path / "whole" / "model.safetensors").rename(tmp_path / "sharded" / "model.safetensors")
    (problem,) = model_files.weight_files(str(tmp_path / "sharded"))[1]
    assert "two sets of weights" in problem
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "model.safetensors.index.json").write_text(json.dumps({"weights": 1}))
    (problem,) = model_files.weight_files(str(tmp_path / "broken"))[1]
    assert "is no index of weight files" in problem
    assert model_files.weight_files(str(tmp_path)) == ([], [])
