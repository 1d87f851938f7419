"""The tokenizer and the longest sequence: what server and trainer need before any weights."""

import contextlib
import hashlib
import json
import math
from pathlib import Path
from typing import Any

from hocket.common.files import kind_of
from hocket.common.shell import hub_variables
from hocket.config import ModelConfig, TrainerConfig
from hocket.errors import ConfigError, door


def load(path: str, setting: str = "model.path") -> Any:
    """Return the tokenizer of a model folder or hub name. Raise ConfigError without one."""
    from transformers import AutoTokenizer

    check_is_model(path, setting)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)  # code of its own is never run
    except (OSError, ValueError) as error:
        raise ConfigError(f"can't load a tokenizer from {setting}={path}: {error}") from error
    unused = (tokenizer.pad_token_id, tokenizer.unk_token_id)  # transformers adds them
    config = _config(path, setting)
    tokenizer.placeholder = getattr(config, "image_token_id", None)  # of a model that takes images
    size = getattr(config.get_text_config(), "vocab_size", math.inf)
    largest = max((id_ for id_ in tokenizer.get_vocab().values() if id_ not in unused), default=-1)
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
        raise ConfigError(f"{setting}={path} has no tokenizer: put the model's tokenizer.json beside its config.json")
    if largest >= size:
        raise ConfigError(
            f"{setting}={path}: the tokenizer has ids up to {largest}, the model embeds only {size} tokens: "
            f"use the model's own tokenizer, or transformers' resize_token_embeddings({largest + 1})"
        )
    return tokenizer


def check_is_model(path: str, setting: str) -> None:
    """Raise ConfigError unless `path` is a model's folder or known to the hub."""
    from huggingface_hub import HfApi, try_to_load_from_cache

    folder = Path(path)
    if folder.exists():
        kind = kind_of(folder)
        if kind in ("adapter", "checkpoint"):
            advice = f"make one of it: {door()} export {path} OUTPUT"
            raise ConfigError(f"{setting}={path} holds one {kind}, not a model; {advice}")
        if kind != "model":
            raise ConfigError(f"{setting}={path} is no model: it has no config.json")
        return
    try:
        if try_to_load_from_cache(path, "config.json") is None:
            HfApi().model_info(path, timeout=10)
    except Exception as error:
        missing = f"there is no such folder (paths are relative to {Path.cwd()})"
        raise ConfigError(
            f"{setting}={path}: {missing}, and the hub has no such model, or is out of reach: {error}{hub_variables()}"
        ) from error


def check_same_ids(path: str, setting: str, model: ModelConfig) -> None:
    tokens = {id_: token for token, id_ in load(path, setting).get_vocab().items()}
    if any(tokens.get(id_, token) != token for token, id_ in load(model.path).get_vocab().items()):
        raise ConfigError(
            f"{setting}={path} has another vocabulary than model.path={model.path}: the same ids are other tokens; "
            "name one with the same tokenizer"
        )


def fingerprint(tokenizer: Any) -> str:
    """Return the SHA-256 of all that maps text to ids and back; not of the chat template."""
    if tokenizer.is_fast:
        from tokenizers import Tokenizer

        backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        backend.no_padding()  # settings of a caller
        backend.no_truncation()
        content = backend.to_str()
    else:
        content = json.dumps([type(tokenizer).__name__, tokenizer.get_vocab()], sort_keys=True)
    special = json.dumps(sorted((key, str(value)) for key, value in tokenizer.special_tokens_map.items()))
    return hashlib.sha256(f"{content}\n{special}".encode()).hexdigest()


def _config(path: str, setting: str) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ConfigError(f"can't load a model config from {setting}={path}: {error}") from error


def end_ids(path: str, tokenizer: Any) -> set[int]:
    """Return the ids that end an answer, of tokenizer, config and generation config."""
    from transformers import GenerationConfig

    config = _config(path, "model.path").get_text_config()
    named = [tokenizer.eos_token_id, tokenizer.placeholder, getattr(config, "eos_token_id", None)]
    with contextlib.suppress(OSError):  # many models have none
        named.append(GenerationConfig.from_pretrained(path).eos_token_id)
    return {one for ids in named for one in (ids if isinstance(ids, list) else [ids])}


def context_length(model: ModelConfig) -> int:
    """Return the longest prompt + completion in tokens."""
    if model.max_length is not None:
        return model.max_length
    length = getattr(_config(model.path, "model.path").get_text_config(), "max_position_embeddings", None)
    if not isinstance(length, int):
        raise ConfigError(f"the config of {model.path} names no context length; set model.max_length")
    return length


def longest_sequence(model: ModelConfig, trainer: TrainerConfig) -> tuple[int, str]:
    """Return the longest prompt + completion, in tokens, of model and micro-batch, and the limit's name."""
    context = context_length(model)
    tokens = trainer.micro_batch_tokens
    if tokens == "auto" or context <= tokens + 1:  # the last token is only predicted
        return context, f"the context of {context} tokens (model.max_length, or the model's own)"
    return tokens + 1, f"trainer.micro_batch_tokens={tokens}"
