"""The tokenizer, and the longest sequence: facts of the model that server and trainer need before any weights."""

import hashlib
import json
from pathlib import Path
from typing import Any

from hocket.config import ModelConfig, TrainerConfig
from hocket.errors import ConfigError


def load(path: str, setting: str = "model.path") -> Any:
    """Return the Hugging Face tokenizer of the model folder or hub name in `setting`; raise ConfigError without one."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=False)  # code of its own is never run
    except (OSError, ValueError) as error:
        taken = "" if Path(path).exists() else "; there is no such folder here, so it was taken for a name on the hub"
        raise ConfigError(f"can't load a tokenizer from {setting}={path}: {error}{taken}") from error


def check_same_ids(path: str, setting: str, model: ModelConfig) -> None:
    """Raise ConfigError if a token id of both has another text in the vocabulary of the model at `path`."""
    known, others = (
        {id_: token for token, id_ in t.get_vocab().items()} for t in (load(model.path), load(path, setting))
    )
    if any(others.get(id_, token) != token for id_, token in known.items()):
        raise ConfigError(
            f"{setting}={path} has another vocabulary than model.path={model.path}: the same ids are other tokens; "
            "name a model with the same tokenizer, such as an older version"
        )


def fingerprint(tokenizer: Any) -> str:
    """Return the SHA-256 of everything that maps text to ids and back; the chat template is not part of it."""
    if tokenizer.is_fast:
        from tokenizers import Tokenizer

        backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        backend.no_padding()  # padding and truncation are settings of one caller, not of the tokenizer
        backend.no_truncation()
        content = backend.to_str()
    else:
        content = json.dumps([type(tokenizer).__name__, tokenizer.get_vocab()], sort_keys=True)
    special = json.dumps(sorted((key, str(value)) for key, value in tokenizer.special_tokens_map.items()))
    return hashlib.sha256(f"{content}\n{special}".encode()).hexdigest()


def context_length(model: ModelConfig) -> int:
    """Return the longest prompt + completion in tokens: model.max_length, or the limit in the model's own config."""
    from transformers import AutoConfig

    if model.max_length is not None:
        return model.max_length
    try:
        config = AutoConfig.from_pretrained(model.path, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ConfigError(f"can't load a model config from model.path={model.path}: {error}") from error
    length = getattr(config.get_text_config(), "max_position_embeddings", None)
    if not isinstance(length, int):
        raise ConfigError(f"the config of {model.path} names no context length; set model.max_length")
    return length


def longest_sequence(model: ModelConfig, trainer: TrainerConfig) -> int:
    """Return the longest prompt + completion in tokens that both the model and a micro-batch hold."""
    context, tokens = context_length(model), trainer.micro_batch_tokens
    return context if tokens == "auto" else min(context, tokens + 1)  # the last token is only predicted
