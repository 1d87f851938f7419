"""The tokenizer and the longest sequence: what server and trainer need before any weights."""

import contextlib
import hashlib
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

from hocket.common.files import kind_of
from hocket.common.shell import hub_variables
from hocket.config import ModelConfig, TrainerConfig
from hocket.data.template import end_of_turn
from hocket.errors import ConfigError, program


def load(path: str, setting: str = "model.path") -> Any:
    """Return the tokenizer of a model folder or hub name, with the attribute `placeholder`.

    `placeholder` is the token that stands for an image; None if the model takes none. Raise
    ConfigError if there is no tokenizer, or if it is another model's.
    """
    from transformers import AutoTokenizer

    check_is_model(path, setting)
    try:
        # A tokenizer's own code is never run.
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ConfigError(f"can't load a tokenizer from {setting}={path}: {error}") from error
    config = config_of(path, setting)
    tokenizer.placeholder = getattr(config, "image_token_id", None)

    # Transformers makes a tokenizer of special tokens alone if there are no files.
    vocabulary = tokenizer.get_vocab()
    if set(vocabulary) <= set(tokenizer.all_special_tokens):
        raise ConfigError(
            f"{setting}={path} has no tokenizer: "
            "put the model's tokenizer.json beside its config.json"
        )

    # An id beyond the embedding would fail only on the GPU, in the middle of a batch.
    # Padding and unknown tokens don't count: transformers may have added them.
    added = (tokenizer.pad_token_id, tokenizer.unk_token_id)
    largest = max((id_ for id_ in vocabulary.values() if id_ not in added), default=-1)
    size = getattr(config.get_text_config(), "vocab_size", math.inf)
    if largest >= size:
        raise ConfigError(
            f"{setting}={path}: the tokenizer has ids up to {largest}, the model embeds only "
            f"{size} tokens: use the model's own tokenizer, or transformers' "
            f"resize_token_embeddings({largest + 1})"
        )
    return tokenizer


def check_is_model(path: str, setting: str) -> None:
    """Raise ConfigError unless `path` is a model's folder, or a model that the hub has."""
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    # A folder: it must be a model's, not an adapter's or a checkpoint's.
    folder = Path(path)
    if folder.exists():
        kind = kind_of(folder)
        if kind in ("adapter", "checkpoint"):
            advice = f"make one of it: {program()} export {path} OUTPUT"
            raise ConfigError(f"{setting}={path} holds one {kind}, not a model; {advice}")
        if kind != "model":
            raise ConfigError(f"{setting}={path} is no model: it has no config.json")
        return

    # No folder: it must be the name of a model in the hub's cache, or on the hub.
    missing = f"{setting}={path}: there is no such folder (paths are relative to {Path.cwd()})"
    try:
        if try_to_load_from_cache(path, "config.json") is None:
            HfApi().model_info(path, timeout=10)
    except HFValidationError as error:  # no name of a model on the hub, so it must be a path
        raise ConfigError(f"{missing}; name the folder that has the model's config.json") from error
    except RepositoryNotFoundError as error:
        advice = "correct the path or the name, or set HF_TOKEN for a private model"
        raise ConfigError(f"{missing}, and the hub shows no such model; {advice}") from error
    except Exception as error:
        advice = "correct the path, or download the model where the hub can be reached"
        raise ConfigError(
            f"{missing}, and the hub is out of reach, if a model there is meant "
            f"({type(error).__name__}{hub_variables()}); {advice}"
        ) from error


def check_same_ids(tokenizer: Any, subject: str, model: ModelConfig) -> None:
    """Raise ConfigError if the tokenizer of `subject` has other tokens for ids of the model's."""
    tokens = {id_: token for token, id_ in tokenizer.get_vocab().items()}
    for token, id_ in load(model.path).get_vocab().items():
        if tokens.get(id_, token) != token:
            raise ConfigError(
                f"{subject} has another vocabulary than model.path={model.path}: "
                "the same ids are other tokens; name one with the same tokenizer"
            )


def fingerprint(tokenizer: Any) -> str:
    """Return the SHA-256 of all that maps text to ids and back; not of the chat template."""
    if tokenizer.is_fast:
        from tokenizers import Tokenizer

        # A caller may have set padding and truncation: they are no part of the tokenizer.
        backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        backend.no_padding()
        backend.no_truncation()
        content = backend.to_str()
    else:
        content = json.dumps([type(tokenizer).__name__, tokenizer.get_vocab()], sort_keys=True)
    special_tokens = tokenizer.special_tokens_map.items()
    special = json.dumps(sorted((name, str(token)) for name, token in special_tokens))
    return hashlib.sha256(f"{content}\n{special}".encode()).hexdigest()


