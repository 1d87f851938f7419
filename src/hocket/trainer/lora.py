"""LoRA: train low-rank updates beside frozen weights, and write them in PEFT's format.

An adapted layer computes W x + alpha / rank · B A x (arXiv 2106.09685), with B [out, rank] zero at
first. No other module imports peft.
"""

import functools
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from hocket.common.files import atomic_folder
from hocket.common.registry import need
from hocket.config import ModelConfig
from hocket.data import model_folder
from hocket.errors import ConfigError
from hocket.protocol import AdapterConfig, manifest
from hocket.trainer.weights import (
    SCORE,
    WEIGHTS,
    Weights,
    empty_model,
    is_multimodal,
    linear_layers,
    load_model,
    part_of,
    published_name,
    write_beside,
)

WEIGHTS_FILE = "adapter_model.safetensors"
_FILE_PREFIX = "base_model.model."  # with which PEFT's names in a file begin
# Settings of PEFT that an adapter may have and still be exported: they name its layers, its scale
# and how it was trained, and don't change what it computes.
EXPORTED = {
    "r",
    "lora_alpha",
    "base_model_name_or_path",
    "target_modules",
    "layers_to_transform",
    "layers_pattern",
    "exclude_modules",
    "task_type",
    "revision",
    "auto_mapping",
    "inference_mode",
    "lora_dropout",
    "peft_version",
}
_NAME = "default"  # PEFT's name of the adapter, part of the parameters' names in memory

log = logging.getLogger(__name__)


@functools.cache  # a plan considers many models, and warns once
def _warn(message: str) -> None:
    log.warning(message)


class InPlace:
    """Adds an adapter's output to that of its layer, as a variant of LoRA that PEFT calls.

    PEFT's own way makes two more tensors of that size. On a CPU they leave holes in the heap, so
    that a step takes a third more memory.
    """

    @staticmethod
    def forward(
        layer: Any, *, active_adapter: str, x: Tensor, result: Tensor, **options: Any
    ) -> Tensor:
        """Compute result + scale · B A x."""
        added = layer.lora_B[active_adapter](layer.lora_A[active_adapter](x))
        scale = layer.scaling[active_adapter]
        # Autograd protects the views that ZeRO-3's hooks return.
        if result._is_view():
            return torch.add(result, added, alpha=scale)
        return result.add_(added, alpha=scale)


@WEIGHTS.register("adapter")
class Adapter(Weights):
    """Trains an adapter alone, in the precision of the frozen model."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        assert config.lora is not None
        self._lora = config.lora

    def options(self, dtype: torch.dtype) -> dict[str, Any]:
        """Return the options of `from_pretrained` for 4-bit weights, if the config wants these."""
        return quantization(dtype) if self.config.quantizes else {}

    def prepare(self, model: transformers.PreTrainedModel, seed: int) -> None:
        """Add the adapter to the model, which freezes all other weights.

        Raises ConfigError if the model lacks the layers that are to be adapted.
        """
        import peft

        targets = self._targets(model)
        torch.manual_seed(seed)
        peft_config = peft.LoraConfig(
            task_type="CAUSAL_LM",
            r=self._lora.rank,
            lora_alpha=self._lora.alpha,  # type: ignore[arg-type]  # it takes any number
            target_modules=targets,
        )
        model.add_adapter(peft_config, _NAME)
        for parameter in model.parameters():
            if parameter.requires_grad:  # PEFT made it float32; DeepSpeed keeps master weights
                parameter.data = parameter.data.to(model.dtype)

        for layer in model.modules():
            if type(layer) is peft.tuners.lora.Linear:  # layers of 4 bits have another class
                layer.lora_variant[_NAME] = InPlace  # type: ignore[assignment]  # it has what is called

        path = self.config.path
        is_folder = Path(path).is_dir()
        self.adapter = AdapterConfig(
            base_model_name_or_path=str(Path(path).resolve()) if is_folder else path,
            r=self._lora.rank,
            lora_alpha=self._lora.alpha,
            target_modules=[published_name(model, target) for target in targets],
        )

    def _targets(self, model: transformers.PreTrainedModel) -> list[str]:
        """Choose the layers to adapt, by the last parts of their names or, in full, by layer."""
        path = self.config.path

        # Servers adapt the layers of the language part alone.
        layers = [name for name, _ in linear_layers(model) if part_of(name) == "language"]
        last_parts = sorted({name.rpartition(".")[2] for name in layers})
        if not last_parts:
            raise ConfigError(
                f"model.lora: {path} has no linear layer besides its output head (GPT-2's are "
                "Conv1D, which vLLM can't adapt); leave model.lora out and train the whole model"
            )
        chosen = self._lora.targets
        targets = last_parts if chosen == "all-linear" else sorted(chosen)
        adapted: set[str] = set()
        for target in targets:
            matching = [name for name in layers if f".{name}".endswith(f".{target}")]
            if not matching:
                raise ConfigError(
                    f"model.lora.targets: {path} has no linear layer {target!r} besides its output "
                    f"head, only {', '.join(last_parts)}"
                )
            adapted.update(matching)
        if not is_multimodal(model.config):
            return targets

        # Layers of the vision tower may have the same names, so each layer is named in full.
        return [name for name in layers if name in adapted]

    def notice(self, model: Any) -> None:
        """Warn that the experts of a mixture are not adapted, where they are not linear layers."""
        total = 0
        experts = 0
        for name, parameter in model.named_parameters():
            if part_of(name) == "language":
                total += parameter.numel()
                if parameter.ndim == 3:  # all experts of a layer in one tensor
                    experts += parameter.numel()
        if experts:
            _warn(
                f"model.lora changes linear layers alone, and the experts of {self.config.path}, "
                f"{experts / total:.0%} of its weights, are none, so they stay as they are; leave "
                "model.lora out to train them"
            )

    @contextmanager
    def base(self, model: Any) -> Iterator[None]:
        model.disable_adapters()
        try:
            yield
        finally:
            model.enable_adapters()

    def published(self, model: Any, named: dict[str, Tensor]) -> dict[str, Tensor]:
        """Convert the adapter's parameters to the names that PEFT gives them in files."""
        result = {}
        for name, tensor in named.items():
            name_in_file = published_name(model, name.replace(f".{_NAME}.", "."))
            result[f"{_FILE_PREFIX}{name_in_file}"] = tensor
        return result

    def write(
        self,
        folder: Path,
        model: Any,
        tokenizer: Any,
        published: dict[str, Tensor],
        dtype: torch.dtype,
    ) -> None:
        """Write the adapter alone; servers have the model under it."""
        assert self.adapter is not None
        save(folder, self.adapter, published)

    def make_model(self, tensors: dict[str, Tensor], dtype: torch.dtype, output: Path) -> None:
        """Write a whole model from a checkpoint's adapter."""
        tensors = self.published(empty_model(self.config.path), tensors)
        _merge(tensors, self._lora.alpha / self._lora.rank, self.config.path, output)

    @classmethod
    def export(cls, folder: Path, output: Path, *, base: str | None) -> None:
        """Write a whole model from a published adapter, which PEFT may have written.

        Raises ConfigError if the folder has no adapter, or one that computes more than a product.
        """
        try:
            values = json.loads((folder / manifest.ADAPTER_FILE).read_text(encoding="utf-8"))
            tensors = load_file(folder / WEIGHTS_FILE)
            scale = values["lora_alpha"] / values["r"]
            path = base or values["base_model_name_or_path"]
        except (
            OSError,
            ValueError,
            TypeError,
            KeyError,
            ZeroDivisionError,
            SafetensorError,
        ) as error:
            raise ConfigError(
                f"{folder} is not an adapter of a run with model.lora, or of PEFT: {error}"
            ) from error
        unusual = _more_than_products(values)
        if unusual:
            raise ConfigError(
                f"{folder} has {', '.join(unusual)}, which is more than export computes; merge it "
                "with PEFT's merge_and_unload"
            )
        _merge(tensors, scale, path, output)


