"""Examine a model folder before it is used, and say all that is wrong with it in one message."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from hocket.config import ModelConfig
from hocket.data import tokenizer as tokenizers
from hocket.errors import ConfigError, cause_of
from hocket.protocol import model_files

SMALL_FILES = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "generation_config.json",
)
OTHER_FORMATS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
Head = Literal["logits", "score"] | None


def examine(
    model: ModelConfig,
    setting: str = "model.path",
    *,
    trains: bool = True,
    head: Head = "logits",
    needs_weights: bool = True,
) -> Any:
    """Return the tokenizer of a model whose folder can be used as it is. Raise ConfigError with all that is wrong.

    No weights are read, but those of heads that are in the files although config.json ties them. A name of the hub is
    examined as far as the cache has its files.

    trains: whether the trainer loads it; else vLLM does, which takes more formats.
    head: what is used of its head, beside the body: its logits, as a classifier its score, or nothing.
    needs_weights: whether there must be any; the plan of a run with a reference takes none.
    """
    path = model.path
    tokenizers.check_is_model(path, setting)
    problems = _pointers(path)
    if not problems:  # else config.json or the tokenizer can't be read
        problems += adapter_beside(path) + _weights(model, setting, trains=trains, head=head)
        if needs_weights and not (problems or model.random_init):
            problems += _without_weights(path, trains=trains)
    tokenizer = None
    if not _pointers(path):
        try:
            tokenizer = tokenizers.load(path, setting)
        except ConfigError as error:
            problems.append(str(error))
        try:
            tokenizers.check_positions(model, setting)
        except ConfigError as error:
            problems.append(str(error))
    refuse(problems, path, setting)
    return tokenizer


def refuse(problems: Sequence[str], path: str, setting: str) -> None:
    """Raise ConfigError with the problems of a model, if there are any."""
    named = f"{setting}={path}"
    if len(problems) == 1:
        raise ConfigError(problems[0] if named in problems[0] else f"{named}: {problems[0]}")
    if problems:
        raise ConfigError(
            "\n".join(
                [f"{named} can't be used as it is:", *(f"  - {problem}" for problem in problems)]
            )
        )


ADAPTER = (
    "it has adapter_config.json beside config.json, which transformers adds to the model and vLLM does not; move the "
    "adapter_* files to a folder of their own to use the model alone, or to merge both with export"
)


def adapter_beside(path: str) -> list[str]:
    """Say that an adapter lies in a model's folder, if one does."""
    return [ADAPTER] if model_files.local_file(path, "adapter_config.json") else []


def _pointers(path: str) -> list[str]:
    files = [model_files.local_file(path, name) for name in SMALL_FILES]
    return [
        model_files.pointer(file)
        for file in files
        if file is not None and model_files.is_pointer(file)
    ]


def _weights(model: ModelConfig, setting: str, *, trains: bool, head: Head) -> list[str]:
    """Say what is wrong with the weights, and how config.json describes them."""
    path = model.path
    config = tokenizers.config_of(path, setting)
    problems = _ties(path)
    quantised = getattr(config, "quantization_config", None) or getattr(
        config.get_text_config(), "quantization_config", None
    )
    if quantised and trains:
        kind = (
            quantised.get("quant_method", "some method")
            if isinstance(quantised, dict)
            else "some method"
        )
        advice = "name the model that it was made of; model.lora={quantize: nf4} quantises that while it trains"
        return [*problems, f"its weights are quantised ({kind}) and can't be trained; {advice}"]
    if model.random_init:
        return problems
    files, broken = model_files.weight_files(path)
    shapes, damaged = model_files.read_headers(files)
    problems += broken + damaged
    if broken or damaged:
        return problems
    if quantised or not files:  # vLLM knows its formats
        return problems
    try:
        loaded = model_files.load_on_meta(path, shapes, classifier=head == "score")
    except Exception as error:  # noqa: BLE001 - whatever config.json leads transformers to
        if not trains:  # vLLM knows more architectures than transformers
            return problems
        advice = "take the config.json that belongs to the files"
        return [*problems, f"transformers can't build its model ({cause_of(error)}); {advice}"]
    problems += model_files.differences(loaded.report, head=head is not None)
    if head == "logits":
        problems += model_files.untied(loaded, files, shapes)
    return problems


def _ties(path: str) -> list[str]:
    """Refuse a head that config.json ties in one place and not in another: readers take one or the other."""
    file = model_files.local_file(path, "config.json")
    if file is None:
        return []
    raw = json.loads(file.read_text(encoding="utf-8"))
    outer = raw.get("tie_word_embeddings")
    inner = (raw.get("text_config") or {}).get("tie_word_embeddings")
    if None in (outer, inner) or outer == inner:
        return []
    return [
        f"config.json has tie_word_embeddings={str(outer).lower()}, and {str(inner).lower()} in its text_config; "
        "set both to true if the head is the embedding, else to false"
    ]


def _without_weights(path: str, *, trains: bool) -> list[str]:
    folder = Path(path)
    if (
        model_files.weight_files(path)[0] or not folder.is_dir()
    ):  # of the hub, they are not downloaded yet
        return []
    others = [file.name for kind in OTHER_FORMATS for file in sorted(folder.glob(kind))]
    if others and not trains:  # vLLM reads some of them
        return []
    has = f", only {others[0]}" if others else ""
    advice = "copy or download it again, or save it with transformers; model.random_init=true draws random weights"
    return [
        f"it has no weights in model.safetensors, its shards or pytorch_model.bin{has}; {advice}"
    ]


def has_weights(path: str) -> bool:
    """Check whether a folder has weights, whole or in part."""
    files, problems = model_files.weight_files(path)
    return bool(files or problems)


def has_tensor(path: str, name: str) -> bool:
    """Check whether the weight files hold a tensor of this name."""
    files, _ = model_files.weight_files(path)
    shapes, _ = model_files.read_headers(files)
    return name in shapes
