"""Other kernels than PyTorch's own: those of torch.compile and Liger."""

import importlib
from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from hocket.errors import ConfigError

MAX_VARIANTS = 64  # of a compiled layer: by gradients, adapters, and sizes such as 1


def compile_layers(model: nn.Module) -> None:
    """Have torch.compile make the kernels of each decoder layer, for rows of any length."""
    layers = [part for part in model.modules() if isinstance(part, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigError(f"trainer.kernels=compile finds no layers in a {type(model).__name__}; set eager")
    _need_gpu("compile")  # on a CPU it is slower, and needs a compiler
    for layer in layers:
        layer.compile(dynamic=True, recompile_limit=MAX_VARIANTS)


def use_liger(model: Any) -> None:
    """Make a model compute with Liger's kernels, but for the loss: no logits are whole here."""
    _need_gpu("liger")
    try:
        liger: Any = importlib.import_module("liger_kernel.transformers.monkey_patch")
    except ImportError as error:
        advice = ".venv/bin/python -m pip install liger-kernel, or set eager"
        raise ConfigError(f"trainer.kernels=liger needs the package liger-kernel ({error}): {advice}") from error
    kind = model.config.model_type
    known = ", ".join(liger.MODEL_TYPE_TO_APPLY_LIGER_FN)
    if kind not in liger.MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise ConfigError(f"Liger has no kernels for models of type {kind}, only for {known}; set compile or eager")
    liger._apply_liger_kernel_to_instance(model=model, cross_entropy=False, fused_linear_cross_entropy=False)


def _need_gpu(kernels: str) -> None:
    if not torch.cuda.is_available():
        raise ConfigError(f"trainer.kernels={kernels} needs a CUDA device; set eager here")
