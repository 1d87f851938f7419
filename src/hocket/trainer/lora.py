"""LoRA: low-rank updates beside frozen weights, in PEFT's format. Nothing else imports peft.

An adapted layer computes W x + alpha / rank · B A x (arXiv 2106.09685); A [rank, in] is random and B [out, rank] zero
at first, so that training starts from the model as it is.
"""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from hocket.common.files import atomic_folder
from hocket.config import LoraConfig
from hocket.data import tokenizer as tokenizers
from hocket.errors import ConfigError
from hocket.protocol import AdapterConfig, manifest

WEIGHTS_FILE = "adapter_model.safetensors"
_NAME = "default"  # PEFT's name of the only adapter, a part of the parameters' names in memory


def inject(model: transformers.PreTrainedModel, config: LoraConfig, *, base: str, seed: int) -> AdapterConfig:
    """Freeze the model at the path `base` and add an adapter in its precision; names and outputs stay the same."""
    import peft

    head = model.get_output_embeddings()
    linear = [name for name, part in model.named_modules() if isinstance(part, nn.Linear) and part is not head]
    known = sorted({name.rpartition(".")[2] for name in linear})
    targets = known if config.targets == "all-linear" else sorted(config.targets)
    for target in targets:
        if not any(f".{name}".endswith(f".{target}") for name in linear):
            raise ConfigError(
                f"model.lora.targets: {base} has no linear layer {target!r} besides its output head; "
                f"it has {', '.join(known)}"
            )
    torch.manual_seed(seed)
    made = peft.LoraConfig(task_type="CAUSAL_LM", r=config.rank, lora_alpha=config.alpha, target_modules=targets)  # type: ignore[arg-type]
    peft.inject_adapter_in_model(made, model, adapter_name=_NAME)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(model.dtype)  # PEFT made them float32; DeepSpeed keeps master weights
    return AdapterConfig(
        base_model_name_or_path=str(Path(base).resolve()) if Path(base).is_dir() else base,
        r=config.rank,
        lora_alpha=config.alpha,
        target_modules=targets,
    )


def quantization(dtype: torch.dtype) -> dict[str, Any]:
    """Return transformers' options to load frozen weights in 4 bits onto this rank's GPU (QLoRA, arXiv 2305.14314)."""
    if not torch.cuda.is_available():
        raise ConfigError(
            "model.lora.quantize needs a CUDA device: bitsandbytes multiplies 4-bit weights on a GPU; leave it out here"
        )
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ConfigError(
            "model.lora.quantize needs the package bitsandbytes, which is not installed: "
            ".venv/bin/python -m pip install bitsandbytes, or leave the setting out"
        )
    settings = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )
    return {"quantization_config": settings, "device_map": {"": torch.cuda.current_device()}}


@contextmanager
def switched_off(model: nn.Module) -> Iterator[None]:
    """Context in which a model with an adapter computes as its base model; for passes without gradients."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [part for part in model.modules() if isinstance(part, BaseTunerLayer)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def published_name(name: str) -> str:
    """Return PEFT's name in a file for a parameter of the adapter."""
    return f"base_model.model.{name.replace(f'.{_NAME}.', '.')}"


def save(folder: Path, adapter: AdapterConfig, published: dict[str, Tensor]) -> None:
    """Write an adapter as PEFT does; its tensors have their published names."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(published, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    (folder / manifest.ADAPTER_FILE).write_text(adapter.model_dump_json(indent=1), encoding="utf-8")


def merge(folder: Path, output: Path, *, base: str | None = None) -> None:
    """Write the base model with an adapter merged in, W + alpha / rank · B A. `base`: its path, if it has moved."""
    import peft

    try:
        adapter = AdapterConfig.model_validate_json((folder / manifest.ADAPTER_FILE).read_text(encoding="utf-8"))
        tensors = load_file(folder / WEIGHTS_FILE)
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigError(f"{folder} is not an adapter that a run with model.lora has published: {error}") from error
    if output.exists():
        raise ConfigError(f"{output} exists already; remove it, or name another folder")
    path = base or adapter.base_model_name_or_path
    tokenizer = tokenizers.load(path)
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(path, trust_remote_code=False, dtype="auto")
    except (OSError, ValueError) as error:
        raise ConfigError(f"can't load the adapter's base model {path}: {error}; where is it? model.path=") from error
    shapes = {}
    for name, parameter in model.named_parameters():
        layer = name.removesuffix(".weight")
        shapes[f"base_model.model.{layer}.lora_A.weight"] = (adapter.r, parameter.shape[-1])
        shapes[f"base_model.model.{layer}.lora_B.weight"] = (parameter.shape[0], adapter.r)
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != shapes.get(name):
            raise ConfigError(f"the adapter was trained on another model than {path}: {name!r} does not fit")
    model = peft.PeftModel.from_pretrained(model, str(folder)).merge_and_unload()
    with atomic_folder(output) as partial:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