def config_of(path: str, setting: str = "model.path") -> Any:
    """Return transformers' config of a model. Raise ConfigError without one."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ConfigError(f"can't load a model config from {setting}={path}: {error}") from error


def end_ids(path: str, tokenizer: Any) -> set[int]:
    """Return the ids that end an answer: the model's, and the end of its template's turns.

    Without the latter, the answers of a base model with a template would never end.
    """
    ends = _models_ends(path, tokenizer)
    ends.add(end_of_turn(tokenizer))
    return {id_ for id_ in ends if id_ is not None}


def said_end(path: str, tokenizer: Any) -> str:
    """Return a sentence that names the end of the template's turns; "" if it is one of the model's.

    "" also if the template ends turns with no special token.
    """
    end = end_of_turn(tokenizer)
    if end is None or end in _models_ends(path, tokenizer):
        return ""
    token = tokenizer.convert_ids_to_tokens(end)
    return (
        f"the chat template ends turns with {token!r}, which is no end of {path} "
        f"(its eos is {tokenizer.eos_token!r}): answers end there, too, and the "
        "generation_config.json of what is written says so"
    )


def _models_ends(path: str, tokenizer: Any) -> set[int | None]:
    """Return the ends that tokenizer, config and generation config name, None among them."""
    from transformers import GenerationConfig

    config = config_of(path).get_text_config()
    values = [tokenizer.eos_token_id, tokenizer.placeholder, getattr(config, "eos_token_id", None)]
    with contextlib.suppress(OSError):  # many models have no generation config
        values.append(GenerationConfig.from_pretrained(path).eos_token_id)
    ends: set[int | None] = set()
    for value in values:
        ends.update(value if isinstance(value, list) else [value])
    return ends


def context_length(model: ModelConfig) -> int:
    """Return the longest prompt + completion in tokens.

    Raise ConfigError if model.max_length exceeds what the model reaches, or if neither names one.
    """
    positions = check_positions(model)
    if model.max_length is not None:
        return model.max_length
    if positions is None:
        raise ConfigError(
            f"the config of {model.path} names no context length; set model.max_length"
        )
    return positions


def check_positions(model: ModelConfig, setting: str = "model.path") -> int | None:
    """Return max_position_embeddings of the model's config; None if it names none.

    Raise ConfigError if model.max_length is greater, and more than scaled rotary positions reach.
    """
    config = config_of(model.path, setting).get_text_config()
    positions = getattr(config, "max_position_embeddings", None)
    if not isinstance(positions, int):
        return None
    rotary = _rotary(config)
    reach: float = positions
    for parameters in rotary:
        reach = max(reach, _reach(parameters, positions))
    # ALiBi has no table of positions, so any length will do.
    if model.max_length is None or model.max_length <= reach or getattr(config, "alibi", False):
        return positions

    advice = f"lower model.max_length to {reach} or less"
    if rotary:
        factor = math.ceil(model.max_length / positions)
        advice += (
            ", or scale its rotary positions: rope_parameters in config.json with rope_type: yarn, "
            f"factor: {factor}, original_max_position_embeddings: {positions}"
        )
    raise ConfigError(
        f"model.max_length={model.max_length} is beyond the {reach} positions of "
        f"{setting}={model.path}; {advice}"
    )


def _rotary(config: Any) -> list[dict[str, Any]]:
    """Return the parameters of rotary positions, which a config may have per kind of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    if "rope_type" in parameters:
        return [parameters]
    return [kind for kind in parameters.values() if isinstance(kind, dict)]


def _reach(rotary: dict[str, Any], positions: int) -> float:
    """Count the positions that rotary parameters reach by scaling; vLLM counts them so.

    positions: the config's max_position_embeddings. Some configs give the scaled number there,
    others the one before scaling.
    """
    if rotary["rope_type"] == "dynamic":
        # Beyond its positions, the rotation follows the longest sequence of the batch, so the
        # other sequences would get other numbers.
        return positions
    factor = rotary.get("factor") or 1.0
    original = rotary.get("original_max_position_embeddings")
    if rotary["rope_type"] == "linear":
        original = original or positions
    return int(factor * original) if original else positions


class SequenceLimit(NamedTuple):
    """The most tokens of a prompt with its completion."""

    tokens: int
    setting: str  # a phrase that names what limits it


def longest_sequence(model: ModelConfig, trainer: TrainerConfig) -> SequenceLimit:
    """Compute the longest sequence that the model can read and a micro-batch can hold.

    The limit is the model's context, or the size of a micro-batch if that is smaller.
    """
    context = context_length(model)
    tokens = trainer.micro_batch_tokens
    # A sequence has one token more than its micro-batch: the last one is only predicted.
    if tokens == "auto" or context <= tokens + 1:
        setting = f"the context of {context} tokens (model.max_length, or the model's own)"
        return SequenceLimit(context, setting)
    return SequenceLimit(tokens + 1, f"trainer.micro_batch_tokens={tokens}")
