"""Tokenizers whose ids a test can count, the ones that ship, and chat templates in the shape of well-known ones."""

import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

CHECKPOINTS = Path(__file__).parents[2] / "checkpoints"

# How a text is split before words are looked up.
WORDS = pre_tokenizers.Whitespace()
CHARACTERS = pre_tokenizers.Split(Regex("."), "isolated")
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
"""One word for each byte, as BYTES writes it."""
SPECIAL = ("<|im_start|>", "<|im_end|>")


def make_tokenizer(
    words: Sequence[str],
    template: str | None = None,
    *,
    split: Any = WORDS,
    unknown: str | None = None,
    merges: Sequence[tuple[str, str]] | None = None,
    before: str = "",
    **special: Any,
) -> PreTrainedTokenizerFast:
    """Returns a tokenizer in which a word's id is its place in `words`.

    unknown: the word in the place of one that is not in `words`; `unk_token`, if that is given.
    merges: makes it one of pieces (BPE), which are merged so.
    before: the word that stands before whatever is encoded.
    special: what transformers' class takes, as bos_token, eos_token and pad_token.
    """
    vocabulary = {word: number for number, word in enumerate(words)}
    unknown = unknown or special.get("unk_token")
    by_words = merges is None
    model = models.WordLevel(vocabulary, unk_token=unknown) if by_words else models.BPE(vocabulary, list(merges or ()))
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = split
    if split is CHARACTERS:
        tokenizer.decoder = decoders.Fuse()
    elif split is BYTES:
        tokenizer.decoder = decoders.ByteLevel()
    if before:
        known = [(before, vocabulary[before])]
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{before} $A", special_tokens=known)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    fast.chat_template = template
    return fast


def with_merged_bytes() -> PreTrainedTokenizerFast:
    """Returns a byte-level BPE as large models have: a token may have a part of a character, and text before it."""
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("Ġ", "ð"), ("ð", "Ł"), ("ã", "ģ"), ("<", "/"), ("Ċ", "Ċ")]
    words = dict.fromkeys([*SPECIAL, *ALPHABET, *(one + other for one, other in merges)])
    tokenizer = make_tokenizer([*words], split=BYTES, merges=merges, eos_token="<|im_end|>")
    tokenizer.add_tokens([*SPECIAL], special_tokens=True)
    tokenizer.add_tokens(["<tool>"])
    return tokenizer


def with_byte_fallback() -> PreTrainedTokenizerFast:
    """Returns one like Llama 2's: characters that it does not know are bytes, and a text begins with a space."""
    merges = [("▁", "t"), ("t", "h"), ("th", "e"), ("▁", "the"), ("▁", "▁"), ("<", "/"), ("E", "N")]
    letters = '▁abcdefghijklmnopqrstuvwxyzABCDENOPST_.,:</>{}"é\n'
    byte_words = [f"<0x{byte:02X}>" for byte in range(256)]
    words = dict.fromkeys(["<unk>", *SPECIAL, *byte_words, *letters, *(one + other for one, other in merges)])
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<|im_end|>")
    fast.add_tokens([*SPECIAL], special_tokens=True)
    fast.add_tokens(["<tool>"])
    return fast


PIECES = ("a", "b", "the", " the", "EN", "END", "STOP", "</x>", " ", "  ", "\n\n", "<tool>")
PIECES += ("é", "e\u0301", "🤖", "👩\u200d🚀", "日本")


def random_text(rng: random.Random, most: int = 12) -> str:
    """Returns a text of one to `most` pieces, some of which are several tokens, or characters of several bytes."""
    return "".join(rng.choice(PIECES) for _ in range(rng.randint(1, most)))


def pieces_of(tokenizer: Any, text: str) -> list[int]:
    """Returns a text's tokens within another text, without a space that the tokenizer puts before each."""
    ids = list[int]()
    for part in re.split(f"({'|'.join(map(re.escape, SPECIAL))})", text):
        if part in SPECIAL:
            ids.append(tokenizer.convert_tokens_to_ids(part))
        else:
            before = tokenizer.encode("a", add_special_tokens=False)
            ids += tokenizer.encode(f"a{part}", add_special_tokens=False)[len(before) :]
    return ids


def random_ids(tokenizer: Any, rng: random.Random) -> list[int]:
    """Returns the tokens of a random text, with up to two special ones among them, which may divide a character."""
    ids = pieces_of(tokenizer, random_text(rng, 16))
    for _ in range(rng.choice((0, 0, 1, 2))):
        ids.insert(rng.randrange(len(ids) + 1), tokenizer.convert_tokens_to_ids(rng.choice(SPECIAL)))
    return ids


def shipped(name: str = "tiny-sort", **changes: Any) -> Any:
    """Returns the tokenizer of a model in checkpoints/, with changes; that of tiny-sort has one token per byte."""
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINTS / name)
    for attribute, value in changes.items():
        setattr(tokenizer, attribute, value)
    return tokenizer


def of_tags(template: str) -> PreTrainedTokenizerFast:
    """Returns one of bytes, in which every tag of the templates below is one token."""
    thoughts = ["<think>", "</think>"]  # which a decoded text shows
    tags = ["<|im_start|>", "<|im_end|>", "<|User|>", "<|Assistant|>"]
    tags += ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<start_of_turn>", "<end_of_turn>", "[INST]"]
    tags += ["<tool_call>", "<|call|>", "<|return|>"]
    words = ["<s>", "</s>", *thoughts, *tags, *ALPHABET]
    tokenizer = make_tokenizer(words, template, split=BYTES, merges=(), bos_token="<s>", eos_token="</s>")
    tokenizer.add_tokens(thoughts)
    tokenizer.add_tokens(tags, special_tokens=True)
    return tokenizer


IM = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
IM_NEXT = "{% if add_generation_prompt %}<|im_start|>assistant\n"
HEADER = "<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>"
TEMPLATES = {
    "Qwen2.5": "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are helpful.<|im_end|>\n{% endif %}"
    + IM
    + IM_NEXT
    + "{% endif %}",
    "Qwen3": IM
    + IM_NEXT
    + "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}",
    "Qwen3-Thinking": IM + IM_NEXT + "<think>\n{% endif %}",
    "R1-Distill": "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<|User|>{{ m.content }}"
    "{% else %}<|Assistant|>{{ m.content.split('</think>')[-1] }}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|Assistant|><think>\n{% endif %}",
    "Llama-3": "{{ bos_token }}{% for m in messages %}"
    + HEADER
    + "{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
    "Gemma": "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}"
    "{{ raise_exception('no system role') }}{% endif %}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end_of_turn>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
    "Mistral": "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}",
}
OFF = {"enable_thinking": False}
STOCK = (  # as Qwen3's: thoughts are kept behind the last question alone, an empty one is added to the last message
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}{% set ns = namespace(last=0) %}"
    "{% for m in messages if m.role == 'user' %}{% set ns.asked = m %}{% endfor %}"
    "{% for m in messages %}{% if m == ns.asked %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% set thought = m.reasoning_content or '' %}"
    "{% if m.role == 'assistant' and loop.index0 > ns.last and (loop.last or thought) %}"
    "<think>\n{{ thought }}\n</think>\n\n{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls %}<tool_call>{{ c.function | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HARMONY = (  # as gpt-oss's: what ends a turn depends on what it is, and on what follows
    "{% for m in messages %}<|im_start|>{{ m.role }}:{{ m.content }}{% if m.tool_calls %}<tool_call><|call|>"
    "{% elif m.role == 'assistant' and loop.last and not add_generation_prompt %}<|return|>"
    "{% else %}<|im_end|>{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant:{% endif %}"
)
