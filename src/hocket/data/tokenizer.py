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
from hocket.data.template import end_of_turn
from hocket.errors import ConfigError, door


def load(path: str, setting: str = "model.path") -> Any:
    """Return the tokenizer of a model folder or hub name. Raise ConfigError without one, or one of another model."""
    from transformers import AutoTokenizer

    check_is_model(path, setting)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            path, trust_remote_code=False
        )  # code of its own is never run
    except (OSError, ValueError) as error:
        raise ConfigError(f"can't load a tokenizer from {setting}={path}: {error}") from error
    unused = (tokenizer.pad_token_id, tokenizer.unk_token_id)  # transformers adds them
    config = config_of(path, setting)
    tokenizer.placeholder = getattr(config, "image_token_id", None)  # of a model that takes images
    size = getattr(config.get_text_config(), "vocab_size", math.inf)
    largest = max((id_ for id_ in tokenizer.get_vocab().values() if id_ not in unused), default=-1)
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
        raise ConfigError(
            f"{setting}={path} has no tokenizer: put the model's tokenizer.json beside its config.json"
        )
    if largest >= size:
        raise ConfigError(
            f"{setting}={path}: the tokenizer has ids up to {largest}, the model embeds only {size} tokens: "
            f"use the model's own tokenizer, or transformers' resize_token_embeddings({largest + 1})"
        )
    return tokenizer


def check_is_model(path: str, setting: str) -> None:
    """Raise ConfigError unless `path` is a model's folder or known to the hub."""
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    folder = Path(path)
    if folder.exists():
        kind = kind_of(folder)
        if kind in ("adapter", "checkpoint"):
            advice = f"make one of it: {door()} export {path} OUTPUT"
            raise ConfigError(f"{setting}={path} holds one {kind}, not a model; {advice}")
        if kind != "model":
            raise ConfigError(f"{setting}={path} is no model: it has no config.json")
        return
    missing = f"{setting}={path}: there is no such folder (paths are relative to {Path.cwd()})"
    try:
        if try_to_load_from_cache(path, "config.json") is None:
            HfApi().model_info(path, timeout=10)
    except HFValidationError as error:  # a path, which can't be a name there
        raise ConfigError(f"{missing}; name the folder that has the model's config.json") from error
    except RepositoryNotFoundError as error:
        advice = "correct the path or the name, or set HF_TOKEN for a private model"
        raise ConfigError(f"{missing}, and the hub shows no such model; {advice}") from error
    except Exception as error:
        advice = "correct the path, or download the model where the hub can be reached"
        raise ConfigError(
            f"{missing}, and the hub is out of reach, if a model there is meant ({type(error).__name__}"
            f"{hub_variables()}); {advice}"
        ) from error


