"""Load a model, choose which of its weights are trained, and write what is published.

A kind of weights (the registry WEIGHTS) says what is trained: `Weights` the whole model, and
`hocket.trainer.lora.Adapter` a LoRA adapter beside it.
"""

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
from hocket.protocol.manifest import COMPLETE_FILE, MANIFEST_FILE

# Parts of a model by the names that transformers gives their modules. The projector comes first, as
# it may be a module of the vision tower.
PARTS = {
    "projector": {"connector", "multi_modal_projector", "merger", "deepstack_merger_list"},
    "vision": {"vision_model", "vision_tower", "visual"},
}

PROCESSOR_FILES = (PROCESSOR_NAME, IMAGE_PROCESSOR_NAME, VIDEO_PROCESSOR_NAME)
SCORE = "score.weight"  # name of the head of a sequence classifier


class Weights:
    """Trains, publishes and exports all weights of a model.

    Subclasses are the other kinds of weights, registered in WEIGHTS.
    """

    # What servers must know to load an adapter; None for a whole model.
    adapter: AdapterConfig | None = None

    def __init__(self, config: ModelConfig) -> None:
        self.config = config

    def options(self, dtype: torch.dtype) -> dict[str, Any]:
        """Return additional options of `from_pretrained`."""
        return {}

    def notice(self, model: Any) -> None:
        """Warn of parts that are not trained although model.freeze does not name them."""

    def prepare(self, model: Any, seed: int) -> None:
        """Freeze what is not trained, and add parameters that the model lacks.

        Raises ConfigError if the model lacks a part that the config names, or has no other part.
        """
        frozen = set(self.config.freeze)
        parts = {part_of(name) for name, _ in model.named_parameters()}
        if not frozen < parts:  # a part that the model lacks, or all of its parts
            names = ", ".join(sorted(parts))
            raise ConfigError(
                f"model.freeze: {self.config.path} has {names}; name some of these, but not all"
            )
        for name, parameter in model.named_parameters():
            if part_of(name) in frozen:
                parameter.requires_grad_(False)

    def base(self, model: Any) -> contextlib.AbstractContextManager[None]:
        """Make the context in which the model computes as before training, without gradients.

        Only an adapter can do this: the model under it is not trained.
        """
        raise NotImplementedError

    def published(self, model: Any, named: dict[str, Tensor]) -> dict[str, Tensor]:
        """Convert parameters to the names and shapes that they have in files."""
        return dict(revert_weight_conversion(model, named))

    def write(
        self,
        folder: Path,
        model: Any,
        tokenizer: Any,
        published: dict[str, Tensor],
        dtype: torch.dtype,
    ) -> None:
        """Write published parameters with the files that loading them takes."""
        model.config.architectures = [type(model).__name__]
        model.config.dtype = dtype  # the model's own is float32 at ZeRO-0
        model.config.save_pretrained(folder)
        write_beside(folder, model, tokenizer, self.config.path)
        save_torch_state_dict(published, folder)

    def make_model(self, tensors: dict[str, Tensor], dtype: torch.dtype, output: Path) -> None:
        """Write a whole model from a checkpoint's parameters.

        Raises TrainerError if they are not the parameters of the model at model.path.
        """
        path = self.config.path
        tokenizer = tokenizers.load(path)

        # A checkpoint has the trained parameters alone: frozen ones come from the model's files.
        scores = SCORE in tensors
        if self.config.freeze:
            model = load_model(path, dtype=dtype, scores=scores)
            tensors = {name: p.data for name, p in model.named_parameters()} | tensors
        else:
            model = empty_model(path, scores=scores)

        with contextlib.suppress(OSError):  # not every model has this file
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
        """Write a whole model from a folder of published weights, here by a copy.

        Args:
            folder: the published weights.
            output: the folder to write.
            base: the path of the model before training, if the folder's config has another.
        """
        with atomic_folder(output) as partial:
            own = shutil.ignore_patterns(MANIFEST_FILE, COMPLETE_FILE)
            shutil.copytree(folder, partial, dirs_exist_ok=True, ignore=own)


WEIGHTS: Registry[type[Weights]] = Registry("kind of weights", adapter="hocket.trainer.lora")
"""The kinds of weights by ModelConfig.weights: what is trained, published and exported."""
WEIGHTS.register("model")(Weights)


def published_name(model: Any, name: str) -> str:
    """Convert the name of a layer or parameter to its name in files.

    For Qwen2.5-VL, for one, it differs from the name in memory.
    """
    (name,) = revert_weight_conversion(model, {name: torch.empty(0)})
    return name


def head_of(model: Any) -> Any:
    """Return the linear layer on top, which computes logits or a classifier's score."""
    head = model.get_output_embeddings()
    return model.score if head is None else head


def linear_layers(model: Any) -> list[tuple[str, Any]]:
    """List the linear layers with their names, but for the head and the routers of experts.

    A router is a subclass of Linear in a model's own file, and returns more than a product.
    """
    head = head_of(model)
    layers = []
    for name, module in model.named_modules():
        is_router = type(module).__module__.startswith("transformers.models.")
        if isinstance(module, nn.Linear) and module is not head and not is_router:
            layers.append((name, module))
    return layers


