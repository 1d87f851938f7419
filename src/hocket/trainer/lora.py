"""LoRA: low-rank updates beside frozen weights, in PEFT's format. Nothing else imports peft.

An adapted layer computes W x + alpha / rank · B A x (arXiv 2106.09685), with B [out, rank] zero at first.
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
_FILE_PREFIX = "base_model.model."  # of PEFT's names in a file
# Settings of PEFT that say where an adapter is and how it was trained, besides its scale.
PLAIN = {
    "r",
    "lora_alpha",
    "base_model_name_or_path",
    "target_modules",
    "layers_to_transform",
    "layers_pattern",
}
PLAIN |= {
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


@functools.cache  # once, however many models a plan considers
def _warn(message: str) -> None:
    log.warning(message)


@WEIGHTS.register("adapter")
class Adapter(Weights):
    """The adapter alone is trained, in the precision of the frozen model."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        assert config.lora is not None
        self._lora = config.lora

    def options(self, dtype: torch.dtype) -> dict[str, Any]:
        return quantization(dtype) if self.config.quantizes else {}

    def prepare(self, model: transformers.PreTrainedModel, seed: int) -> None:
        import peft

        path = self.config.path
        settings = self._lora
        linear = [
            name for name, _ in linear_layers(model) if part_of(name) == "language"
        ]  # servers adapt no other
        known = sorted({name.rpartition(".")[2] for name in linear})
        if not known:
            raise ConfigError(
                f"model.lora: {path} has no linear layer besides its output head (GPT-2's are Conv1D, which vLLM can't "
                "adapt); leave model.lora out and train the whole model"
            )
        targets = known if settings.targets == "all-linear" else sorted(settings.targets)
        for target in targets:
            if not any(f".{name}".endswith(f".{target}") for name in linear):
                raise ConfigError(
                    f"model.lora.targets: {path} has no linear layer {target!r} besides its output head, "
                    f"only {', '.join(known)}"
                )
        if is_multimodal(model.config):  # layers of its vision tower may be called the same
            targets = [
                name
                for name in linear
                if f".{name}".endswith(tuple(f".{target}" for target in targets))
            ]
        torch.manual_seed(seed)
        made = peft.LoraConfig(
            task_type="CAUSAL_LM",
            r=settings.rank,
            lora_alpha=settings.alpha,  # type: ignore[arg-type]  # it takes any number
            target_modules=targets,
        )
        model.add_adapter(made, _NAME)
        for parameter in model.parameters():
            if parameter.requires_grad:  # PEFT made it float32; DeepSpeed keeps master weights
                parameter.data = parameter.data.to(model.dtype)
        self.adapter = AdapterConfig(
            base_model_name_or_path=str(Path(path).resolve()) if Path(path).is_dir() else path,
            r=settings.rank,
            lora_alpha=settings.alpha,
            target_modules=[published_name(model, target) for target in targets],
        )

    def notice(self, model: Any) -> None:
        parts = [
            (name, part) for name, part in model.named_parameters() if part_of(name) == "language"
        ]
        experts = sum(
            part.numel() for name, part in parts if part.ndim == 3
        )  # of all experts in one tensor
        if experts:
            share = experts / sum(part.numel() for _, part in parts)
            fact = f"the experts of {self.config.path}, {share:.0%} of its weights, are none, so they stay as they are"
            _warn(
                f"model.lora changes linear layers alone, and {fact}; leave model.lora out to train them"
            )

    @contextmanager
    def base(self, model: Any) -> Iterator[None]:
        model.disable_adapters()
        try:
            yield
        finally:
            model.enable_adapters()

    def published(self, model: Any, named: dict[str, Tensor]) -> dict[str, Tensor]:
        named = {name.replace(f".{_NAME}.", "."): tensor for name, tensor in named.items()}
        return {
            f"{_FILE_PREFIX}{published_name(model, name)}": tensor for name, tensor in named.items()
        }

    def write(
        self,
        folder: Path,
        model: Any,
        tokenizer: Any,
        published: dict[str, Tensor],
        dtype: torch.dtype,
    ) -> None:
        assert self.adapter is not None
        save(folder, self.adapter, published)

    def make_model(self, tensors: dict[str, Tensor], dtype: torch.dtype, output: Path) -> None:
        tensors = self.published(empty_model(self.config.path), tensors)
        _merge(tensors, self._lora.alpha / self._lora.rank, self.config.path, output)

    @classmethod
    def export(cls, folder: Path, output: Path, *, base: str | None) -> None:
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
        if odd := _more_than_products(values):
            advice = "merge it with PEFT's merge_and_unload"
            raise ConfigError(
                f"{folder} has {', '.join(odd)}, which is more than export computes; {advice}"
            )
        _merge(tensors, scale, path, output)


def quantization(dtype: torch.dtype) -> dict[str, Any]:
    """Return transformers' options to load frozen weights in 4 bits (QLoRA, arXiv 2305.14314)."""
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
    """Return the settings of an adapter, which PEFT may have written, that make it more than W + alpha / r · B A."""
    import peft

    usual = {**peft.LoraConfig().to_dict(), "peft_type": "LORA"}  # type: ignore[no-untyped-call]
    return sorted(
        f"{name}={values[name]}"
        for name in values.keys() - PLAIN
        if values[name] != usual.get(name)
    )


def save(folder: Path, adapter: AdapterConfig, published: dict[str, Tensor]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(published, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    (folder / manifest.ADAPTER_FILE).write_text(adapter.model_dump_json(indent=1), encoding="utf-8")


def _merge(tensors: dict[str, Tensor], scale: float, path: str, output: Path) -> None:
    """Write the model at `path` with W + scale · B A in place of W, and whole tensors as they are."""
    scores = f"{_FILE_PREFIX}{SCORE}" in tensors
    tokenizer = model_folder.examine(ModelConfig(path=path), head=None if scores else "logits")
    model = load_model(path, scores=scores, dtype="auto")
    left = dict(tensors)
    for name, parameter in model.named_parameters():
        layer = f"{_FILE_PREFIX}{published_name(model, name.removesuffix('.weight'))}"
        if f"{layer}.weight" in left:
            parameter.data.copy_(left.pop(f"{layer}.weight"))
        pair = (f"{layer}.lora_A.weight", f"{layer}.lora_B.weight")
        if not left.keys() >= set(pair):
            continue
        down, up = (left[one].float() for one in pair)
        update = up @ down * scale
        if update.shape == parameter.shape:
            parameter.data += update.to(parameter.dtype)
            del left[pair[0]], left[pair[1]]
    if left:
        raise ConfigError(
            f"the adapter was trained on another model than {path}: {min(left)!r} does not fit; "
            "name it with model.path="
        )
    with atomic_folder(output) as partial:
        generation = getattr(model, "generation_config", None)
        if generation is not None:
            model.generation_config = (
                transformers.GenerationConfig()
            )  # save_pretrained refuses some
        model.save_pretrained(partial)
        model.generation_config = generation
        write_beside(partial, model, tokenizer, path)