def quantization(dtype: torch.dtype) -> dict[str, Any]:
    """Return transformers' options to load frozen weights in 4 bits (QLoRA, arXiv 2305.14314).

    Raises ConfigError without a CUDA device, or without bitsandbytes.
    """
    if not torch.cuda.is_available():
        raise ConfigError("model.lora.quantize needs a CUDA device; leave it out here")
    need("model.lora.quantize", "bitsandbytes")
    settings = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )
    return {"quantization_config": settings, "device_map": {"": torch.cuda.current_device()}}


def _more_than_products(values: dict[str, Any]) -> list[str]:
    """List the settings of an adapter with which it is more than W + alpha / r · B A.

    These are the settings that are not PEFT's defaults, those in EXPORTED left out.
    """
    import peft

    defaults = peft.LoraConfig().to_dict()  # type: ignore[no-untyped-call]
    defaults["peft_type"] = "LORA"
    names = [name for name in values.keys() - EXPORTED if values[name] != defaults.get(name)]
    return sorted(f"{name}={values[name]}" for name in names)


def save(folder: Path, adapter: AdapterConfig, published: dict[str, Tensor]) -> None:
    """Write an adapter's parameters and config as PEFT does."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(published, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    (folder / manifest.ADAPTER_FILE).write_text(adapter.model_dump_json(indent=1), encoding="utf-8")


def _merge(tensors: dict[str, Tensor], scale: float, path: str, output: Path) -> None:
    """Write the model at `path` with W + scale · B A in place of each adapted W.

    Tensors that are whole weights, as the head of a classifier, replace those of the model. Raises
    ConfigError if a tensor fits no weight of the model.
    """
    scores = f"{_FILE_PREFIX}{SCORE}" in tensors
    tokenizer = model_folder.examine(ModelConfig(path=path), head=None if scores else "logits")
    model = load_model(path, scores=scores, dtype="auto")
    unused = dict(tensors)
    for name, parameter in model.named_parameters():
        layer = f"{_FILE_PREFIX}{published_name(model, name.removesuffix('.weight'))}"
        whole = f"{layer}.weight"
        name_a = f"{layer}.lora_A.weight"
        name_b = f"{layer}.lora_B.weight"
        if whole in unused:
            parameter.data.copy_(unused.pop(whole))
        if name_a in unused and name_b in unused:
            update = unused[name_b].float() @ unused[name_a].float() * scale
            if update.shape == parameter.shape:
                parameter.data += update.to(parameter.dtype)
                del unused[name_a], unused[name_b]
    if unused:
        raise ConfigError(
            f"the adapter was trained on another model than {path}: {min(unused)!r} does not fit; "
            "name it with model.path="
        )
    with atomic_folder(output) as partial:
        # save_pretrained refuses some configs of generation; write_beside writes the model's.
        generation = getattr(model, "generation_config", None)
        if generation is not None:
            model.generation_config = transformers.GenerationConfig()
        model.save_pretrained(partial)
        model.generation_config = generation
        write_beside(partial, model, tokenizer, path)