def is_multimodal(config: Any) -> bool:
    """Check whether a model of this config takes images."""
    return hasattr(config, "vision_config")


def attention_setting(config: Any, implementation: str) -> str | dict[str, str]:
    """Return transformers' setting by which a model's text layers use an attention implementation.

    A vision tower keeps PyTorch's own.
    """
    if not is_multimodal(config):
        return implementation
    return {"text_config": implementation, "vision_config": "sdpa"}


def write_beside(folder: Path, model: Any, tokenizer: Any, path: str) -> None:
    """Write a model's tokenizer, its processor, and its config of generation.

    Args:
        path: the model that training began with, whose processor is copied.
    """
    tokenizer.save_pretrained(folder)
    generation = getattr(model, "generation_config", None)
    if generation is not None:
        generation = copy.deepcopy(generation)
        generation.eos_token_id = _ends(generation.eos_token_id, tokenizer)
        # save_pretrained refuses fields that contradict each other, as those of Llama 2 do.
        generation.to_json_file(folder / GENERATION_CONFIG_NAME, keys_to_pop=["compile_config"])
    if is_multimodal(model.config):
        for file in _processor_files(path):
            shutil.copy(file, folder)


def _ends(ids: int | list[int] | None, tokenizer: Any) -> int | list[int] | None:
    """Add the token that ends a turn of the chat template to `ids`, those that end an answer.

    The model was taught to end its turns with it, so servers must stop there.
    """
    end = _end_of_turn(tokenizer)
    ends = ids if isinstance(ids, list) else [tokenizer.eos_token_id if ids is None else ids]
    if end is None or end in ends:
        return ids
    return [id_ for id_ in ends if id_ is not None] + [end]


_end_of_turn = functools.cache(end_of_turn)  # a template is rendered once, not at each publication


@functools.cache  # a hub is asked once
def _processor_files(path: str) -> list[str]:
    files = []
    for name in PROCESSOR_FILES:
        file = cached_file(path, name, _raise_exceptions_for_missing_entries=False)
        if file is not None:
            files.append(file)
    return files


def part_of(name: str) -> str:
    """Name the part of a model that a parameter or layer is in: language, vision or projector."""
    for part, words in PARTS.items():
        if not words.isdisjoint(name.split(".")):
            return part
    return "language"


def unshared(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Give each tensor a storage object of its own, as safetensors refuses parts of a storage.

    The memory stays the same: `from_dlpack` wraps it, and copies nothing.
    """
    return {name: from_dlpack(tensor.contiguous()) for name, tensor in tensors.items()}


def empty_model(path: str, **options: Any) -> Any:
    """Make a model without weights, on the meta device."""
    with torch.device("meta"):
        return load_model(path, random_init=True, **options)


def load_model(
    path: str, *, random_init: bool = False, scores: bool = False, head: bool = True, **options: Any
) -> Any:
    """Load a language model or, with `scores`, a sequence classifier with one output.

    Raises ConfigError if the files are of another model than their config: only the head of a
    classifier may be missing, and is then drawn at random.

    Args:
        path: a folder, or a name on the Hugging Face hub.
        random_init: whether all weights are drawn at random.
        scores: whether to load a sequence classifier, such as a reward model.
        head: whether the logits are used; if not, as in a critic, files may lack the head.
        options: further options of `from_pretrained`.
    """
    tokenizers.check_is_model(path, "model.path")
    model_folder.refuse(model_folder.adapter_beside(path), path, "model.path")
    auto: Any = transformers.AutoModelForCausalLM
    config_changes: dict[str, Any] = {}
    verbosity = transformers.utils.logging.get_verbosity()
    if scores:
        auto = transformers.AutoModelForSequenceClassification
        transformers.utils.logging.set_verbosity_error()  # it would warn that the head is new
        config_changes["num_labels"] = 1
        config_changes["pad_token_id"] = tokenizers.load(path).pad_token_id
    try:
        config = transformers.AutoConfig.from_pretrained(
            path, trust_remote_code=False, **config_changes
        )
        if is_multimodal(config) and not scores:
            auto = transformers.AutoModelForImageTextToText
            implementation = options.get("attn_implementation", "sdpa")
            options["attn_implementation"] = attention_setting(config, implementation)
        if random_init:
            return auto.from_config(config, trust_remote_code=False, **options)
        options |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
        model, report = auto.from_pretrained(
            path, trust_remote_code=False, **config_changes, **options
        )
    except (OSError, ValueError, SafetensorError) as error:
        advice = "copy or download it again, if files are missing or cut off"
        raise ConfigError(
            f"can't load the model at model.path={path}: {error}; {advice}"
        ) from error
    finally:
        transformers.utils.logging.set_verbosity(verbosity)
    problem = model_files.differences(report, head=head and not scores)
    model_folder.refuse(problem, path, "model.path")
    return model
