"""Use other kernels than PyTorch's own: those of torch.compile and of Liger."""

import importlib
from typing import Any

import torch
from transformers.modeling_layers import GradientCheckpointingLayer

from hocket.config import TrainerConfig
from hocket.errors import ConfigError, pip
from hocket.trainer.choices import Kernels, kernels

MAX_VARIANTS = 64  # of a compiled layer, which differ by gradients, adapters, and sizes such as 1


@kernels("compile")
class Compiled(Kernels):
    """torch.compile makes the kernels of each decoder layer, for rows of any length."""

    def refuse(self, config: TrainerConfig) -> None:
        if config.spreads_weights:
            stage_3 = "zero_stage=3, the default to offload"
            raise ConfigError(
                f"trainer.kernels=compile has no effect on layers of {stage_3}; set stage 2"
            )

    def apply(self, model: Any) -> None:
        layers = [part for part in model.modules() if isinstance(part, GradientCheckpointingLayer)]
        if not layers:
            raise ConfigError(
                f"trainer.kernels=compile finds no layers in a {type(model).__name__}; set eager"
            )
        _need_gpu("compile")  # on a CPU it is slower, and needs a compiler
        for layer in layers:
            layer.compile(dynamic=True, recompile_limit=MAX_VARIANTS)


@kernels("liger")
class Liger(Kernels):
    """Liger's kernels, but for the loss: no logits are whole here."""

    def apply(self, model: Any) -> None:
        _need_gpu("liger")
        try:
            liger: Any = importlib.import_module("liger_kernel.transformers.monkey_patch")
        except ImportError as error:
            advice = f"{pip()} install liger-kernel, or set eager"
            raise ConfigError(
                f"trainer.kernels=liger needs the package liger-kernel ({error}): {advice}"
            ) from error
        kind = model.config.model_type
        known = ", ".join(liger.MODEL_TYPE_TO_APPLY_LIGER_FN)
        if kind not in liger.MODEL_TYPE_TO_APPLY_LIGER_FN:
            raise ConfigError(
                f"Liger has no kernels for models of type {kind}, only for {known}; set compile or "
                "eager"
            )
        liger._apply_liger_kernel_to_instance(
            model=model, cross_entropy=False, fused_linear_cross_entropy=False
        )


def _need_gpu(name: str) -> None:
    if not torch.cuda.is_available():
        raise ConfigError(f"trainer.kernels={name} needs a CUDA device; set eager here")
