"""The size of a CPU server's KV cache, worked out by hand."""

import json
import struct
from pathlib import Path

import pytest
from transformers import AutoConfig

from hocket.config import load
from hocket.errors import ConfigError
from hocket.server.kv_cache import cpu_kv_cache, refuse_large_model


@pytest.fixture
def model() -> str:
    return str(Path(__file__).parents[2] / "checkpoints" / "tiny-sort")


def test_the_kv_cache_of_a_cpu_holds_the_longest_sequence_or_the_lack_of_memory_is_said(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def size(path: str | Path, *settings: str) -> int:
        return cpu_kv_cache(load(None, [f"model.path={path}", *settings]))

    config = AutoConfig.from_pretrained(model)
    heads, layers = config.num_key_value_heads, config.num_hidden_layers
    token = 2 * layers * heads * (config.hidden_size // config.num_attention_heads) * 4  # bytes
    length = (1 << 30) // token  # a GiB, with a block that vLLM keeps
    config.max_position_embeddings = 3 * length
    config.save_pretrained(tmp_path)
    monkeypatch.setattr("hocket.common.machine.free_memory", lambda: 2 << 30)
    assert size(model, "model.max_length=64") == 256 << 20
    assert size(model, "server.kv_cache_mib=17") == 17 << 20
    blocks = -(-length // 32) + 1
    assert size(tmp_path, f"model.max_length={length}") == blocks * 32 * token
    assert size(tmp_path, f"model.max_length={length}", "model.dtype=bfloat16") == blocks * 32 * token // 2
    large = -(-length // 128) + 1
    assert size(tmp_path, f"model.max_length={length}", "server.engine={block_size: 128}") == large * 128 * token
    with pytest.raises(ConfigError, match=r"takes 3,072 MiB, more than .*, 2,048 MiB: set model\.max_length="):
        size(tmp_path)


def test_the_kv_cache_of_a_cpu_holds_a_step_whose_groups_share_their_prompts(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = AutoConfig.from_pretrained(model)
    layers, config.max_position_embeddings = config.num_hidden_layers, 4096
    config.head_dim = 4096
    config.save_pretrained(tmp_path)
    block = 2 * layers * config.num_key_value_heads * 4096 * 4 * 32
    monkeypatch.setattr("hocket.common.machine.free_memory", lambda: 1 << 50)

    def blocks(prompts: int, group: int, tokens: int) -> float:
        settings = [
            f"rollout.prompts_per_step={prompts}",
            f"rollout.group_size={group}",
            f"rollout.max_tokens={tokens}",
        ]
        return cpu_kv_cache(load(None, [f"model.path={tmp_path}", *settings])) / block

    # A prompt of 512 tokens has 16 blocks of 32. 24 tokens behind it touch 2 blocks, 128 tokens 5.
    assert blocks(8, 16, 24) == 8 * (16 + 16 * 2)
    assert blocks(8, 16, 128) == 8 * (16 + 16 * 5)
    assert blocks(1000, 16, 24) == blocks(16, 16, 24)  # the engine runs 256 sequences at a time
    assert blocks(1, 2, 24) == 1 + 4096 / 32  # a whole sequence
    monkeypatch.setattr("hocket.common.machine.free_memory", lambda: 700 * 4 * block)
    assert blocks(16, 16, 128) == 700  # at most a quarter of what is free


def test_a_server_whose_weights_have_no_room_beside_the_kv_cache_is_refused_with_what_halves_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    size = 3 << 28  # of the file's numbers: 3 GiB in float32
    header = json.dumps({"w": {"dtype": "BF16", "shape": [3, 1 << 28], "data_offsets": [0, 2 * size]}}).encode()
    AutoConfig.from_pretrained(model).save_pretrained(tmp_path)
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + 2 * size)  # a hole, which takes no place on the disk
    config = load(None, [f"model.path={tmp_path}", "server.kv_cache_mib=512"])
    monkeypatch.setattr("hocket.common.machine.free_memory", lambda: 7 << 29)
    refuse_large_model(config)
    monkeypatch.setattr("hocket.common.machine.free_memory", lambda: (7 << 29) - 1)
    with pytest.raises(
        ConfigError,
        match=r"3,072 MiB.* 512, more than the 3,583 MiB .* or lower server.kv_cache_mib, or set model.dtype=bfloat16",
    ):
        refuse_large_model(config)
    refuse_large_model(load(None, [f"model.path={tmp_path}", "server.kv_cache_mib=512", "model.dtype=bfloat16"]))
