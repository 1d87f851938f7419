from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from hocket.trainer import flops
from hocket.trainer.ranks import Ranks
from support.tokenizers import make_tokenizer


def numbered_words() -> PreTrainedTokenizerFast:
    """Words t0 to t61 as ids 0 to 61, besides two special ones."""
    words = [*(f"t{i}" for i in range(62)), "<pad>", "<eos>"]
    return make_tokenizer(words, unknown="<pad>", pad_token="<pad>", eos_token="<eos>")


# Of two layers, with random weights large enough that every part of a model matters.
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 62,
    "eos_token_id": 63,
    "initializer_range": 0.2,
}


def make_model(folder: Path, *, tied: bool) -> str:
    """Writes a Qwen2."""
    numbered_words().save_pretrained(folder)
    torch.manual_seed(0)
    Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=tied)).save_pretrained(folder)
    return str(folder)


FAMILIES = ("Mixtral", "Olmoe", "GptOss", "GraniteMoe", "Phimoe")
"""Mixtures of experts that call an expert's width intermediate_size, as dense models do."""


def make_experts(family: str) -> PreTrainedModel:
    """Builds a model with 2 of 4 experts of width 64 for each token, on torch's default device."""
    many = {"num_experts" if family == "Olmoe" else "num_local_experts": 4, "num_experts_per_tok": 2}
    config = getattr(transformers, f"{family}Config")(
        **SIZES, **many, **({"head_dim": 8} if family == "GptOss" else {})
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config)


@pytest.fixture(autouse=True)
def peak(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainers don't measure what this machine can do, which takes each of them a tenth of a second."""
    monkeypatch.setattr(flops, "peak_flops", lambda device, dtype: 1e11)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    ranks = Ranks(timeout_s=60)
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def experts_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("models") / "experts"
    numbered_words().save_pretrained(folder)
    torch.manual_seed(0)
    experts = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **experts)).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def tied_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model(tmp_path_factory.mktemp("models") / "tied", tied=True)


@pytest.fixture(scope="session")
def untied_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model(tmp_path_factory.mktemp("models") / "untied", tied=False)
