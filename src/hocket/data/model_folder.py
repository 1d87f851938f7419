"""Examine a model folder before it is used, and report all of its problems in one message."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from hocket.config import ModelConfig
from hocket.data import tokenizer as tokenizers
from hocket.errors import ConfigError, cause_of
from hocket.protocol import model_files

# The files that say what a model is; the rest are weights.
SMALL_FILES = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "generation_config.json",
)
OTHER_FORMATS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
# What a run uses of a model beside its body: the head's logits, a classifier's score, or nothing.
Head = Literal["logits", "score"] | None


def examine(
    model: ModelConfig,
    setting: str = "model.path",
    *,
    trains: bool = True,
    head: Head = "logits",
    needs_weights: bool = True,
) -> Any:
    """Check that a model folder can be used as it is. Returns the model's tokenizer.

    Raise ConfigError that lists all problems. No weights are read, except heads that are in the
    files although config.json ties them. A model of the hub is examined as far as the cache has
    its files.

    trains: whether the trainer loads the model; else vLLM does, which takes more formats. head: the
    head that is used, and so must be in the files; None: the body alone is used.
    needs_weights: whether the folder must have weights; the plan of a run needs none.
    """
    path = model.path
    tokenizers.check_is_model(path, setting)
    problems = _pointers(path)
    tokenizer = None
    # With Git LFS pointers in place of config.json or the tokenizer, nothing else can be read.
    if not problems:
        problems += adapter_beside(path) + _weights(model, setting, trains=trains, head=head)
        if needs_weights and not problems and not model.random_init:
            problems += _without_weights(path, trains=trains)
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
    name = f"{setting}={path}"
    if len(problems) == 1:
        (problem,) = problems
        # The problems of the tokenizer name the model themselves.
        raise ConfigError(problem if name in problem else f"{name}: {problem}")
    if problems:
        message = f"{name} can't be used as it is:"
        for problem in problems:
            message += f"\n  - {problem}"
        raise ConfigError(message)


def adapter_beside(path: str) -> list[str]:
    """Return the problem of an adapter in a model's folder, if there is one."""
    if model_files.local_file(path, "adapter_config.json") is None:
        return []
    return [
        "it has adapter_config.json beside config.json, which transformers adds to the model and "
        "vLLM does not; move the adapter_* files to a folder of their own to use the model alone, "
        "or to merge both with export"
    ]


def _pointers(path: str) -> list[str]:
    """Return a problem for each small file that is only a pointer of Git LFS."""
    problems = []
    for name in SMALL_FILES:
        file = model_files.local_file(path, name)
        if file is not None and model_files.is_pointer(file):
            problems.append(model_files.pointer(file))
    return problems


def _weights(model: ModelConfig, setting: str, *, trains: bool, head: Head) -> list[str]:
    """Return the problems of the weights, and of config.json where it describes them."""
    path = model.path
    config = tokenizers.config_of(path, setting)
    problems = _ties(path)
    quantized = getattr(config, "quantization_config", None)
    if not quantized:
        quantized = getattr(config.get_text_config(), "quantization_config", None)
    if quantized and trains:
        kind = "some method"
        if isinstance(quantized, dict):
            kind = quantized.get("quant_method", kind)
        problems.append(
            f"its weights are quantized ({kind}) and can't be trained; name the model that it was "
            "made of; model.lora={quantize: nf4} quantizes that while it trains"
        )
        return problems
    if model.random_init:
        return problems

    # The headers of the files name their tensors and shapes.
    files, broken = model_files.weight_files(path)
    shapes, damaged = model_files.read_headers(files)
    problems += broken + damaged
    if broken or damaged:
        return problems
    if quantized or not files:  # vLLM checks the formats that only it reads
        return problems

    # Transformers builds the model of config.json without memory, and compares the tensors.
    try:
        loaded = model_files.load_on_meta(path, shapes, classifier=head == "score")
    except Exception as error:  # noqa: BLE001 - whatever config.json leads transformers to
        if trains:  # else it may be an architecture that only vLLM knows
            problems.append(
                f"transformers can't build its model ({cause_of(error)}); "
                "take the config.json that belongs to the files"
            )
        return problems
    problems += model_files.differences(loaded.report, head=head is not None)
    if head == "logits":
        problems += model_files.untied(loaded, files, shapes)
    return problems


def _ties(path: str) -> list[str]:
    """Refuse a config.json that ties the head in one place and not in another.

    Readers of it take one or the other.
    """
    file = model_files.local_file(path, "config.json")
    if file is None:
        return []
    raw = json.loads(file.read_text(encoding="utf-8"))
    outer = raw.get("tie_word_embeddings")
    inner = (raw.get("text_config") or {}).get("tie_word_embeddings")
    if outer is None or inner is None or outer == inner:
        return []
    return [
        f"config.json has tie_word_embeddings={str(outer).lower()}, and {str(inner).lower()} in "
        "its text_config; set both to true if the head is the embedding, else to false"
    ]


def _without_weights(path: str, *, trains: bool) -> list[str]:
    """Return the problem of a folder that has no weights."""
    folder = Path(path)
    files, _ = model_files.weight_files(path)
    if files or not folder.is_dir():  # a model of the hub is not downloaded yet
        return []
    others: list[Path] = []
    for pattern in OTHER_FORMATS:
        others += sorted(folder.glob(pattern))
    if others and not trains:  # vLLM reads some of them
        return []
    present = f", only {others[0].name}" if others else ""
    return [
        f"it has no weights in model.safetensors, its shards or pytorch_model.bin{present}; copy "
        "or download it again, or save it with transformers; model.random_init=true draws random "
        "weights"
    ]