def check_same_ids(tokenizer: Any, what: str, model: ModelConfig) -> None:
    """Raise ConfigError where the tokenizer of `what` has other tokens for the ids of the model's."""
    tokens = {id_: token for token, id_ in tokenizer.get_vocab().items()}
    if any(tokens.get(id_, token) != token for token, id_ in load(model.path).get_vocab().items()):
        raise ConfigError(
            f"{what} has another vocabulary than model.path={model.path}: the same ids are other tokens; "
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
    special = json.dumps(
        sorted((key, str(value)) for key, value in tokenizer.special_tokens_map.items())
    )
    return hashlib.sha256(f"{content}\n{special}".encode()).hexdigest()


def config_of(path: str, setting: str = "model.path") -> Any:
    """Return transformers' config of a model. Raise ConfigError without one."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ConfigError(f"can't load a model config from {setting}={path}: {error}") from error


def end_ids(path: str, tokenizer: Any) -> set[int]:
    """Return the ids that end an answer: those of the model, and the end of its chat template's turns."""
    ends = _own_ends(path, tokenizer) | {added_end(path, tokenizer)}
    return {id_ for id_ in ends if id_ is not None}


def added_end(path: str, tokenizer: Any) -> int | None:
    """Return the token that ends turns in the chat template, if it is no end of the model; else None.

    A base model with a template is such a case: its answers would never end.
    """
    end = end_of_turn(tokenizer)
    return None if end in _own_ends(path, tokenizer) else end


def said_end(path: str, tokenizer: Any) -> str:
    """Say which token is added to the model's ends; "" for none."""
    end = added_end(path, tokenizer)
    if end is None:
        return ""
    token = tokenizer.convert_ids_to_tokens(end)
    return (
        f"the chat template ends turns with {token!r}, which is no end of {path} (its eos is {tokenizer.eos_token!r}): "
        "answers end there, too, and the generation_config.json of what is written says so"
    )


def _own_ends(path: str, tokenizer: Any) -> set[int | None]:
    """Return the ids that tokenizer, config and generation config name."""
    from transformers import GenerationConfig

    config = config_of(path).get_text_config()
    named = [tokenizer.eos_token_id, tokenizer.placeholder, getattr(config, "eos_token_id", None)]
    with contextlib.suppress(OSError):  # many models have none
        named.append(GenerationConfig.from_pretrained(path).eos_token_id)
    return {id_ for ids in named for id_ in (ids if isinstance(ids, list) else [ids])}


def context_length(model: ModelConfig) -> int:
    """Return the longest prompt + completion in tokens. Raise ConfigError where the model has fewer positions."""
    positions = check_positions(model)
    if model.max_length is not None:
        return model.max_length
    if positions is None:
        raise ConfigError(
            f"the config of {model.path} names no context length; set model.max_length"
        )
    return positions


def check_positions(model: ModelConfig, setting: str = "model.path") -> int | None:
    """Return max_position_embeddings of the config; None: it names none.

    Raise ConfigError for a model.max_length beyond it, and beyond what scaled rotary positions reach.
    """
    config = config_of(model.path, setting).get_text_config()
    positions = getattr(config, "max_position_embeddings", None)
    if not isinstance(positions, int):
        return None
    rotary = _rotary(config)
    reach = max([positions, *(_reach(parameters, positions) for parameters in rotary)])
    if model.max_length is None or model.max_length <= reach or getattr(config, "alibi", False):
        return positions
    advice = f"lower model.max_length to {reach} or less"
    if rotary:
        factor = math.ceil(model.max_length / positions)
        scaling = (
            f"rope_type: yarn, factor: {factor}, original_max_position_embeddings: {positions}"
        )
        advice += f", or scale its rotary positions: rope_parameters in config.json with {scaling}"
    beyond = f"model.max_length={model.max_length} is beyond the {reach} positions"
    raise ConfigError(f"{beyond} of {setting}={model.path}; {advice}")


def _rotary(config: Any) -> list[dict[str, Any]]:
    """Return the parameters of rotary positions, which a config may have per kind of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    if "rope_type" in parameters:
        return [parameters]
    return [kind for kind in parameters.values() if isinstance(kind, dict)]


def _reach(rotary: dict[str, Any], positions: int) -> float:
    """Count the positions that scaling reaches, as vLLM does where the config's number is not scaled yet."""
    if (
        rotary["rope_type"] == "dynamic"
    ):  # from there on, the longest sequence of a row would turn all others
        return positions
    factor = rotary.get("factor") or 1.0
    original = rotary.get("original_max_position_embeddings")
    if rotary["rope_type"] == "linear":
        original = original or positions
    return int(factor * original) if original else positions


def longest_sequence(model: ModelConfig, trainer: TrainerConfig) -> tuple[int, str]:
    """Return the longest prompt + completion, in tokens, of model and micro-batch, and the limit's name."""
    context = context_length(model)
    tokens = trainer.micro_batch_tokens
    if tokens == "auto" or context <= tokens + 1:  # the last token is only predicted
        return context, f"the context of {context} tokens (model.max_length, or the model's own)"
    return tokens + 1, f"trainer.micro_batch_tokens={tokens}"
