"""Other kernels than PyTorch's own: those of torch.compile, Liger and, on x86 processors, oneDNN."""

import functools
import importlib
import platform
import subprocess
import sysconfig
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from hocket.errors import ConfigError

MAX_VARIANTS = 64  # of a compiled layer: by gradients, adapters, and sizes such as 1
MIN_PRODUCTS = 1 << 27  # of a layer's call; below, a kernel for one more shape costs what it saves


def use(name: str, model: Any) -> None:
    """Make a model compute with trainer.kernels, and with oneDNN where nothing is compiled."""
    if name == "liger":
        use_liger(model)
    if name == "compile":
        compile_layers(model)
    else:
        use_onednn(model)


def compile_layers(model: nn.Module) -> None:
    """Have torch.compile make the kernels of each decoder layer, for rows of any length."""
    layers = [part for part in model.modules() if isinstance(part, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigError(f"trainer.kernels=compile finds no layers in a {type(model).__name__}; set eager")
    if not torch.cuda.is_available():
        try:
            compiler = importlib.import_module("torch._inductor.cpp_builder").get_cpp_compiler()
            reading = ["-include", "Python.h", "-I", sysconfig.get_path("include"), "-x", "c++", "/dev/null"]
            subprocess.run([compiler, "-fsyntax-only", *reading], check=True, capture_output=True)
        except (RuntimeError, subprocess.CalledProcessError) as error:
            raise ConfigError(
                "trainer.kernels=compile needs a C++ compiler and Python's headers on a CPU: "
                "apt install g++ python3-dev, or set eager"
            ) from error
    for layer in layers:
        layer.compile(dynamic=True, recompile_limit=MAX_VARIANTS)


def use_liger(model: Any) -> None:
    """Make a model compute with Liger's kernels, but for its loss: no logits are whole here."""
    if not torch.cuda.is_available():
        raise ConfigError("trainer.kernels=liger needs a CUDA device; set eager here")
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


def use_onednn(model: nn.Module) -> None:
    """Make linear layers compute with oneDNN in float32 on an x86 processor.

    torch gives them to MKL, which is half as fast on a processor with AVX-512 that Intel did not make.
    """
    if platform.machine() == "x86_64":  # every build of torch for it has oneDNN
        for module in model.modules():
            if type(module) is nn.Linear:
                module.forward = functools.partial(_forward, module)  # type: ignore[method-assign]


def _forward(layer: nn.Linear, inputs: Tensor) -> Tensor:
    is_large = inputs.numel() * layer.out_features >= MIN_PRODUCTS
    is_float32 = inputs.dtype == layer.weight.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
    if is_large and is_float32 and inputs.device.type == "cpu":
        result: Tensor = _Linear.apply(inputs, layer.weight, layer.bias)  # type: ignore[no-untyped-call]
        return result
    return nn.functional.linear(inputs, layer.weight, layer.bias)


class _Linear(torch.autograd.Function):
    """inputs · weightᵀ + bias."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        return _product(inputs, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        of_inputs, of_weight, of_bias = ctx.needs_input_grad
        inputs_nh = inputs.flatten(0, -2)
        gradient_nk = gradient.flatten(0, -2)
        return (
            _product(gradient, weight.t()) if of_inputs else None,
            _product(inputs_nh.t(), gradient_nk.t()).t() if of_weight else None,
            gradient_nk.sum(dim=0) if of_bias else None,
        )


def _product(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    result: Tensor = torch.ops.mkldnn._linear_pointwise(left, right, bias, "none", [], "")
    return result
