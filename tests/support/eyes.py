"""Tiny models that see: a random Idefics3, which vLLM serves on CPUs, and a Qwen2.5-VL, for the trainer alone."""

import random
from pathlib import Path
from typing import Any

import torch
from PIL import Image as Pictures
from transformers import (
    AutoModelForImageTextToText,
    Idefics3Config,
    Idefics3Processor,
    Qwen2_5_VLConfig,
)
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from hocket.common.vision import png
from support.tokenizers import shipped

IMAGE_TOKENS = 4  # of each picture of the Idefics3
TEMPLATE = """{%- for message in messages -%}
{%- if message['role'] not in ['system', 'user', 'assistant'] -%}
{{- raise_exception('roles are system, user and assistant, got ' ~ message['role']) -}}
{%- endif -%}
{{- '<|' ~ message['role'] ~ '|>' -}}
{%- if message['content'] is string -%}{{- message['content'] -}}
{%- else -%}
{%- for part in message['content'] -%}{{- '<image>' if part['type'] == 'image' else part['text'] -}}{%- endfor -%}
{%- endif -%}
{{- '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""


def picture(seed: int, width: int = 40, height: int = 64) -> bytes:
    """Returns the file of a picture of random pixels."""
    image = Pictures.frombytes("RGB", (width, height), random.Random(seed).randbytes(3 * width * height))
    return png(image)


def make_tokenizer() -> Any:
    """Returns the tokenizer of tiny-sort with the words for pictures."""
    tokenizer = shipped(chat_template=TEMPLATE)
    more = ["<image>", "<fake_token_around_image>", "<global-img>"]
    tokenizer.add_special_tokens({"extra_special_tokens": [*tokenizer.extra_special_tokens, *more]})
    return tokenizer


def make_idefics(folder: Path) -> str:
    """Writes a random Idefics3 of half a million parameters, with its processor: the prompt's `<image>` is 7 tokens."""
    tokenizer = make_tokenizer()
    size = {"longest_edge": 64}
    pictures = Idefics3ImageProcessorPil(size=size, max_image_size=size, do_image_splitting=False)
    processor = Idefics3Processor(
        image_processor=pictures, tokenizer=tokenizer, image_seq_len=IMAGE_TOKENS, chat_template=TEMPLATE
    )
    config = Idefics3Config(
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=4,
        tie_word_embeddings=True,
        pad_token_id=0,
        vision_config={
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "image_size": 64,
            "patch_size": 8,
            "max_image_size": size,
        },
        text_config={
            "model_type": "llama",
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "max_position_embeddings": 512,
            "vocab_size": len(tokenizer),
            "tie_word_embeddings": True,
            "pad_token_id": 0,
            "bos_token_id": None,
            "eos_token_id": 1,
            "rms_norm_eps": 1e-6,
        },
    )
    write(config, folder, initializer_range=0.1)
    processor.save_pretrained(folder)
    return str(folder)


def make_qwen(folder: Path) -> str:
    """Writes a random Qwen2.5-VL; a picture of 40 x 64 is 2 x 2 tokens, one of 56 x 56 as many as its pixels allow."""
    tokenizer = make_tokenizer()
    config = Qwen2_5_VLConfig(
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        video_token_id=tokenizer.convert_tokens_to_ids("<global-img>"),
        vision_start_token_id=tokenizer.convert_tokens_to_ids("<fake_token_around_image>"),
        vision_end_token_id=tokenizer.convert_tokens_to_ids("<fake_token_around_image>"),
        tie_word_embeddings=True,
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 64,
            "depth": 2,
            "num_heads": 4,
            "patch_size": 8,
            "window_size": 32,
            "out_hidden_size": 64,
            "fullatt_block_indexes": [1],
        },
        text_config={
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
            "vocab_size": len(tokenizer),
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
        },
    )
    write(config, folder, initializer_range=0.1)
    tokenizer.save_pretrained(folder)
    size = {"shortest_edge": 16 * 16, "longest_edge": 64 * 64}
    Qwen2VLImageProcessorPil(size=size, patch_size=8).save_pretrained(folder)
    return str(folder)


def write(config: Any, folder: Path, *, initializer_range: float) -> None:
    """Writes a model of random weights, large enough that every part matters."""
    config.text_config.initializer_range = config.vision_config.initializer_range = initializer_range
    config.initializer_range = initializer_range
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(config, dtype=torch.float32).save_pretrained(folder)
