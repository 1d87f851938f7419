"""The embedded policy as it ships: what hocket and vLLM rely on."""

import json
import string
from pathlib import Path
from typing import Any

import pytest

CHECKPOINT = Path(__file__).parents[2] / "checkpoints" / "tiny-sort"


def test_any_text_survives_the_tokenizer_and_printable_ascii_is_one_token_each(tokenizer: Any) -> None:
    assert len(tokenizer.encode(string.printable.strip())) == len(string.printable.strip())
    for text in (string.printable, "Grüße, 你好 🎉\x00\t", "", " a  b ", "<|user"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_model_has_a_row_for_every_token_and_no_other(tokenizer: Any) -> None:
    config = json.loads((CHECKPOINT / "config.json").read_text(encoding="utf-8"))
    assert len(tokenizer) == config["vocab_size"]
    assert config["hidden_size"] % config["num_attention_heads"] == 0
    assert config["hidden_size"] // config["num_attention_heads"] == 32
    assert config["tie_word_embeddings"] is True
    assert config["max_position_embeddings"] >= 512


def test_model_tokenizer_and_generation_agree_on_how_a_turn_ends(tokenizer: Any) -> None:
    for name in ("config.json", "generation_config.json"):
        settings = json.loads((CHECKPOINT / name).read_text(encoding="utf-8"))
        assert settings["eos_token_id"] == tokenizer.eos_token_id
        assert settings["pad_token_id"] == tokenizer.pad_token_id != tokenizer.eos_token_id
    messages = [{"role": "user", "content": "Sort: ba"}, {"role": "assistant", "content": "ab"}]
    assert tokenizer.apply_chat_template(messages)["input_ids"][-1] == tokenizer.eos_token_id


def test_the_template_knows_three_roles(tokenizer: Any) -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert rendered == "<|system|>s<|end|><|user|>u<|end|><|assistant|>"
    with pytest.raises(Exception, match="roles are system, user and assistant"):
        tokenizer.apply_chat_template([{"role": "tool", "content": "x"}])


def test_the_folder_is_small() -> None:
    assert sum(file.stat().st_size for file in CHECKPOINT.iterdir()) < 2_000_000
