"""The weights that a run trains, their published names, and their folders."""

import contextlib
import copy
import functools
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import (
    GENERATION_CONFIG_NAME,
    IMAGE_PROCESSOR_NAME,
    PROCESSOR_NAME,
    VIDEO_PROCESSOR_NAME,
    cached_file,
)

from hocket.common.files import atomic_folder
from hocket.common.registry import Registry
from hocket.config import ModelConfig
from hocket.data import model_folder
from hocket.data import tokenizer as tokenizers
from hocket.data.template import end_of_turn
from hocket.errors import ConfigError, TrainerError
from hocket.protocol import AdapterConfig, model_files

# By part of a model, what transformers calls it; a projector may be within the vision tower.
PARTS = {
    "projector": {"connector", "multi_modal_projector", "merger", "deepstack_merger_list"},
    "vision": {"vision_model", "vision_tower", "visual"},
}

PROCESSOR_FILES = (PROCESSOR_NAME, IMAGE_PROCESSOR_NAME, VIDEO_PROCESSOR_NAME)
SCORE = "score.weight"  # of a sequence classifier


class Weights:
    """All weights of a model; WEIGHTS has the other kinds."""

    adapter: AdapterConfig | None = (
        None  # what servers must know of weights that are no whole model
    )

    def __init__(self, config: ModelConfig) -> None:
        self.config = config

    def options(self, dtype: torch.dtype) -> dict[str, Any]:
        """Return options of `from_pretrained`."""
        return {}

    def notice(self, model: Any) -> None:
        """Warn of parts that stay as they are though nobody froze them."""

    def prepare(self, model: Any, seed: int) -> None:
        """Freeze what is not trained, and add what is. Raise ConfigError where it has no such parts."""
        frozen = set(self.config.freeze)
        there = {part_of(name) for name, _ in model.named_parameters()}
        if not frozen < there:
            known = ", ".join(sorted(there))
            raise ConfigError(
                f"model.freeze: {self.config.path} has {known}; name some of these, but not all"
            )
        for name, parameter in model.named_parameters():
            if part_of(name) in frozen:
                parameter.requires_grad_(False)

    def base(self, model: Any) -> contextlib.AbstractContextManager[None]:
        """Have the model compute as before training, without gradients."""
        raise NotImplementedError

    def published(self, model: Any, named: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return parameters by the architecture's names and shapes."""
        return dict(revert_weight_conversion(model, named))

    def write(
        self,
        folder: Path,
        model: Any,
        tokenizer: Any,
        published: dict[str, Tensor],
        dtype: torch.dtype,
    ) -> None:
        """Write published parameters, and what loads them."""
        model.config.architectures = [type(model).__name__]
        model.config.dtype = dtype  # ZeRO-0's live parameters are float32
        model.config.save_pretrained(folder)
        write_beside(folder, model, tokenizer, self.config.path)
        save_torch_state_dict(published, folder)

    def make_model(self, tensors: dict[str, Tensor], dtype: torch.dtype, output: Path) -> None:
        """Write a whole model from a checkpoint's parameters."""
        path = self.config.path
        tokenizer = tokenizers.load(path)
        scores = SCORE in tensors
        model = (
            load_model(path, dtype=dtype, scores=scores)
            if self.config.freeze
            else empty_model(path, scores=scores)
        )
        tensors = {
            name: tensor.data for name, tensor in model.named_parameters() if not tensor.is_meta
        } | tensors
        with contextlib.suppress(OSError):  # it has none
            model.generation_config = transformers.GenerationConfig.from_pretrained(path)
        expected = {name: parameter.shape for name, parameter in model.named_parameters()}
        if {name: tensor.shape for name, tensor in tensors.items()} != expected:
            raise TrainerError(
                f"the checkpoint is of another model than {path}; name it with model.path="
            )
        with atomic_folder(output) as partial:
            self.write(partial, model, tokenizer, unshared(self.published(model, tensors)), dtype)

    @classmethod
    def export(cls, folder: Path, output: Path, *, base: str | None) -> None:
        """Write a whole model from published weights; `base`: the model before training, if moved."""
        raise ConfigError(f"{folder} is a model already: serve it, or load it with transformers")


WEIGHTS: Registry[type[Weights]] = Registry("kind of weights", adapter="hocket.trainer.lora")
"""What of a model is trained, published and exported, by ModelConfig.weights."""
WEIGHTS.register("model")(Weights)


def published_name(model: Any, name: str) -> str:
    """Return the name of a layer or parameter in files, which for Qwen2.5-VL is not its name in memory."""
    (name,) = revert_weight_conversion(model, {name: torch.empty(0)})
    return name


def head_of(model: Any) -> Any:
    """Return the linear layer on top: to logits, or to a classifier's score."""
    head = model.get_output_embeddings()
    return model.score if head is None else head


def linear_layers(model: Any) -> list[tuple[str, Any]]:
    """Return the linear layers by name, but the head, and routers, which give more than a product."""
    head = head_of(model)
    layers = [
        (name, part)
        for name, part in model.named_modules()
        if isinstance(part, nn.Linear) and part is not head
    ]
    return [
        (name, part)
        for name, part in layers
        if not type(part).__module__.startswith("transformers.models.")
    ]


def sees(config: Any) -> bool:
    """Check whether a model of this config takes images."""
    return hasattr(config, "vision_config")


def attending(config: Any, how: str) -> str | dict[str, str]:
    """Return transformers' setting of how a model attends: its vision tower stays as it is."""
    return {"text_config": how, "vision_config": "sdpa"} if sees(config) else how


def write_beside(folder: Path, model: Any, tokenizer: Any, path: str) -> None:
    """Write what a model has beside its weights and config: tokenizer, processor, and how it generates.

    path: the model that training began with.
    """
    tokenizer.save_pretrained(folder)
    generation = getattr(model, "generation_config", None)
    if generation is not None:
        generation = copy.deepcopy(generation)
        generation.eos_token_id = _ends(generation.eos_token_id, tokenizer)
        # save_pretrained refuses fields that contradict each other, as those of Llama 2 do.
        generation.to_json_file(folder / GENERATION_CONFIG_NAME, keys_to_pop=["compile_config"])
    _copy_processor(model, path, folder)


def _ends(named: int | list[int] | None, tokenizer: Any) -> int | list[int] | None:
    """Add the end of the chat template's turns, which was taught, to the ids that end an answer."""
    end = _taught_end(tokenizer)
    ends = (
        named if isinstance(named, list) else [tokenizer.eos_token_id if named is None else named]
    )
    if end is None or end in ends:
        return named
    return [*(id_ for id_ in ends if id_ is not None), end]


@functools.cache  # a template is rendered once, not at each publication
def _taught_end(tokenizer: Any) -> int | None:
    return end_of_turn(tokenizer)


def _copy_processor(model: Any, path: str, folder: Path) -> None:
    for file in _processor_files(path) if sees(model.config) else ():
        shutil.copy(file, folder)


@functools.cache  # a hub is asked once
def _processor_files(path: str) -> list[str]:
    found = (
        cached_file(path, name, _raise_exceptions_for_missing_entries=False)
        for name in PROCESSOR_FILES
    )
    return [file for file in found if file is not None]


def part_of(name: str) -> str:
    """Name the part of a model that a parameter or layer is of: language, vision or projector."""
    return next(
        (part for part, words in PARTS.items() if not words.isdisjoint(name.split("."))), "language"
    )


def unshared(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors that own their storages: safetensors refuses parts of one."""
    return {name: from_dlpack(tensor.contiguous()) for name, tensor in tensors.items()}


def empty_model(path: str, **options: Any) -> Any:
    """Return a model without weights, on the meta device."""
    with torch.device("meta"):
        return load_model(path, random_init=True, **options)


def load_model(
    path: str, *, random_init: bool = False, scores: bool = False, head: bool = True, **options: Any
) -> Any:
    """Load a language model or, with `scores`, a sequence classifier with one output, a new one where path has none.

    Raise ConfigError for a model whose files are of another one: nothing else is drawn at random. `head`: whether the
    logits are used; without, files may lack them.
    """
    tokenizers.check_is_model(path, "model.path")
    model_folder.refuse(model_folder.adapter_beside(path), path, "model.path")
    auto: Any = transformers.AutoModelForCausalLM
    changes: dict[str, Any] = {}  # of its config
    verbosity = transformers.utils.logging.get_verbosity()
    if scores:
        auto = transformers.AutoModelForSequenceClassification
        transformers.utils.logging.set_verbosity_error()  # it would warn that the head is new
        changes = {"num_labels": 1, "pad_token_id": tokenizers.load(path).pad_token_id}
    try:
        architecture = transformers.AutoConfig.from_pretrained(
            path, trust_remote_code=False, **changes
        )
        if sees(architecture) and not scores:
            auto = transformers.AutoModelForImageTextToText
            options["attn_implementation"] = attending(
                architecture, options.get("attn_implementation", "sdpa")
            )
        if random_init:
            return auto.from_config(architecture, trust_remote_code=False, **options)
        options |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
        model, report = auto.from_pretrained(path, trust_remote_code=False, **changes, **options)
    except (OSError, ValueError, SafetensorError) as error:
        advice = "copy or download it again, if files lack or are cut off"
        raise ConfigError(
            f"can't load the model at model.path={path}: {error}; {advice}"
        ) from error
    finally:
        transformers.utils.logging.set_verbosity(verbosity)
    model_folder.refuse(
        model_files.differences(report, head=head and not scores), path, "model.path"
    )
    return model
