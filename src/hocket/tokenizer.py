"""What both processes must know alike of a model before either loads its weights: tokenizer and context length."""

import hashlib
import json
from typing import TYPE_CHECKING

from hocket.config import Config
from hocket.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(path: str) -> "PreTrainedTokenizerBase":
    """Returns the tokenizer of a model folder or hub name. Raises ConfigError where there is none."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"can't load a tokenizer from model.path={path}: {error}") from error


def tokenizer_sha256(tokenizer: "PreTrainedTokenizerBase") -> str:
    """Returns a digest of the vocabulary, token by id: equal digests mean that ids mean the same on both sides."""
    vocabulary = sorted((index, token) for token, index in tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest()


def context_length(config: Config) -> int:
    """Returns the longest prompt + completion in tokens: model.max_length, or what the model's own config allows."""
    from transformers import AutoConfig

    if config.model.max_length is not None:
        return config.model.max_length
    try:
        model = AutoConfig.from_pretrained(config.model.path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"can't load a model config from model.path={config.model.path}: {error}") from error
    length = getattr(model, "max_position_embeddings", None)
    if not isinstance(length, int):
        raise ConfigError(f"the config of {config.model.path} names no context length; set model.max_length")
    return length
